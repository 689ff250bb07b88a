"""A kernel of this library's own for GPUs: any mask and any score, users' functions among them.

`contract.py` turns a mask and a score into programs that a kernel runs on a block, `triton.py` is
the forward pass, `backward.py` the gradients of q, k and v. Gradients of arrays that a score reads
are those of the blockwise backend, from the kernel's row statistics. Not yet run on a GPU: "auto"
passes it over, `backend="pallas"` asks for it. On a CPU it runs interpreted, for tests.
"""

import importlib.util
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from ... import reference
from ..._internal.arrays import unify_varying
from ..._internal.types import Sizes
from ...reference import Stats
from ...rules import Rules, sizes_of
from .. import blockwise
from ..hoist import hoist
from ..platform import platform_of
from ..protocol import is_number, of_mesh
from .backward import backward
from .contract import Program, block_ranges, mask_program
from .triton import Blocks, Kernel, forward

DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
MAX_HEAD_DIM = 256
MIN_BLOCK = 16  # rows and columns of the smallest product of tensor cores
NOT_RUN = 'not yet run on a GPU; backend="pallas" asks for it'


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules, *, blocks: Blocks | None = None
) -> tuple[jax.Array, Stats]:
    """Output in the dtype of q and softmax statistics m and l, for bound rules.

    Args:
      q, k, v: `B T N H`, `B S K H`, `B S K h`.
      rules: bound.
      blocks: sizes of blocks; None for those of the table.
    """
    if 0 in (*q.shape, *k.shape, *v.shape):
        return reference.attention(q, k, v, rules)
    sizes = sizes_of(q, k)
    mask, score, keep = each = programs(rules, sizes)
    rate = 0.0 if rules.dropout is None else rules.dropout.rate
    both = (blocks or blocks_of(q, k, v), blocks or backward_blocks_of(q, k, v))
    is_interpreted = platform_of(q) != "gpu"
    kernel = Kernel(mask, score, keep, rate, sizes, *both, _precision(), is_interpreted)
    leaves = tuple([] if program is None else program.arrays() for program in each)
    ranges = [block_ranges(rules.mask, sizes, x.rows) for x in both]
    inputs = {"ranges": ranges[0], "backward_ranges": ranges[1], "leaves": leaves}
    axes = jax.typeof(q).manual_axis_type.varying
    plan = blockwise.make_plan(sizes, k.shape[-2], rules, platform_of(q))
    args = unify_varying((q, k, v, inputs, hoist(rules, jnp.dtype(jnp.float32), axes)))
    return _run(kernel, plan, *args)


def programs(rules: Rules, sizes: Sizes) -> tuple[Program, Program, Program | None]:
    """The programs of the mask, of the score of an unscaled logit, and of the dropout if any.

    Raises:
      NotImplementedError: for one that works on whole arrays, by the name of what it uses.
    """
    index = [jnp.zeros((), jnp.int32)] * 4
    scale = rules.scale if is_number(rules.scale) else jnp.asarray(rules.scale, jnp.float32)
    score = Program(lambda x, *at: rules.score(x * scale, *at), jnp.zeros((), jnp.float32), *index)
    keep = None if rules.dropout is None else Program(rules.dropout.keep, *index)
    return mask_program(rules.mask, sizes), score, keep


def blocks_of(q: jax.Array, k: jax.Array, v: jax.Array) -> Blocks:
    """Sizes of blocks by widths and lengths: what a prototype found fastest on an H100."""
    wide = max(_power_of_two(q.shape[-1]), _power_of_two(v.shape[-1])) > 128
    rows, columns, warps = (64, 32, 4) if wide else (128, 64, 8)
    least = [max(MIN_BLOCK, _power_of_two(x.shape[-3])) for x in (q, k)]
    return Blocks(min(rows, least[0]), min(columns, least[1]), warps)


def backward_blocks_of(q: jax.Array, k: jax.Array, v: jax.Array) -> Blocks:
    """Those of the backward pass, which keeps more of a block in shared memory."""
    size = 32 if max(q.shape[-1], v.shape[-1]) > 128 else 64
    least = [max(MIN_BLOCK, _power_of_two(x.shape[-3])) for x in (q, k)]
    return Blocks(min(size, least[0]), min(size, least[1]), 4, 2)


def _precision() -> Any:
    asked = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    return jax.lax.Precision.HIGHEST if asked is None else None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kernel: Kernel, plan: Any, q: Any, k: Any, v: Any, inputs: Any, rules: Rules) -> Any:
    return _forward(kernel, q, k, v, inputs, rules)[0]


_run = jax.jit(_attend, static_argnums=(0, 1))


def _forward(kernel: Kernel, q: Any, k: Any, v: Any, inputs: Any, rules: Rules) -> Any:
    T, h = q.shape[1], v.shape[-1]
    o, m, l = forward(kernel, _whole_blocks(kernel, q, k, v), inputs["ranges"], inputs["leaves"])
    part = o[:, :T, :, :h], m[..., :T], l[..., :T]
    o, stats = blockwise.with_sinks(rules.sinks, *part)
    return (o.astype(q.dtype), stats), (o, *part[1:])


def _residuals(kernel: Kernel, plan: Any, *args: Any) -> Any:
    q, k, v, inputs, rules = custom_vjp_primal_tree_values(args)
    result, rows = _forward(kernel, q, k, v, inputs, rules)
    trained = replace(args[-1], sinks=None)
    is_trained = any(x.perturbed for x in jax.tree.leaves(trained, is_leaf=_is_primal))
    # The number of entries is static where a flag would become an array.
    return result, (q, k, v, inputs, rules, rows, ((),) * is_trained)


def _instantiated(x: Any) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x  # pyright: ignore


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _backward(kernel: Kernel, plan: Any, residuals: tuple, cotangents: tuple) -> tuple:
    q, k, v, inputs, rules, (o, m, l), trained = residuals
    do, dl = map(_instantiated, (cotangents[0], cotangents[1].l))
    none = jax.tree.map(blockwise.zero_gradient, inputs)
    if trained:  # arrays of a score, or the scale, have gradients, which the kernels do not give
        *grads, drules = blockwise.backward_pass(plan, q, k, v, rules, o, m, l, do, dl)
        return *grads, none, drules
    kernel = kernel._replace(blocks=kernel.backward_blocks)
    rows, dsinks = blockwise.row_statistics(rules.sinks, o, m, l, do, dl)
    length = -q.shape[1] % kernel.blocks.rows
    fills = (jnp.inf, 0, 0)  # a row beyond the last one is fully masked
    lines = [
        jnp.pad(x, ((0, 0), (0, 0), (0, length)), constant_values=fill)
        for x, fill in zip(rows, fills, strict=True)
    ]
    whole, do = _whole_blocks(kernel, q, k, v), _padded(do, kernel.blocks.rows)
    padded = backward(kernel, whole, do, lines, inputs["backward_ranges"], inputs["leaves"])
    grads = [
        x[tuple(map(slice, y.shape))].astype(y.dtype)
        for x, y in zip(padded, (q, k, v), strict=True)
    ]
    drules = replace(jax.tree.map(blockwise.zero_gradient, rules), sinks=dsinks)
    return *grads, none, drules


_attend.defvjp(_residuals, _backward, symbolic_zeros=True)


def _whole_blocks(kernel: Kernel, q: Any, k: Any, v: Any) -> tuple[jax.Array, ...]:
    """q, k and v with lengths of whole blocks and widths that are powers of two."""
    rows, columns = kernel.blocks[:2]
    return _padded(q, rows), _padded(k, columns), _padded(v, columns)


def _padded(x: jax.Array, block: int) -> jax.Array:
    """`B L N H` with a length of whole blocks and a width that is a power of two."""
    length, width = -x.shape[1] % block, _power_of_two(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, ((0, 0), (0, length), (0, 0), (0, width))) if length or width else x


def _power_of_two(n: int) -> int:
    return max(MIN_BLOCK, 1 << (n - 1).bit_length())


def refusal(q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> str | None:
    """Why the kernel cannot serve a request, or None."""
    if q.dtype not in DTYPES:
        return f"needs float16, bfloat16 or float32, since it would round {q.dtype}"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        return (
            f"needs widths of at most {MAX_HEAD_DIM}; keys are {q.shape[-1]} and values "
            f"{v.shape[-1]} wide"
        )
    if platform_of(q) == "tpu":
        return "needs a GPU, or a CPU, where it runs interpreted"
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return f"needs Pallas for Triton, which jax {jax.__version__} does not have"
    try:
        programs(rules, sizes_of(q, k))
    except NotImplementedError as error:
        return f"its mask or score {error}; blockwise runs it"
    return of_mesh(q)


def passed_over(q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> str:
    """Why "auto" skips it: no GPU has run it yet."""
    return NOT_RUN
