"""Faults that a generator makes in ports, drawn by a seed; `answer` says what is said of them."""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import getsource
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn.parity import draw
from flax_attn.parity.sides.flax.side import Flax
from flax_attn.parity.sides.run import Run, RunRequest
from flax_attn.weights.known_layers import get_path
from flax_attn.weights.plan import first_paths

from ..mutations import LACKING, Mutation, mutations
from ..port import Port
from .subjects import changed, homes

# A fault counts if an output or a gradient moves by more than this, in float64.
COUNTS = 1e-6
# Files whose inputs are by name, or the same for every seed.
OTHERS = ("conv_block", "gru_encoder", "x_attention")


def blocks() -> list[Port]:
    """The subjects whose port is a class that takes nothing but `rngs`, called by place."""
    made = [
        port for home, port in homes().values() if home.__name__.rpartition(".")[2] not in OTHERS
    ]
    return [port for port in made if isinstance(port.mine, type)]


@dataclass(frozen=True)
class Fault:
    """One fault in a block's port."""

    block: Port
    mutation: Mutation

    def __str__(self) -> str:
        return f"{self.block.name}: {self.mutation}"

    @property
    def kind(self) -> str:
        return self.mutation.kind

    @property
    def wrong(self) -> Port:
        """The port with the fault in it."""
        return changed(self.block, self.mutation.source)

    def runs(self, right: Run) -> Run | None:
        """The wrong port's run if it counts: it runs, has all outputs, and moves something."""
        try:
            with np.errstate(all="ignore"):
                wrong = run(self.wrong)
        except Exception:  # a fault that does not run is none
            return None
        return wrong if moves(wrong, right) else None


@cache
def faults(name: str) -> tuple[Fault, ...]:
    """Every fault in a block's classes and functions."""
    module, port = homes()[name]
    source = getsource(module)
    return tuple(Fault(port, x) for x in mutations(source, _reached(source, port.mine.__name__)))


def _reached(source: str, name: str) -> frozenset[str]:
    """The names at the top of a module that a class uses, directly or not."""
    tops = {x.name: x for x in ast.parse(source).body if hasattr(x, "name")}
    reached, left = set(), [name]
    while left:
        one = left.pop()
        if one in tops and one not in reached:
            reached.add(one)
            left += [x.id for x in ast.walk(tops[one]) if isinstance(x, ast.Name)]
    return frozenset(reached)


def run(port: Port, seed: int = 0) -> Run:
    """The outputs, gradients and taps of a port with weights and inputs of a seed."""
    options = port.options
    call = options.get("flax_call") or (lambda module, *args: module(*args))
    constants = frozenset(options.get("constants", ()))
    train = options.get("train", False)
    request = RunRequest(port.inputs(seed), {}, seed, train, True, True, constants)
    with jax.numpy_rank_promotion("allow"):
        module = port.mine(rngs=nnx.Rngs(0))
        shapes = {path: get_path(module, path)[...].shape for path in first_paths(module)}
        weights = {k: 0.6 * draw.normal(seed, k, s) for k, s in shapes.items()}
        return Flax(module, call, request, "float64", False).run(weights)


def moves(wrong: Run, right: Run) -> bool:
    """Whether outputs or gradients of the same shapes differ, and all are finite."""
    pairs = [
        (one[name], other.get(name))
        for one, other in ((right.outputs, wrong.outputs), (right.gradients, wrong.gradients))
        for name in one
    ]
    same = right.outputs.keys() == wrong.outputs.keys()
    same = same and right.gradients.keys() == wrong.gradients.keys()
    if not same or any(y is None or x.shape != y.shape or x.dtype != y.dtype for x, y in pairs):
        return False
    if not all(np.isfinite(y).all() for x, y in pairs if np.isfinite(x).all()):
        return False
    return any(differ(x, y) for x, y in pairs)


def differ(x: np.ndarray, y: np.ndarray, limit: float = COUNTS) -> bool:
    """Whether two arrays differ by more than a limit, measured by the first's norm."""
    if x.shape != y.shape or x.dtype.kind not in "fc":
        return x.shape != y.shape or not np.array_equal(x, y)
    finite = np.isfinite(x) & np.isfinite(y)
    gap = np.linalg.norm(np.where(finite, x - y, 0.0))
    return bool((np.isfinite(x) != np.isfinite(y)).any() or gap > limit * np.linalg.norm(x))


def drawn(
    ports: Sequence[Port], count: int, seed: int, lacking: float = 0.3
) -> Iterator[tuple[Fault, Run, Run]]:
    """Yields faults with the right port's run and the wrong one's, blocks and kinds in turn.

    A share of them, `lacking`, is of kinds that the catalogue of the search lacks.
    """
    rng = np.random.RandomState(seed)
    queues = [(_in_turn(p, rng, False), _in_turn(p, rng, True), run(p)) for p in ports]
    made, others, turn = 0, 0, 0
    while made < count and queues:
        usual, strange, right = queues[turn % len(queues)]
        wanted = strange if others < lacking * (made + 1) and strange else usual
        fault, wrong = _next(wanted, right)
        if fault is None or wrong is None:
            queues.pop(turn % len(queues))
            continue
        made, turn, others = made + 1, turn + 1, others + (fault.kind in LACKING)
        yield fault, right, wrong


def _in_turn(port: Port, rng: np.random.RandomState, lacking: bool) -> list[Fault]:
    """The faults of a block, one of each kind in turn, the last first."""
    by_kind: dict[str, list[Fault]] = {}
    known = [fault for fault in faults(port.name) if (fault.kind in LACKING) is lacking]
    for i in rng.permutation(len(known)):
        by_kind.setdefault(known[i].kind, []).append(known[i])
    kinds = list(by_kind)
    rng.shuffle(kinds)
    turns = range(max(map(len, by_kind.values()), default=0))
    order = [by_kind[kind][i] for i in turns for kind in kinds if i < len(by_kind[kind])]
    return order[::-1]


def _next(known: list[Fault], right: Run) -> tuple[Fault | None, Run | None]:
    """The next fault that counts, and its run; removed from the list with those that do not."""
    while known:
        fault = known.pop()
        wrong = fault.runs(right)
        if wrong is not None:
            return fault, wrong
    return None, None


def functions(
    name: str, function: str, kind: Callable[..., Iterator[Mutation]], seed: int
) -> Iterator[Port]:
    """A JAX function with faults or rewrites in the order of a seed, those that run.

    Of the faults only those that count.
    """
    module, port = homes()[name]
    right, made = results(port), list(kind(getsource(module), frozenset([function])))
    np.random.RandomState(seed).shuffle(made)
    for mutation in made:
        wrong = replace(changed(port, mutation.source), name=f"{name}, {mutation}")
        try:
            found = results(wrong)
        except Exception:  # a fault that does not run is none
            continue
        pairs = list(zip(right, found, strict=False))
        sound = len(found) == len(right)
        sound = sound and all(x.shape == y.shape and np.isfinite(y).all() for x, y in pairs)
        if kind is not mutations or (sound and any(differ(x, y) for x, y in pairs)):
            yield wrong


def results(port: Port) -> list[np.ndarray]:
    """The outputs and gradients of a function in float64, in one program."""
    with jax.enable_x64(True):
        given = [jnp.asarray(x) for x in port.inputs(0)]
    floats = [i for i, x in enumerate(given) if x.dtype.kind == "f"]

    @jax.jit
    def both(*changed: Any) -> Any:
        def call(*xs: Any) -> Any:
            arrays = dict(zip(floats, xs, strict=True))
            return port.mine(rngs=None)(*(arrays.get(i, x) for i, x in enumerate(given)))

        out, back = jax.vjp(call, *changed)
        cotangent = lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)  # noqa: E731
        return out, back(jax.tree.map(cotangent, out))

    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        return [np.asarray(x) for x in jax.tree.leaves(both(*(given[i] for i in floats)))]
