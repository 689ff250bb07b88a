"""The first side of a comparison as a JAX function or an nnx module."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from ....errors import ParityError
from ....weights.described import Source
from ....weights.known_layers import flax_params, flax_state, flax_values
from ....weights.plan import Plan, first_paths
from ... import draw, judge
from ...side_names import worded
from ..calls import Function, errors_of, name_of
from ..flax.side import Flax, NotWide
from ..original import Arrays, Part, Stepped
from ..run import Call, Run, RunRequest, fit_mask, is_floating, narrowed
from ..tape import Tape
from ..torch.noise import RUNS as NOISY
from .evaluate import NARROW, SINGLE, Evaluation, lifted_in
from .operations import is_tensor
from .tape import tape_of


@dataclass(frozen=True)
class JaxOriginal:
    """An `Original` backed by JAX: the same runner as the second side's, in other dtypes.

    Attributes:
      module: an nnx module, or a function as one without weights; never modified.
      call: function that calls it.
      request: the call's arguments, and what to compute.
      values: weights by path; if empty, its own.
    """

    module: nnx.Module
    call: Callable[..., Any]
    request: RunRequest
    values: Arrays = field(default_factory=dict)
    keeps: None = None
    dtypes: tuple[str, ...] = ("float64", "float32")
    training: tuple[None, int] = (None, 1)
    versions: Mapping[str, str] = field(default_factory=dict)
    dropouts: tuple[str, ...] = ()
    library: Literal["jax"] = "jax"

    @property
    def name(self) -> str:
        return name_of(self.module)

    @property
    def draws_alone(self) -> bool:
        """Whether its dropout draws from the keys that it has: a function's, and in eval mode."""
        return not self.request.train or isinstance(self.module, Function)

    @property
    def notes(self) -> list[str]:
        return []

    @property
    def weights(self) -> Literal["random", "as_is"]:
        return "random" if self.sources else "as_is"

    @property
    def sources(self) -> list[Source]:
        params, first = flax_params(self.module), first_paths(self.module)
        return [
            Source(
                path,
                "Parameter" if path in params else "buffer",
                tuple(np.shape(x.get_value())),
                str(x.get_value().dtype),
                "" if first.get(path, path) == path else first[path],
            )
            for path, x in flax_state(self.module).items()
        ]

    @property
    def parts(self) -> list[str]:
        return [".".join(map(str, path)) for path, _ in nnx.iter_modules(self.module) if path]

    @property
    def modules(self) -> Mapping[str, Part]:
        """Empty: settings of layers are compared with torch's only."""
        return {}

    @property
    def trained(self) -> Mapping[str, bool | None]:
        return dict.fromkeys(flax_params(self.module), True)

    def check(self, options: Any) -> None:
        if options.optimizer is not None:
            raise ParityError(
                "optimizer= compares torch.optim with optax; two JAX sides would take the same "
                "steps: leave it out, gradients are compared."
            )
        if options.rules:
            raise ParityError(
                "rules= map a torch module's weights; two JAX modules exchange weights by equal "
                'paths: leave it out, or weights="as_is" keeps those that each side has.'
            )

    def stored(self) -> Arrays:
        """The module's own weights and other arrays by path."""
        return flax_values(self.module)

    def with_weights(self, strategy: str, plan: Plan | None) -> "JaxOriginal":
        drawn = draw.parameters(self.request.seed, self.sources) if strategy == "random" else {}
        return replace(self, values={**self.stored(), **drawn})

    def with_output(self, name: str) -> "JaxOriginal":
        return replace(self, request=replace(self.request, output=name))

    def run(self, dtype: str, keeps: Sequence[np.ndarray]) -> tuple[Run, Run]:
        run = self.alone(dtype, keeps)
        return run, run if dtype == "float64" else self.truth(dtype, keeps)

    def alone(self, dtype: str, keeps: Sequence[np.ndarray] | None) -> Run:
        """Runs it in `dtype`; if `keeps` is None its dropout draws its own masks."""
        return self._run(dtype, keeps, dtype, Evaluation(lifted_in(dtype)))

    def truth(self, dtype: str, keeps: Sequence[np.ndarray] | None) -> Run:
        """Runs it in float64 throughout, with weights and inputs rounded to `dtype`."""
        return self._run(dtype, keeps, "float64", Evaluation(NARROW))

    def noisy(self, dtype: str, keeps: Sequence[np.ndarray]) -> Iterator[Run]:
        for seed in range(NOISY):
            yield self._run(dtype, keeps, dtype, Evaluation(lifted_in(dtype), seed))

    def buffers(self) -> Arrays:
        """Empty: no buffer of JAX is rounded before the module is cast."""
        return {}

    def with_buffers(self, values: Arrays) -> None:
        """Returns None: there are no buffers."""

    def quick(self, keeps: Sequence[np.ndarray]) -> Run:
        return replace(self, request=replace(self.request, grads=False)).alone("float64", keeps)

    def program(self, truth: Run) -> Tape | None:
        """Its operations as torch's; None without torch, or if those give other values."""
        tape = None if find_spec("torch") is None else self._tape(truth)
        return tape if tape and _gives(tape, self.quick(truth.keeps)) else None

    def _tape(self, truth: Run) -> Tape:
        keeps = None if self.draws_alone else truth.keeps
        options = "float64", True, None, keeps, Evaluation(SINGLE)
        side = Flax(self.module, self.call, self.request, *options)
        program, shapes, arrays = side.traced(self._weights_in("float64"))
        params, floats, *_ = arrays
        named = {f"parameter {k}": x for k, x in params.items()}
        named |= {f"input {k}": x for k, x in floats.items()}
        with jax.enable_x64(True):
            tape, outs = tape_of(program, named, self.request.arrays(), jax.tree.leaves(arrays))
        outputs, rest = jax.tree.unflatten(jax.tree.structure(shapes), outs)
        _mark(tape, "output ", {**outputs, **rest["exact"]})
        _mark(tape, "tap ", rest.get("taps", {}))
        _mark(tape, "state ", rest["state"])
        for name, xs in rest.get("inputs", {}).items():
            _mark(tape, "argument ", {f"{i} {name}": x for i, x in enumerate(xs)})
        return tape

    def steps(self, optimizer: Any, count: int, keeps: Sequence[np.ndarray]) -> Iterator[Stepped]:
        """Yields nothing: `check` refuses optimizers."""
        yield from ()

    def decoded(self, decode: Any, cuts: Sequence[Any], dtype: str) -> tuple[dict, dict]:
        """Returns no steps: those of the second side are compared with its full forward pass."""
        if decode.torch is not None:
            raise ParityError(
                "Decode(torch=) is a step of a torch module; the first side here is JAX's: leave "
                "it out, and steps are compared with the first side's full forward pass."
            )
        return {}, {}

    def _weights_in(self, dtype: str) -> Arrays:
        """Its weights in `dtype`: two paths of one Param are one, which has the first as a name."""
        first, values = first_paths(self.module), narrowed(self.values, dtype)
        return {path: x for path, x in values.items() if first.get(path, path) == path}

    def _run(
        self,
        dtype: str,
        keeps: Sequence[np.ndarray] | None,
        made_in: str,
        evaluation: Evaluation,
    ) -> Run:
        """Runs it in `made_in` with weights and inputs rounded to `dtype`."""
        values = self._weights_in(dtype)
        # Masks are carried between modules that train; a function draws from the key it is given.
        keeps = None if self.draws_alone else keeps
        request = self.request.in_dtype(dtype)
        side = Flax(self.module, self.call, request, made_in, True, None, keeps, evaluation)
        with errors_of("the first side", self.name, made_in, self.call):
            try:
                run = side.run(values)
                run = side.concrete(run) if dtype == "float64" else run
            except NotWide:
                if made_in == dtype:
                    raise
                run = None
            # Random numbers of another width are other numbers.
            by_itself = made_in != dtype and self.draws_alone
            if run is None or (by_itself and run.findings["random"]):
                # Traced as it runs in `dtype`, and every operation of that in float64.
                options = dtype, True, None, keeps, evaluation
                run = Flax(self.module, self.call, request, *options).run(values)
        if self.draws_alone:
            run.forget_masks()
        # A run with noise repeats the masks that were used, not those drawn.
        run.keeps = _repeated(run.keeps, keeps or ())
        run.calls = {name: _call(run, name) for name in run.taps}
        # The runner speaks of Flax; in a report that is the second side.
        run.notes = [worded(note, ("Flax", "torch")) for note in run.notes]
        return run


def _repeated(drawn: Sequence[np.ndarray], keeps: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The masks of a run: those that it was given, where they fit, else those it drew."""
    fitted = [fit_mask(keep, mask.shape) for keep, mask in zip(keeps, drawn, strict=False)]
    fitted += [None] * (len(drawn) - len(fitted))
    return [mask if keep is None else keep for keep, mask in zip(fitted, drawn, strict=True)]


def _call(run: Run, tap: str) -> Call:
    """What a tap was computed from: a submodule's arguments; of a point, nothing is known."""
    if tap not in run.inputs:
        return Call(tap.rpartition(".")[2].partition("#")[0])
    return Call("", {str(i): x for i, x in enumerate(run.inputs[tap])})


def _mark(tape: Tape, kind: str, values: Mapping[str, Any]) -> None:
    """Names values on a tape."""
    for name, x in values.items():
        if is_tensor(x):
            tape.mark(f"{kind}{name}", x)


def _gives(tape: Tape, truth: Run) -> bool:
    """Whether a tape has the outputs of a run."""
    marked = {k: tape.marks.get(f"output {k}") for k, x in truth.outputs.items() if is_floating(x)}
    return all(
        number is not None
        and judge.same_function(tape.values[number].numpy(), truth.outputs[name]).ok
        for name, number in marked.items()
    )
