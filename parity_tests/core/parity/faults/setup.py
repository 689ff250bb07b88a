"""A trial: which pair, which parts of the port are replaced, which weights edited; its report."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn.parity import Report, compare, draw, port
from flax_attn.parity.port import flax_values, set_flax
from flax_attn.parity.torch_module import describe, write

from ..schema import validated
from . import trial_flax, trial_torch
from .sizes import APART, SQUARE, Sizes

Pair = Literal["apart", "square", "step", "statistics", "apart, one layer", "square, one layer"]
PAIRS = {
    "apart": ("Model", APART),
    "square": ("Model", SQUARE),
    "step": ("Step", APART),
    "statistics": ("Statistics", APART),
    "apart, one layer": ("Model", replace(APART, L=1)),
    "square, one layer": ("Model", replace(SQUARE, L=1)),
}
LOW = 1e-4


@dataclass(frozen=True)
class Setup:
    """One pair to compare.

    Attributes:
      pair: "apart" (no two sizes agree), "square" (every matrix square, T == S), "step" (one token
        with a ring cache) or "statistics" (batch normalisation).
      parts: path of a module, name of its part, what takes its place; modules below it too.
      edit: of Flax's weights by path after a right port, given the sizes; what it returns is set.
      torch_call, flax_call: in place of the plain call.
      build: changes the Flax module before anything else.
      options: of `compare`.
      deep: whether it needs the second layer.
    """

    pair: Pair = "apart"
    parts: tuple[tuple[str, str, Callable], ...] = ()
    edit: Callable[[dict, Sizes], dict] | None = None
    torch_call: Callable | None = None
    flax_call: Callable | None = None
    build: Callable[[nnx.Module], nnx.Module] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    deep: bool = False

    def shallow(self) -> "Setup":
        """The same with one layer, where that is enough."""
        deep = self.deep or any(at.startswith("layers.1") for at, *_ in self.parts)
        pair: Any = f"{self.pair}, one layer"
        return replace(self, pair=pair) if pair in PAIRS and not deep else self

    @property
    def sizes(self) -> Sizes:
        return PAIRS[self.pair][1]

    def inputs(self) -> dict[str, np.ndarray]:
        z = self.sizes
        if self.pair == "step":
            return z.step_inputs()
        if self.pair == "statistics":
            return {"x": z.inputs()["memory"][0]}
        return z.inputs()

    def modules(self, seed: int | None = 0) -> tuple[Any, nnx.Module]:
        """Torch's module, with random weights or (None) its default ones, and Flax's, at fault."""
        theirs, ours = torch_module(self.pair, seed), flax_module(self.pair)
        ours = port(theirs, ours)
        if self.edit is not None:
            ours = nnx.clone(ours)
            values = {path: x.astype(np.float64) for path, x in flax_values(ours).items()}
            with jax.enable_x64(True):
                set_flax(ours, self.edit(values, self.sizes), np.float64)
        ours = ours if self.build is None else self.build(nnx.clone(ours))
        return theirs, self.plant(ours)

    def plant(self, module: nnx.Module) -> nnx.Module:
        """`module` with this setup's parts, and no others."""
        for path, part in nnx.iter_modules(module):
            if hasattr(type(part), "parts"):
                name = ".".join(map(str, path))
                found = {k: f for at, k, f in self.parts if f"{name}.".startswith(at)}
                part.parts = replace(trial_flax.RIGHT, **found) if found else trial_flax.RIGHT
        return module

    def report(self, seed: int | None = 0, **options: Any) -> Report:
        """The comparison, in float64 and eagerly, weights as this setup leaves them."""
        theirs, ours = self.modules(seed)
        quick: dict[str, Any] = {"dtypes": ("float64",), "jit": False}
        quick |= {"weights": "given" if self.edit is None else "as_is"}
        calls = {"torch_call": self.torch_call, "flax_call": self.flax_call}
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            options = quick | calls | dict(self.options) | options
            return validated(compare(theirs, ours, kwargs=self.inputs(), **options))


@cache
def torch_module(pair: str, seed: int | None) -> Any:
    """The original with random weights; with torch's own at first if `seed` is None."""
    trial_torch.torch.manual_seed(0)
    name, sizes = PAIRS[pair]
    module = getattr(trial_torch, name)(sizes)
    if seed is not None:
        write(module, draw.parameters(seed, describe(module)))
    return module.eval()


@cache
def flax_module(pair: str) -> nnx.Module:
    """The port, weights still its own; `Setup.plant` and `port` set it anew each time."""
    name, sizes = PAIRS[pair]
    return getattr(trial_flax, name)(sizes, nnx.Rngs(0))


def mixed(right: Callable, wrong: Callable) -> Callable:
    """`right` with a 1e-4 of `wrong`; of what is not floating, the first row that differs."""
    return lambda *args: jax.tree.map(_mix, right(*args), wrong(*args))


def one(right: Callable, wrong: Callable) -> Callable:
    """`right`, and `wrong` in the first sequence's last row or head alone."""

    def part(a, b):
        return a.at[(0, -1)[: a.ndim]].set(b[(0, -1)[: a.ndim]].astype(a.dtype))

    return lambda *args: jax.tree.map(part, right(*args), wrong(*args))


def _mix(a: Any, b: Any) -> Any:
    a, b = jnp.asarray(a), jnp.asarray(b)
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return first_row(a, b)
    finite = jnp.isfinite(a) & jnp.isfinite(b)
    zero = jnp.zeros((), a.dtype)
    near = a + LOW * (jnp.where(finite, b, zero) - jnp.where(finite, a, zero)).astype(a.dtype)
    return near


def first_row(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a`, and `b` in the first row where they differ."""
    a, b = jnp.broadcast_arrays(a, b)
    rows = (a != b).any(-1)
    first = (jnp.cumsum(rows.ravel()) == 1).reshape(rows.shape) & rows
    return jnp.where(first[..., None], b, a)
