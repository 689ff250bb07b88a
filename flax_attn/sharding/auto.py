"""Blockwise attention on Auto mesh axes, where XLA chooses the shardings: `custom_partitioning`.

XLA cannot partition a loop over heads and would all-gather them first. So the forward and the
backward pass are each one opaque function for it, with a sharding rule that relates the dimensions
of operands and results, and with the function that one device runs on its own part.
"""

from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .._internal.arrays import is_float
from .._internal.types import Sizes, leaf_axes, wide
from ..backends import blockwise
from ..backends.blockwise.plan import make_plan
from ..backends.hoist import hoist
from ..backends.local import flat, mean_where_empty
from ..backends.protocol import zero_gradient
from ..reference import Stats
from ..rules import Request, Rules, bind_rules, sizes_of
from ..token_layouts import names_in
from ..where import platform_of
from .specs import Shards, numbers_of, part_of, places_of


class StaticAttention(NamedTuple):
    """Static facts of one attention.

    Attributes:
      structure: of the rules, whose leaves are the last operands.
      axes: for each leaf, the axes of the attention weights that it is indexed by.
      keys: for each leaf its random key implementation, or None if it is no key.
      leaves: shape and dtype of each.
      sizes, key_heads: of the whole attention.
      platform, precision, x64: jax's configuration when the request was traced.
    """

    structure: Any
    axes: tuple[str, ...]
    keys: tuple[Any, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    sizes: Sizes
    key_heads: int
    platform: str
    precision: Any
    x64: bool

    def split(self, operands: Any) -> tuple[Any, Any, Any]:
        """q, k and v; global indices of batch entries and heads; leaves of the rules."""
        first = 3 + len(self.sizes.batch) + 1
        return operands[:3], operands[3:first], operands[first:]

    def bind_rules(self, q: jax.Array, k: jax.Array, numbers: Any, leaves: Any) -> Rules:
        """Rules for one device's part."""
        # Small arrays may arrive replicated: the device takes its own part of them.
        mine = [
            part_of(x, axes, leaf.shape, numbers)
            if kind is None
            else jax.random.wrap_key_data(x, impl=kind)
            for x, axes, leaf, kind in zip(leaves, self.axes, self.leaves, self.keys, strict=True)
        ]
        return bind_rules(
            q, k, self.structure.unflatten(mine), places_of(numbers, self.sizes.batch)
        )


def attend(request: Request, empty: str) -> tuple[jax.Array, Stats]:
    """Output `*B T N h` and softmax statistics `*B N T`, sharded as XLA chooses."""
    q, k, v, rules = request.q, request.k, request.v, request.rules
    o, stats = in_blocks(q, k, v, rules)
    if empty == "mean":
        o = mean_where_empty(in_blocks, q, k, v, rules, o, stats)
    return o, stats


def in_blocks(q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> tuple[jax.Array, Stats]:
    """The same for unbound rules; fully masked rows are zero."""
    # Closures would be captured by the partitioned function; hoisting makes them operands.
    rules = hoist(rules, wide(q.dtype))
    leaves, structure = jax.tree.flatten(rules)
    leaves = [jnp.asarray(x) for x in leaves]
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    # custom_partitioning takes no random keys: their raw data is passed instead.
    data = [jax.random.key_data(x) if key else x for x, key in zip(leaves, is_key, strict=True)]
    known = StaticAttention(
        structure=structure,
        axes=tuple(leaf_axes(rules)),
        keys=tuple(
            str(jax.random.key_impl(x)) if is_one else None
            for x, is_one in zip(leaves, is_key, strict=True)
        ),
        leaves=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in data),
        sizes=sizes_of(q, k),
        key_heads=k.shape[-2],
        platform=platform_of(q),
        precision=getattr(jax.config, "jax_default_matmul_precision"),  # noqa: B009
        x64=jax.config.read("jax_enable_x64"),
    )
    return _run(known, q, k, v, *numbers_of(known.sizes), *data)


@partial(jax.jit, static_argnums=0)
def _run(known: StaticAttention, *operands: jax.Array) -> Any:
    return _attend(known, *operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(known: StaticAttention, *operands: jax.Array) -> Any:
    return _forward(known, *operands)[0]


def _forward(known: StaticAttention, *operands: jax.Array) -> Any:
    o, m, l, *stats = _partitioned(known, "forward")(*operands)
    stats = Stats(*stats)
    return (o.astype(operands[0].dtype), stats), (operands, o, m, l)


def _backward(known: StaticAttention, residuals: tuple, cotangents: tuple) -> tuple:
    operands, o, m, l = residuals
    do, dstats = cotangents
    grads = _partitioned(known, "backward")(*operands, o, m, l, do, dstats.l)
    gradients = iter(grads)
    return tuple(next(gradients) if is_float(x) else zero_gradient(x) for x in operands)


_attend.defvjp(_forward, _backward)


# The computation of one device.


def _local_forward(known: StaticAttention, *operands) -> tuple[jax.Array, ...]:
    """Output `*B T N h` in float32 or wider; m and l, `*B N T`, without the sinks and with them."""
    with _trace_config(known):
        (q, k, v), numbers, leaves = known.split(operands)
        sizes, rules = sizes_of(q, k), known.bind_rules(q, k, numbers, leaves)
        plan = make_plan(sizes, k.shape[-2], rules, known.platform)
        q, k, v = flat(sizes, q, k, v)
        o, m, l = blockwise.forward_pass(plan, q, k, v, rules)
        o, stats = blockwise.with_sinks(rules.sinks, o, m, l)
        return o.reshape(*sizes.batch, *o.shape[1:]), *(
            x.reshape(*sizes.batch, *x.shape[1:]) for x in (m, l, *stats)
        )


def _local_backward(known: StaticAttention, *operands) -> tuple[jax.Array, ...]:
    """Gradients of all floating operands of the forward pass, for this device's part."""
    *operands, o, m, l, do, dl = operands
    (q, k, v), numbers, leaves = known.split(operands)
    with _trace_config(known):
        sizes, floats = sizes_of(q, k), [x for x in leaves if is_float(x)]

        def bind(floats: list) -> Rules:
            arrays = iter(floats)
            leaves_ = [next(arrays) if is_float(x) else x for x in leaves]
            return known.bind_rules(q, k, numbers, leaves_)

        # Binding slices and reshapes the leaves, so their gradients go through its vjp.
        rules, pull = jax.vjp(bind, floats)
        plan = make_plan(sizes, k.shape[-2], rules, known.platform)
        arrays, rows = flat(sizes, q, k, v), flat(sizes, o, m, l, do, dl)
        everything: Any = plan, *arrays, rules, *rows
        *grads, drules = blockwise.backward_pass(*everything)
        grads = [g.reshape(x.shape) for g, x in zip(grads, (q, k, v), strict=True)]
        return *grads, *pull(drules)[0]


def _trace_config(known: StaticAttention) -> Any:
    """The configuration of the original trace: XLA traces a device's part later, outside of it."""
    stack = ExitStack()
    for setting in (
        jax.enable_x64(known.x64),
        jax.default_matmul_precision(known.precision),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        stack.enter_context(setting)
    return stack


# Sharding rules for XLA.


@lru_cache(maxsize=256)
def _partitioned(known: StaticAttention, phase: str) -> Any:
    local = {"forward": _local_forward, "backward": _local_backward}[phase]
    whole = partial(local, known)
    layout = Layout(known, phase)
    # jit turns constants such as lookup tables into part of its program; custom_partitioning
    # accepts none.
    compiled = jax.jit(whole)
    function = custom_partitioning(lambda *operands: compiled(*operands))
    function.def_partition(
        partition=layout.partition(whole),
        sharding_rule=layout.rule,
        need_replication_factors=layout.replicated,
        **layout.factors,
    )
    function_with_vmap = custom_vmap(lambda *operands: function(*operands))

    @function_with_vmap.def_vmap
    def _(size: int, batched: Any, *operands: Any) -> Any:
        """custom_partitioning has no batching rule: under vmap XLA partitions `whole` itself."""
        out = jax.vmap(whole, [0 if b else None for b in batched])(*operands)
        return out, jax.tree.map(lambda _: True, out)

    return function_with_vmap


class Layout:
    """Names of the dimensions of operands and results, and the shardings that follow."""

    def __init__(self, known: StaticAttention, phase: str):
        self.known, self.phase = known, phase
        batch = [f"b{i}" for i in range(len(known.sizes.batch))]
        K, groups = known.key_heads, known.sizes.N // known.key_heads
        # Heads are sharded by key heads; a single key head is replicated, its queries sharded.
        self.cut, self.parts = ("g", known.sizes.N) if K == 1 else ("n", K)
        self.heads = heads = "(n g)" if min(K, groups) > 1 else self.cut
        self.factors: dict[str, Any] = {"g": groups} if heads == "(n g)" else {}
        queries, keys = [*batch, "t", heads], [*batch, "s", "n"]
        self.inputs = [[*queries, "h"], [*keys, "h"], [*keys, "w"], *([x] for x in batch), [heads]]
        along = {"b": batch, "n": [heads], "q": ["t"], "k": ["s"], ".": [""]}
        # Floating leaves without a query axis, such as slopes: sharded only if they arrive so.
        self.as_cut: dict[int, list[str]] = {}
        for i, (axes, leaf) in enumerate(zip(known.axes, known.leaves, strict=True)):
            names = _names(i, axes, leaf.shape, along)
            if is_float(leaf) and "q" not in axes:
                self.as_cut[len(self.inputs)] = names
                names = _names(i, "", leaf.shape, along)
            self.inputs.append(names)
        rows = [*batch, heads, "t"]
        self.outputs = [[*queries, "w"], rows, rows, rows, rows]
        if phase == "backward":
            result_dims = [[*queries, "w"], rows, rows, [*queries, "w"], rows]
            numbers = [False] * (len(batch) + 1)
            moves = [True, True, True, *numbers, *map(is_float, known.leaves)]
            self.floats = [at for at, one in enumerate(moves) if one]
            self.outputs = [self.inputs[at] for at in self.floats]
            self.inputs = [*self.inputs, *result_dims]

    @property
    def rule(self) -> str:
        """The sharding rule in the notation of `custom_partitioning`."""
        sides = (", ".join(" ".join(x) for x in side) for side in (self.inputs, self.outputs))
        return " -> ".join(sides)

    @property
    def replicated(self) -> tuple[str, ...]:
        """Factors that must not be sharded, in the order in which the rule names them."""
        text = self.rule.replace("(", " ").replace(")", " ").replace(",", " ").replace("->", " ")
        cut = {self.cut, *(f"b{i}" for i in range(len(self.known.sizes.batch)))}
        cut |= {name for at in self.as_cut for name in self.inputs[at]}
        return tuple(name for name in dict.fromkeys(text.split()) if name not in cut)

    def spec(self, names: list[str], shards: Shards) -> PartitionSpec:
        """Sharding of an array with these dimensions."""
        cut = {f"b{i}": axes for i, axes in enumerate(shards.batch)}
        cut |= dict.fromkeys((self.cut, self.heads), shards.heads)
        return PartitionSpec(*(cut.get(name) for name in names))

    def partition(self, whole: Any) -> Any:
        def partition(mesh: Any, operands: Any, results: Any) -> Any:
            # All operands follow the sharding of q.
            shards = self._shards(mesh, operands[0].sharding.spec)
            inputs_specs = [self.spec(x, shards) for x in self.inputs]
            for at, names in self.as_cut.items():
                inputs_specs[at] = _merge_specs(
                    self.spec(names, shards), operands[at].sharding.spec
                )
            outputs_specs = (
                [inputs_specs[at] for at in self.floats]
                if self.phase == "backward"
                else [self.spec(x, shards) for x in self.outputs]
            )

            def one_device(*operands: jax.Array) -> Any:
                out = whole(*operands)
                if self.phase == "forward":
                    return out
                # The gradient of a replicated array is the sum over the devices that share it.
                return tuple(
                    _psum(x, shards.unused(s)) for x, s in zip(out, outputs_specs, strict=True)
                )

            outputs, inputs = (
                tuple(NamedSharding(mesh, spec) for spec in specs)
                for specs in (outputs_specs, inputs_specs)
            )
            return mesh, one_device, outputs, inputs

        return partition

    def _shards(self, mesh: Any, spec: PartitionSpec) -> Shards:
        count = len(self.known.sizes.batch)
        entries = (*spec, *(None,) * (count + 3 - len(spec)))
        shards = Shards(tuple(entries[:count]), entries[count + 1])
        # Heads that do not divide evenly are replicated.
        return shards if self.parts % shards.count(mesh) == 0 else Shards(shards.batch, None)


def _merge_specs(wanted: PartitionSpec, comes: PartitionSpec) -> PartitionSpec:
    """Sharded along axes where both specs agree, replicated along the others."""
    comes = PartitionSpec(*comes, *(None,) * (len(wanted) - len(comes)))
    agree = (names_in(a) == names_in(b) for a, b in zip(wanted, comes, strict=True))
    return PartitionSpec(*(a if same else None for a, same in zip(wanted, agree, strict=True)))


def _names(i: int, axes: str, shape: tuple[int, ...], along: dict[str, list[str]]) -> list[str]:
    """Dimensions of leaf i: those of the weights it is indexed by, or names of its own."""
    whole = [name for axis in axes for name in along[axis]]
    mine = whole[len(whole) - len(shape) :] if axes else [""] * len(shape)
    return [
        name if n > 1 and name else f"x{i}d{j}"
        for j, (n, name) in enumerate(zip(shape, mine, strict=True))
    ]


def _psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x
