"""One set of weights in every layer's own layout, and every layer's gradients back in that of one.

The set is `query, key, value, out`, each a `weight`, `(in, out)`, and a `bias`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from einops import rearrange

from .workload import PROJECTIONS

THREE = PROJECTIONS[:3]


class Piece(NamedTuple):
    """`pattern` leads from the set's tensors, stacked if several, to a layer's, stacked too."""

    names: tuple[str, ...]
    pattern: str
    paths: tuple[str, ...]


Layout = Sequence[Piece]


def lay_out(layout: Layout, arrays: Mapping[str, Any], **sizes: int) -> dict[str, Any]:
    """The set as a layer has it, by the layer's paths."""
    found: dict[str, Any] = {}
    for names, pattern, paths in layout:
        found |= _turn([arrays[name] for name in names], pattern, paths, sizes)
    return found


def gather(layout: Layout, grads: Mapping[str, Any], **sizes: int) -> dict[str, Any]:
    """A layer's gradients as the set has them, by the set's names."""
    found: dict[str, Any] = {}
    for names, pattern, paths in layout:
        back = " -> ".join(reversed(pattern.split(" -> ")))
        found |= _turn([grads[path] for path in paths], back, names, sizes)
    return found


def _turn(given: Sequence[Any], pattern: str, names: Sequence[str], sizes: Any) -> dict[str, Any]:
    sizes = {"c": len(THREE), **sizes}
    known = {k: v for k, v in sizes.items() if k in pattern.translate(_NO_BRACKETS).split()}
    one = given[0] if len(given) == 1 else _stack(given)
    turned = rearrange(one, pattern, **known)
    return dict(zip(names, [turned] if len(names) == 1 else turned, strict=True))


_NO_BRACKETS = str.maketrans("()", "  ")


def _stack(given: Sequence[Any]) -> Any:
    if isinstance(given[0], np.ndarray):
        return np.stack(given)
    return jnp.stack(given)


def separate(paths: Sequence[str], weight: str, turned: bool) -> Layout:
    """Four projections apart, each a weight, `(out, in)` if turned, and a bias."""
    pattern = "i o -> o i" if turned else "i o -> i o"
    pairs = list(zip(PROJECTIONS, paths, strict=True))
    return [
        *(Piece((f"{name}.weight",), pattern, (f"{path}.{weight}",)) for name, path in pairs),
        *(Piece((f"{name}.bias",), "o -> o", (f"{path}.bias",)) for name, path in pairs),
    ]


def combined(weight: str, bias: str, out: str, kernel: str, turned: bool) -> Layout:
    """Queries, keys and values out of one projection: paths of weight and bias; and `out`."""
    into = "(c o) i" if turned else "i (c o)"
    return [
        Piece(tuple(f"{name}.weight" for name in THREE), f"c i o -> {into}", (weight,)),
        Piece(tuple(f"{name}.bias" for name in THREE), "c o -> (c o)", (bias,)),
        Piece(("out.weight",), "i o -> o i" if turned else "i o -> i o", (f"{out}.{kernel}",)),
        Piece(("out.bias",), "o -> o", (f"{out}.bias",)),
    ]


def einsum(out: str, kernel: str, turned: bool) -> Layout:
    """`W_query` of shape `(out, in)`, `b_query`, ...; and `out_proj`."""
    return [
        *(Piece((f"{name}.weight",), "i o -> o i", (f"W_{name}",)) for name in THREE),
        *(Piece((f"{name}.bias",), "o -> o", (f"b_{name}",)) for name in THREE),
        Piece(("out.weight",), "i o -> o i" if turned else "i o -> i o", (f"{out}.{kernel}",)),
        Piece(("out.bias",), "o -> o", (f"{out}.bias",)),
    ]


def wrapper(heads: int, first: str, out: str, kernel: str, turned: bool) -> Layout:
    """Heads apart, each with three projections; and `out`."""
    into = "(n h) i" if turned else "i (n h)"
    apart = "n h i" if turned else "n i h"

    def paths(name: str, kind: str) -> tuple[str, ...]:
        return tuple(f"{first}.heads.{n}.W_{name}.{kind}" for n in range(heads))

    pattern = f"i (n h) -> {apart}" if heads > 1 else f"i (n h) -> {into}"
    bias = "(n h) -> n h" if heads > 1 else "(n h) -> (n h)"
    return [
        *(Piece((f"{name}.weight",), pattern, paths(name, kernel)) for name in THREE),
        *(Piece((f"{name}.bias",), bias, paths(name, "bias")) for name in THREE),
        Piece(("out.weight",), "i o -> o i" if turned else "i o -> i o", (f"{out}.{kernel}",)),
        Piece(("out.bias",), "o -> o", (f"{out}.bias",)),
    ]


def by_heads() -> Layout:
    """flax.nnx's: kernels of shape `(in, heads, width)`, and `(heads, width, out)` at the end."""
    return [
        *(Piece((f"{name}.weight",), "i (n h) -> i n h", (f"{name}.kernel",)) for name in THREE),
        *(Piece((f"{name}.bias",), "(n h) -> n h", (f"{name}.bias",)) for name in THREE),
        Piece(("out.weight",), "(n h) o -> n h o", ("out.kernel",)),
        Piece(("out.bias",), "o -> o", ("out.bias",)),
    ]
