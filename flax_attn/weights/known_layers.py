"""Known pairs of torch and Flax layers, with the target and layout of each parameter.

`PAIRS[kind][flax class]` maps each of torch's parameter names to its targets and layout. nnx has no
Bilinear and no multi-layer GRU or LSTM: a Bilinear's `weight` maps to a Param of that name, and the
layers of a GRU, LSTM or RNN map to cells, or to Params of a user's module, by a `Rule`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .described import Source
from .gates import ORDER
from .in_order import defined
from .parametrized import not_removed

RECURRENT = ("RNN", "GRU", "LSTM")
NORMS = ("LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm", "BatchNorm")


class Place(NamedTuple):
    """Targets of a tensor relative to the Flax module, and its layout (None: unchanged)."""

    targets: tuple[str, ...]
    layout: str | None = None
    sizes: Mapping[str, int] = MappingProxyType({})


Roles = Mapping[str, Place]


def _to(targets: str, layout: str | None = None, **sizes: int) -> Place:
    return Place(tuple(targets.split()), layout, sizes)


_TRANSPOSE = "o i -> i o"
_BIAS = {"bias": _to("bias")}
_LINEAR = {"weight": _to("kernel", _TRANSPOSE), **_BIAS}
_NORM = {"weight": _to("scale"), **_BIAS}
_STATISTICS = {"running_mean": _to("mean"), "running_var": _to("var")}
_DENSE = {
    "weight_ih": _to("dense_i.kernel", _TRANSPOSE),
    "weight_hh": _to("dense_h.kernel", _TRANSPOSE),
    "bias_ih": _to("dense_i.bias"),
    "bias_hh": _to("dense_h.bias"),
}
_GATES = {
    "weight_ih": _to("ii.kernel if_.kernel ig.kernel io.kernel", "(n o) i -> n i o"),
    "weight_hh": _to("hi.kernel hf.kernel hg.kernel ho.kernel", "(n o) i -> n i o"),
    "bias_ih": _to("ii.bias if_.bias ig.bias io.bias", "(n o) -> n o"),
    "bias_hh": _to("hi.bias hf.bias hg.bias ho.bias", "(n o) -> n o"),
}
# nn.MultiheadAttention -> three Linear layers of these names; its out_proj is a Linear itself.
_THREE = {
    "in_proj_weight": _to("q_proj.kernel k_proj.kernel v_proj.kernel", "(n o) i -> n i o"),
    "in_proj_bias": _to("q_proj.bias k_proj.bias v_proj.bias", "(n o) -> n o"),
    **{f"{p}_weight": _to(f"{p}.kernel", _TRANSPOSE) for p in ("q_proj", "k_proj", "v_proj")},
}


def _general(layer: nnx.LinearGeneral, out_first: bool = True) -> Roles:
    """Returns the roles of a LinearGeneral; empty if its axes are permuted or batched."""
    if layer.batch_axis or list(layer.axis) != sorted(layer.axis):
        return {}
    ins = {f"i{k}": size for k, size in enumerate(layer.in_features)}
    outs = {f"o{k}": size for k, size in enumerate(layer.out_features)}
    i, o = " ".join(ins), " ".join(outs)
    left = f"({o}) ({i})" if out_first else f"({i}) ({o})"
    weight = _to("kernel", f"{left} -> {i} {o}", **ins, **outs)
    return {"weight": weight, "bias": _to("bias", f"({o}) -> {o}", **outs)}


def _conv_transpose(layer: nnx.ConvTranspose) -> Roles:
    """Returns the roles of a ConvTranspose; the kernel is flipped unless `transpose_kernel`."""
    # Torch computes the gradient of a convolution, which nnx does only with `transpose_kernel`.
    layout = "i o ... -> ... o i" if layer.transpose_kernel else "i o ... -> ~... i o"
    return {"weight": _to("kernel", layout), **_BIAS}


def _heads(layer: nnx.MultiHeadAttention) -> Roles:
    n = layer.num_heads
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
    return {
        "in_proj_weight": _to("query.kernel key.kernel value.kernel", "(n h d) i -> n i h d", h=n),
        "in_proj_bias": _to("query.bias key.bias value.bias", "(n h d) -> n h d", h=n),
        **{f"{p}_weight": _to(f"{t}.kernel", "(h d) i -> i h d", h=n) for p, t in names.items()},
        "out_proj.weight": _to("out.kernel", "o (h d) -> h d o", h=n),
        "out_proj.bias": _to("out.bias"),
    }


PAIRS: dict[str, dict[type, Roles | Callable[[Any], Roles]]] = {
    "Linear": {nnx.Linear: _LINEAR, nnx.LinearGeneral: _general},
    "Conv1D": {
        nnx.Linear: {"weight": _to("kernel"), **_BIAS},
        nnx.LinearGeneral: lambda layer: _general(layer, out_first=False),
    },
    "Embedding": {nnx.Embed: {"weight": _to("embedding")}},
    "Conv": {nnx.Conv: {"weight": _to("kernel", "o i ... -> ... i o"), **_BIAS}},
    "ConvTranspose": {nnx.ConvTranspose: _conv_transpose},
    "LayerNorm": {nnx.LayerNorm: _NORM},
    "RMSNorm": {nnx.RMSNorm: {"weight": _to("scale")}},
    "GroupNorm": {nnx.GroupNorm: _NORM},
    "InstanceNorm": {nnx.InstanceNorm: _NORM},
    "BatchNorm": {nnx.BatchNorm: {**_NORM, **_STATISTICS}},
    "PReLU": {nnx.PReLU: {"weight": _to("negative_slope", "1 -> ")}},
    "MultiheadAttention": {nnx.MultiHeadAttention: _heads, nnx.Module: _THREE},
    "RNNCell": {nnx.SimpleCell: _DENSE},
    "GRUCell": {nnx.GRUCell: _DENSE},
    "LSTMCell": {nnx.OptimizedLSTMCell: _DENSE, nnx.LSTMCell: _GATES},
    "Bilinear": {},
}
LAYERS = tuple({cls for classes in PAIRS.values() for cls in classes} - {nnx.Module})


def place(kind: str, role: str, layer: Any) -> Place | None:
    """Returns the place of `role` of a torch module `kind` in a Flax layer; None if unknown."""
    kind = cell_of(kind, role)
    for cls, roles in PAIRS.get(kind, {}).items():
        if isinstance(layer, cls) or (kind in NORMS[:2] and _is_foreign_norm(layer)):
            return (roles(layer) if callable(roles) else roles).get(role)
    return None


def _is_foreign_norm(layer: Any) -> bool:
    """Whether a user's own module looks like a norm: a `scale`, at most a `bias`, nothing else.

    The comparison shows whether it computes the same norm.
    """
    is_foreign = isinstance(layer, nnx.Module) and not isinstance(layer, LAYERS)
    state = set(flax_state(layer)) if is_foreign else set()
    return "scale" in state and state <= {"scale", "bias"}


def roles_of(layer: Any) -> tuple[str, Roles]:
    """Returns the torch kind that corresponds to a Flax layer, and its roles; "" if unknown.

    nnx.Linear corresponds to torch's Linear and to transformers' Conv1D, whose matrices are
    transposed; it is reported as Linear.
    """
    for kind, classes in PAIRS.items():
        for cls, roles in classes.items():
            if cls is not nnx.Module and isinstance(layer, cls):
                return kind, roles(layer) if callable(roles) else roles
    for kind in NORMS[:2]:
        if type(layer).__name__.endswith(kind):
            return kind, _NORM
    return "", {}


def kind_of(layer: Any, role: str) -> str:
    """Returns the torch kind of a tensor from the Flax layer and role that it maps to."""
    kind, roles = roles_of(layer)
    if role in roles:
        return kind
    packed = role in _THREE and isinstance(layer, nnx.Module)
    return "MultiheadAttention" if packed else "Parameter"


def becomes(kind: str, role: str) -> tuple[type, str] | None:
    """Returns the Flax layer that corresponds to `kind`, and the name of `role` there."""
    for cls, roles in PAIRS.get(kind, {}).items():
        if callable(roles):
            return (cls, {"weight": "kernel"}.get(role, role)) if role in _LINEAR else None
        return (cls, " ".join(roles[role].targets)) if role in roles else None
    return None


def cell_of(kind: str, role: str) -> str:
    """Returns the cell's kind if a rule gave a recurrent network's tensor a cell's name."""
    return f"{kind}Cell" if kind in RECURRENT and role in _DENSE else kind


def refusal(source: Source, layer: Any, path: str, module: nnx.Module) -> str | None:
    """Explains why a tensor of a known type cannot be mapped, and what to do; None if unknown.

    Args:
      source: the torch tensor.
      layer: the Flax module at its owner's path, or None.
      path: the intended target.
      module: the whole Flax module.
    """
    kind, name = source.kind, source.name
    owner, _, role = name.rpartition(".")
    if (computed := not_removed(name)) is not None:
        return computed
    if kind in RECURRENT and cell_of(kind, path.rpartition(".")[2]) == kind:
        return _no_network(kind, owner, module)
    if kind == "Bilinear" and role == "weight":
        return (
            f"{name} {list(source.shape)} belongs to a Bilinear, which nnx does not have: hold it "
            f"as a Param `weight` of torch's shape, or say "
            f'Rule("{name} -> ...", "o i j -> ...").'
        )
    if kind == "MultiheadAttention" and role in ("bias_k", "bias_v") and layer is not None:
        return f"{name}: {a(layer)} has no {role}; torch needs add_bias_kv=False."
    if kind == "InstanceNorm" and role.startswith("running_"):
        return f"{name}: nnx.InstanceNorm has no statistics; torch needs track_running_stats=False."
    return _no_bias(name, layer)


def _no_network(kind: str, owner: str, module: nnx.Module) -> str:
    """Explains how to map a whole GRU, LSTM or RNN to nnx's cells, or to a user's own Params."""
    dot = f"{owner}." if owner else ""
    what = f"{owner or 'the module'} is a torch {kind}, and"
    cells = tuple(PAIRS[f"{kind}Cell"])
    if any(isinstance(get_path(module, at), cells) for at in ("", *defined(module))):
        return (
            f"{what} nnx has cells, one for each layer: "
            f'say Rule("{dot}*_l0 -> path.of.the.cell.*") for each layer and direction.'
        )
    gates = ",".join(ORDER[kind])
    to, layout = (f"path.{{{gates}}}", "(n o) i -> n i o") if gates else ("path", "o i -> i o")
    rows = f", whose rows are the gates {gates.replace(',', ', ')} in this order" if gates else ""
    bias = '"(n o) -> n o"' if gates else "no layout"
    return (
        f"{what} Flax has no nnx.{cells[0].__name__} for it: say a Rule for each of weight_ih_l0 "
        f'and weight_hh_l0{rows}, as Rule("{dot}weight_ih_l0 -> {to}.kernel", "{layout}"), and for '
        f"their biases with {bias}."
    )


def no_groups(source: Source, layer: Any) -> str | None:
    """Explains why a grouped transposed convolution cannot be mapped; None for other layers."""
    if not isinstance(layer, nnx.ConvTranspose) or source.kind != "ConvTranspose":
        return None
    if len(source.shape) < 2 or layer.out_features in (source.shape[1], 0):
        return None
    groups, rest = divmod(layer.out_features, source.shape[1])
    if rest or not source.name.endswith("weight"):
        return None
    return (
        f"{source.name} {list(source.shape)} has {groups} groups for {layer.out_features} outputs, "
        f"and nnx.ConvTranspose has none: hold one nnx.ConvTranspose for each group."
    )


def _no_bias(name: str, layer: Any) -> str | None:
    """Explains why a second bias of a recurrent cell cannot be mapped; None for other tensors."""
    # Torch's cells have two biases, nnx's one: their sum could not be split again.
    role = name.rpartition(".")[2].partition("_l")[0]
    if role not in ("bias_ih", "bias_hh") or not isinstance(layer, nnx.RNNCellBase):
        return None
    if isinstance(layer, nnx.LSTMCell):
        parts = "ii, if_, ig and io" if role == "bias_ih" else "hi, hf, hg and ho"
    else:
        parts = "dense_i" if role == "bias_ih" else "dense_h"
    return (
        f"{name} has no place: nnx.{type(layer).__name__} is built with one bias, and the sum of "
        f"torch's two could not be carried back. Replace its {parts} by nnx.Linear with a bias, "
        f'or make {role} zero in torch and say Rule.skip("{name}").'
    )


def a(thing: Any) -> str:
    """Returns a type's name with its article, for a type, a name or an object."""
    name = thing if isinstance(thing, str) else getattr(thing, "__name__", type(thing).__name__)
    return f"{'an' if name[0] in 'AEIOU' or name.startswith('RMS') else 'a'} {name}"


def flax_params(module: nnx.Module) -> dict[str, nnx.Param]:
    """Returns every `nnx.Param` by dotted path; a shared one under each of its paths."""
    return {path: x for path, x in flax_state(module).items() if isinstance(x, nnx.Param)}


def flax_state(module: nnx.Module) -> dict[str, nnx.Variable]:
    """Returns `nnx.Param`s and `nnx.BatchStat`s by dotted path; shared ones under each path.

    Includes every other variable that contains an array, since a tensor that torch does not train
    may map to it; random keys, their counts and intermediate results are excluded.
    """
    variables: dict[str, nnx.Variable] = {}

    def walk(node: Any, path: tuple[str, ...], above: tuple[int, ...]) -> None:
        if isinstance(node, nnx.Param | nnx.BatchStat) or _may_be_filled(node):
            variables[".".join(path)] = node
        elif not isinstance(node, nnx.Variable) and id(node) not in above:
            for name, child in _children(node).items():
                walk(child, (*path, name), (*above, id(node)))

    walk(module, (), ())
    return variables


def may_keep(variable: nnx.Variable, shape: tuple[int, ...]) -> bool:
    """Whether a variable may stand for a buffer of this shape: floating, and no Param."""
    value = variable.get_value()
    is_state = not isinstance(variable, nnx.Param) and jnp.issubdtype(value.dtype, jnp.floating)
    return is_state and tuple(value.shape) == tuple(shape)


def flax_values(module: nnx.Module) -> dict[str, np.ndarray]:
    """Copies every Param and statistic of an nnx module to numpy, keyed by dotted path."""
    return {path: np.array(variable.get_value()) for path, variable in flax_state(module).items()}


def _may_be_filled(node: Any) -> bool:
    """Whether another variable contains a numeric array, so that a tensor may map to it."""
    if not isinstance(node, nnx.Variable) or isinstance(node, nnx.RngState | nnx.Intermediate):
        return False
    value = node.get_value()
    return isinstance(value, jax.Array) and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def get_path(module: nnx.Module, path: str) -> Any:
    """Returns the node at a dotted path, or None."""
    node: Any = module
    for piece in path.split(".") if path else ():
        node = _children(node).get(piece)
    return node


def flax_path(module: nnx.Module, path: str) -> str:
    """Converts torch's path to Flax's: `nnx.Sequential` stores its parts in `layers`.

    >>> net = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    >>> flax_path(net, "0.kernel")
    'layers.0.kernel'
    """
    pieces: list[str] = []
    node: Any = module
    for piece in path.split("."):
        if isinstance(node, nnx.Sequential) and piece.isdigit():
            pieces.append("layers")
            node = node.layers
        pieces.append(piece)
        node = _children(node).get(piece)
    return ".".join(pieces)


def unstacked(module: nnx.Module, path: str) -> tuple[str, int | None]:
    """Returns the path without the layer number, and the number, where Flax stacks the layers.

    >>> stack = nnx.vmap(lambda key: nnx.Linear(3, 2, rngs=nnx.Rngs(key)))
    >>> net = nnx.Sequential(nnx.relu)
    >>> net.blocks = stack(jax.random.split(jax.random.key(0), 4))
    >>> unstacked(net, "blocks.3.kernel")
    ('blocks.kernel', 3)
    """
    node: Any = module
    pieces = path.split(".")
    for i, piece in enumerate(pieces):
        parts = _children(node)
        if piece.isdigit() and piece not in parts and _is_stack(node, pieces[i + 1 :]):
            return ".".join([*pieces[:i], *pieces[i + 1 :]]), int(piece)
        node = parts.get(piece)
    return path, None


def _is_stack(node: Any, rest: list[str]) -> bool:
    """Whether a module may be a stack of layers that contain the first component of `rest`."""
    counted = isinstance(node, nnx.List | nnx.Dict | nnx.Sequential)
    return (
        isinstance(node, nnx.Module)
        and not (counted or _is_one_layer(node))
        and len(rest) > 0
        and (len(rest) == 1 or rest[0] in _children(node))
    )


def _is_one_layer(node: Any) -> bool:
    """Whether a layer of nnx has the axes of one layer; a stack of them has one axis more."""
    match node:
        case nnx.Linear():
            weight, axes = node.kernel, 2
        case nnx.Conv():
            weight, axes = node.kernel, 2 + len(node.kernel_size)
        case nnx.Embed():
            weight, axes = node.embedding, 2
        case nnx.LayerNorm() | nnx.RMSNorm() | nnx.GroupNorm() | nnx.BatchNorm():
            weight, axes = node.scale, 1
        case _:
            return False
    return weight is not None and weight.ndim == axes


def _children(node: Any) -> dict[str, Any]:
    """Returns the children of a module, list or dict by name, attributes sorted by name."""
    if isinstance(node, nnx.List | nnx.Dict | nnx.Module):
        return {k: v for k, v in sorted(vars(node).items()) if not k.startswith("_pytree__")}
    if isinstance(node, list | tuple):
        return {str(i): child for i, child in enumerate(node)}
    return {str(k): child for k, child in node.items()} if isinstance(node, dict) else {}
