"""What a kernel asks of rules: a mask and a score for a block of queries and keys, and ranges.

A mask and a score are traced once, for one query, one key and one logit. That program is made of
scalars, so a kernel can run it on a whole block: each scalar becomes an array of rows and columns,
and an array that the program indexes is loaded element by element from memory. Nothing of a mask or
a score is written for kernels, and users' functions are traced in the same way.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from ..._internal.types import Sizes
from ...masks import Mask
from ...masks.algebra import parts_of
from ...masks.ranges import Rows, fully_visible_range, runs_of, visible_range
from ..hoist import Run

# Primitives that give each element from the same element of their inputs, and that Triton has.
ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp cos cosh div eq "
    "convert_element_type erf_inv exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p "
    "logistic lt max min mul ne neg nextafter not or population_count pow rem rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor".split()
)
# Those that change nothing of one element.
SHAPES = frozenset("broadcast_in_dim copy copy_p expand_dims reshape squeeze".split())
WITH_OWN_DERIVATIVE = ("custom_jvp_call", "custom_vjp_call")
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
CALLS |= dict.fromkeys(WITH_OWN_DERIVATIVE, "call_jaxpr")
_CHECKED_ON = (2, 3)  # rows and columns


class Blocks(NamedTuple):
    """Queries and keys of a block, and how Triton runs a program."""

    rows: int
    columns: int
    warps: int
    stages: int


class Kernel(NamedTuple):
    """What is static of a kernel: its programs, sizes, blocks and precision."""

    mask: "Program"
    score: "Program"
    keep: "Program | None"  # of dropout
    rate: float
    sizes: Sizes
    blocks: Blocks
    backward_blocks: Blocks
    precision: Any
    interpret: bool
    adds_remainder: bool = False  # of the weights, which are rounded for their product with values


class Leaf(NamedTuple):
    """An array in memory, or a part of it: `load(*indices)` and its shape."""

    load: Callable[..., jax.Array]
    shape: tuple[int, ...]

    def part(self, starts: Sequence[jax.Array], shape: tuple[int, ...]) -> "Leaf":
        """The part of this shape that begins at these indices, which are clipped to fit."""
        most = (whole - size for whole, size in zip(self.shape, shape, strict=True))
        first = [jnp.clip(x, 0, n) if n else 0 for x, n in zip(starts, most, strict=True)]
        return Leaf(lambda *at: self.load(*map(_sum, first, at)), shape)

    def without(self, axes: Sequence[int]) -> "Leaf":
        """The same without these axes of size 1."""
        rest = [axis for axis in range(len(self.shape)) if axis not in axes]

        def load(*at: Any) -> jax.Array:
            indices = dict(zip(rest, at, strict=True))
            return self.load(*(indices.get(axis, 0) for axis in range(len(self.shape))))

        return Leaf(load, tuple(self.shape[axis] for axis in rest))


def _sum(first: Any, at: Any) -> Any:
    return first if isinstance(at, int) and at == 0 else first + at


class Program:
    """A mask or a score as a program of one element; equal if it computes the same.

    Args:
      fn: the function of scalars.
      element: the scalars, whose dtypes are used.

    Raises:
      NotImplementedError: for a primitive that works on whole arrays, by its name.
    """

    def __init__(self, fn: Callable[..., jax.Array], *element: jax.Array):
        # Programs are compared by what they compute, so each has the same function.
        self.run = Run(jnp.asarray, fn, *element)
        jaxpr = self.run.jaxpr
        # What depends on no element is computed before the kernel, and its results are leaves.
        inside, before, self.inside = {*jaxpr.invars}, [], []
        for eqn in jaxpr.eqns:
            depends = any(not isinstance(x, Literal) and x in inside for x in eqn.invars)
            (self.inside if depends else before).append(eqn)
            inside.update(eqn.outvars if depends else ())
        made = [*jaxpr.constvars, *(x for eqn in before for x in eqn.outvars)]
        used = [x for eqn in self.inside for x in eqn.invars] + [*jaxpr.outvars]
        self.leaves = [x for x in made if any(x is y for y in used)]
        unnamed = jaxpr.debug_info.with_unknown_names()
        self.before = jaxpr.replace(invars=[], outvars=self.leaves, eqns=before, debug_info=unnamed)
        jax.eval_shape(self._on_zeros, *element)

    @property
    def has_own_derivative(self) -> bool:
        """Whether it calls a `custom_jvp` or `custom_vjp`, whose derivative `__call__` loses."""
        return any(_calls(self.inside, WITH_OWN_DERIVATIVE))

    def _on_zeros(self, *element: jax.Array) -> jax.Array:
        """The program on a small block of zeros, which raises what no kernel takes."""
        leaves = [Leaf(partial(zeros_at, x.aval.dtype), x.aval.shape) for x in self.leaves]
        return self(leaves, *(jnp.zeros(_CHECKED_ON, x.dtype) for x in element))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Program) and self.run == other.run

    def __hash__(self) -> int:
        return hash(self.run)

    def arrays(self) -> list[jax.Array]:
        """The arrays that the program indexes."""
        return [*map(jnp.asarray, jaxpr_as_fun(ClosedJaxpr(self.before, self.run.consts))())]

    def __call__(self, leaves: Sequence[Leaf], *element: jax.Array) -> jax.Array:
        """The program on a block; each scalar is an array that broadcasts to rows and columns."""
        jaxpr = self.run.jaxpr
        values = dict(zip((*self.leaves, *jaxpr.invars), (*leaves, *element), strict=True))
        (out,) = _evaluate(self.inside, jaxpr.outvars, values)
        return _element(out)


def _calls(eqns: Sequence[Any], names: Sequence[str]) -> Iterator[bool]:
    """Whether each equation, or one inside it, is one of these primitives."""
    for eqn in eqns:
        yield eqn.primitive.name in names
        if eqn.primitive.name in CALLS:
            inner = eqn.params[CALLS[eqn.primitive.name]]
            yield from _calls(getattr(inner, "jaxpr", inner).eqns, names)


def zeros_at(dtype: Any, *at: Any) -> jax.Array:
    return jnp.zeros(jnp.broadcast_shapes(*map(jnp.shape, at)), dtype)


def _evaluate(eqns: Sequence[Any], outputs: Sequence[Any], values: dict[Any, Any]) -> list[Any]:
    """Runs equations of one element on a block; `values` holds arrays and leaves by variable."""

    def value(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for eqn in eqns:
        inputs = [value(x) for x in eqn.invars]
        name = eqn.primitive.name
        if name in CALLS:
            results = _call(eqn.params[CALLS[name]], inputs)
        elif name == "dynamic_slice" and isinstance(inputs[0], Leaf):
            starts = map(_element, inputs[1:])
            results = [inputs[0].part([*starts], eqn.params["slice_sizes"])]
        elif name == "squeeze" and isinstance(inputs[0], Leaf):
            results = [inputs[0].without(eqn.params["dimensions"])]
        elif name in SHAPES and all(math.prod(x.aval.shape) == 1 for x in eqn.outvars):
            results = [_element(inputs[0])]
        elif name == "threefry2x32":
            results = _threefry(*jnp.broadcast_arrays(*map(_element, inputs)))
        elif name in ELEMENTWISE:
            arrays = jnp.broadcast_arrays(*map(_element, inputs))
            results = [eqn.primitive.bind(*arrays, **eqn.params)]
        else:
            raise NotImplementedError(f"uses {name}, which no kernel runs on a block")
        values.update(zip(eqn.outvars, results, strict=True))
    return [value(x) for x in outputs]


def _call(program: Any, inputs: Sequence[Any]) -> list[Any]:
    consts: Sequence[Any] = ()
    if isinstance(program, ClosedJaxpr):
        program, consts = program.jaxpr, program.consts
    assert isinstance(program, Jaxpr)
    if consts:
        raise NotImplementedError("calls a jitted function that closes over an array")
    return _evaluate(program.eqns, program.outvars, dict(zip(program.invars, inputs, strict=True)))


def _threefry(*words: jax.Array) -> list[jax.Array]:
    """Two words of `threefry2x32`, whose primitive kernels lack: 20 rounds of a key on a counter.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011; the same bits as
    `jax.random` gives.
    """
    key = [*words[:2], words[0] ^ words[1] ^ jnp.uint32(0x1BD11BDA)]
    x, y = words[2] + key[0], words[3] + key[1]
    for group in range(5):
        for bits in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(bits)) | (y >> jnp.uint32(32 - bits)))
        x = x + key[(group + 1) % 3]
        y = y + key[(group + 2) % 3] + jnp.uint32(group + 1)
    return [x, y]


def _element(x: Any) -> Any:
    """The value of a scalar on the block; loads it where it is an element of an array."""
    if not isinstance(x, Leaf):
        return x
    if math.prod(x.shape) != 1:
        raise NotImplementedError(f"reads an array of shape {x.shape} whole, not an element of it")
    return x.load(*(0,) * len(x.shape))


# Masks and ranges of keys.


def mask_program(mask: Mask, sizes: Sizes) -> Program:
    """The program of a bound mask; a part that reads arrays whole gives its rows' ranges of keys.

    Raises:
      NotImplementedError: as `Program`, for a part whose rows see several ranges.
    """
    index = [jnp.zeros((), jnp.int32)] * 4
    try:
        return Program(mask, *index)
    except NotImplementedError:
        parts = [_of_element(part, sizes, index) for part in parts_of(mask)]
    return Program(lambda *at: reduce(jnp.logical_and, (part(*at) for part in parts)), *index)


def _of_element(part: Mask, sizes: Sizes, index: list[jax.Array]) -> Callable[..., jax.Array]:
    """A part of a mask as a function that a `Program` takes."""
    try:
        Program(part, *index)
        return part
    except NotImplementedError:
        runs = runs_of(part, jnp.arange(sizes.T, dtype=jnp.int32)[None])
        if runs is None:
            raise
    first, end = (
        jnp.broadcast_to(most if x is None else x, (sizes.B, sizes.T)).astype(jnp.int32)
        for x, most in zip(runs, (0, sizes.S), strict=True)
    )
    # The rest of the mask may hide a whole range, so it is asked at the range's first key.
    b, n, q, _ = sizes._replace(N=1).iotas()
    visible = jnp.asarray(part(b, n, q, jnp.clip(first, 0, sizes.S - 1)[:, None, :, None]))
    visible = jnp.broadcast_to(visible, (sizes.B, 1, sizes.T, 1))[:, 0, :, 0]
    end = jnp.where(visible, end, first)
    return lambda b, n, q, k: (first[b, q] <= k) & (k < end[b, q])


def block_ranges(mask: Mask, sizes: Sizes, rows: int) -> jax.Array:
    """For each block of queries the keys to read, and those that need no mask: `B|1 blocks 4`.

    Outside of the first range no query of the block sees a key, in the second every one does.
    """
    blocks, size = -(-sizes.T // rows), min(rows, sizes.T)
    # The last block may be shorter: its range is that of the last `size` queries, which holds it.
    starts = jnp.minimum(jnp.arange(blocks, dtype=jnp.int32) * rows, sizes.T - size)

    def of_block(b: Any, start: jax.Array) -> jax.Array:
        block = Rows(start, size, sizes.T)
        ends = (*visible_range(mask, b, block, sizes), *fully_visible_range(mask, b, block, sizes))
        return jnp.stack([jnp.asarray(end, jnp.int32) for end in ends])

    entries = jnp.arange(1 if mask.is_static else sizes.B, dtype=jnp.int32)
    return jax.vmap(lambda b: jax.vmap(partial(of_block, b))(starts))(entries)
