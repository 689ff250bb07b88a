"""A kernel of this library's own for GPUs: any mask and any score, users' functions among them.

`contract.py` turns a mask and a score into programs that a kernel runs on a block, `triton.py` is
the forward pass, `backward.py` the gradients of q, k and v, `arrays.py` those of arrays that a
score reads. Where a score has a `custom_jvp`, or reads an array of all pairs that is trained, the
gradients are those of the blockwise backend. "auto" takes it where a device's own file says that
it is equal and faster (`device_file`); `backend="pallas"` asks for it. On a CPU it runs
interpreted, for tests.
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
from ...rules import Request, Rules, sizes_of
from ...where import platform_of
from .. import blockwise, device_file, protocol
from ..hoist import hoist, with_wide_arrays
from ..protocol import is_number, of_mesh
from .arrays import Static, gradients_of_reads, reads_of
from .contract import Blocks, Kernel, Program, block_ranges, mask_program

DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
MAX_HEAD_DIM = 256
MIN_BLOCK = 16  # rows and columns of the smallest product of tensor cores
# By bytes of an element and by width, of the forward and the backward pass. In larger ones
# registers spill on an H200, or shared memory is exceeded: `python -m parity_tests.aot.registers`.
BLOCKS = {
    (2, 64): (Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2)),
    (2, 128): (Blocks(128, 64, 8, 3), Blocks(64, 64, 8, 2)),
    (2, 256): (Blocks(64, 32, 4, 3), Blocks(32, 32, 4, 2)),
    (4, 64): (Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2)),
    (4, 128): (Blocks(32, 16, 8, 2), Blocks(32, 32, 8, 2)),
    (4, 256): (Blocks(32, 16, 8, 2), Blocks(16, 16, 8, 1)),
}
TRITON = "jax.experimental.pallas.triton"
BY_NAME = 'backend="pallas" asks for it'
FEW_QUERIES = 16  # as many as a block has at least


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules, *, blocks: Blocks | None = None
) -> tuple[jax.Array, Stats]:
    """Output in the dtype of q and softmax statistics m and l, for bound rules.

    Args:
      q, k, v: `B T N H`, `B S K H`, `B S K h`.
      rules: bound.
      blocks: sizes of blocks in both passes; None for those by widths and lengths.
    """
    if 0 in (*q.shape, *k.shape, *v.shape):
        return reference.attention(q, k, v, rules)
    sizes, kind = sizes_of(q, k), jnp.dtype(jnp.float32)
    rules = replace(rules, score=with_wide_arrays(rules.score, kind))
    mask, score, keep = each = programs(rules, sizes)
    rate = 0.0 if rules.dropout is None else rules.dropout.rate
    kernel = Kernel(
        mask,
        score,
        keep,
        rate,
        sizes,
        blocks or blocks_of(q, k, v, backward=False),
        blocks or blocks_of(q, k, v, backward=True),
        _precision(),
        interpret=platform_of(q) != "gpu",
    )
    leaves = tuple([] if program is None else program.arrays() for program in each)
    plan = blockwise.make_plan(sizes, k.shape[-2], rules, platform_of(q))
    axes = jax.typeof(q).manual_axis_type.varying
    args = unify_varying((q, k, v, leaves, hoist(rules, kind, axes)))
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


def blocks_of(q: jax.Array, k: jax.Array, v: jax.Array, *, backward: bool) -> Blocks:
    """Sizes of blocks by dtype, widths and lengths."""
    width = max(64, _power_of_two(max(q.shape[-1], v.shape[-1])))
    blocks = BLOCKS[q.dtype.itemsize, width][backward]
    rows, columns = (_power_of_two(x.shape[-3]) for x in (q, k))
    return blocks._replace(rows=min(blocks.rows, rows), columns=min(blocks.columns, columns))


def _precision() -> Any:
    asked = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    return jax.lax.Precision.HIGHEST if asked is None else None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kernel: Kernel, plan: Any, q: Any, k: Any, v: Any, leaves: Any, rules: Rules) -> Any:
    return _forward(kernel, q, k, v, leaves, rules)[0]


_run = jax.jit(_attend, static_argnums=(0, 1))


def _forward(kernel: Kernel, q: Any, k: Any, v: Any, leaves: Any, rules: Rules) -> Any:
    from .triton import forward  # Pallas takes a tenth of a second to import

    T, h = q.shape[1], v.shape[-1]
    ranges = block_ranges(rules.mask, kernel.sizes, kernel.blocks.rows)
    run = _without_derivative(partial(forward, kernel))
    o, m, l = run(_whole_blocks(kernel, q, k, v), ranges, leaves)
    part = o[:, :T, :, :h], m[..., :T], l[..., :T]
    o, stats = blockwise.with_sinks(rules.sinks, *part)
    return (o.astype(q.dtype), stats), (o, *part[1:])


def _without_derivative(run: Any) -> Any:
    """`run`, a kernel, which says what has further derivatives where JAX asks for one."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            'Derivatives of derivatives are not supported by backend "pallas". Call attend(..., '
            'backend="autodiff"), or put the call inside flax_attn.use_backend("autodiff").'
        )

    call = jax.custom_jvp(run)
    call.defjvp(refuse)
    return call


def _residuals(kernel: Kernel, plan: Any, *args: Any) -> Any:
    values = custom_vjp_primal_tree_values(args)
    trained = [x.perturbed for x in args[-2][1]]
    # The gradient of a slope sums ds times a distance over all pairs, where the rounding of a row's
    # weights, which delta = rowsum(do * o) keeps, would not cancel.
    adds_remainder = any(trained) and values[0].dtype.itemsize < 4
    result, rows = _forward(kernel._replace(adds_remainder=adds_remainder), *values)
    # The kernels differentiate a score by its equations, which a custom_jvp need not follow.
    reads = None if kernel.score.has_own_derivative else reads_of(kernel.score, trained)
    return result, (*values, rows, Static(reads))


def _backward(kernel: Kernel, plan: Any, residuals: tuple, cotangents: tuple) -> tuple:
    q, k, v, leaves, rules, (o, m, l), static = residuals
    do, dl = map(_instantiated, (cotangents[0], cotangents[1].l))
    dleaves = jax.tree.map(blockwise.zero_gradient, leaves)
    if static.reads is None:
        # Its weights exp(x - m) / l need m and l of the logits as it rounds them: where these are
        # large, another rounding of them shows in the gradients.
        o, m, l = blockwise.forward_pass(plan, q, k, v, rules)
        o, _ = blockwise.with_sinks(rules.sinks, o, m, l)
        *grads, drules = blockwise.backward_pass(plan, q, k, v, rules, o, m, l, do, dl)
        return *grads, dleaves, drules
    lines, dsinks = blockwise.row_statistics(rules.sinks, o, m, l, do, dl)
    kernel = kernel._replace(blocks=kernel.backward_blocks)
    grads, sums = _kernel_gradients(kernel, (q, k, v), leaves, rules, do, lines, static.reads)
    changes = gradients_of_reads(kernel.score, leaves[1], static.reads, sums, kernel.sizes)
    for number, gradient in changes.items():
        dleaves[1][number] = gradient.astype(leaves[1][number].dtype)
    # The arrays of the score are among its leaves; those of masks have no gradient.
    drules = replace(jax.tree.map(blockwise.zero_gradient, rules), sinks=dsinks)
    return *grads, dleaves, drules


def _instantiated(x: Any) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x  # pyright: ignore


def _kernel_gradients(
    kernel: Kernel, qkv: tuple, leaves: Any, rules: Rules, do: Any, lines: tuple, reads: Any
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Gradients of q, k and v, in their shapes and dtypes, and the sums of each read."""
    from .backward import backward

    rows = kernel.blocks.rows
    ranges = block_ranges(rules.mask, kernel.sizes, rows)
    beyond = ((0, 0), (0, 0), (0, -qkv[0].shape[1] % rows))
    fills = (jnp.inf, 0, 0)  # a row beyond the last one is fully masked
    padded_lines = [
        jnp.pad(x, beyond, constant_values=fill) for x, fill in zip(lines, fills, strict=True)
    ]
    # A query that sees nothing may hold NaN, and in dk its weight of 0 would make that NaN.
    is_dead = jnp.moveaxis(lines[0] == jnp.inf, 1, 2)[..., None]
    q, do = (jnp.where(is_dead, 0, x) for x in (qkv[0], do))
    whole = _whole_blocks(kernel, q, *qkv[1:])
    run = _without_derivative(partial(backward, kernel, reads=reads))
    padded, sums = run(whole, _padded(do, rows), padded_lines, ranges, leaves)
    each = zip(padded, qkv, strict=True)
    return [x[tuple(map(slice, y.shape))].astype(y.dtype) for x, y in each], sums


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
    """The least power of two from n on, at least `MIN_BLOCK`."""
    return max(MIN_BLOCK, 1 << (n - 1).bit_length())


def refusal(request: Request, rules: Rules) -> str | None:
    """Why the kernel cannot serve a request, or None."""
    q, v, platform = request.q, request.v, request.where.platform
    if q.dtype not in DTYPES:
        return f"needs float16, bfloat16 or float32, since it would round {q.dtype}"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        return (
            f"needs widths of at most {MAX_HEAD_DIM}; keys are {q.shape[-1]} and values "
            f"{v.shape[-1]} wide"
        )
    if platform == "tpu":
        return "needs a GPU, or a CPU, where it runs interpreted"
    if platform == "gpu" and importlib.util.find_spec(TRITON) is None:
        return f"needs Pallas for Triton, which jax {jax.__version__} does not have"
    try:
        programs(rules, request.sizes)
    except NotImplementedError as error:
        return f"its mask or score {error}; blockwise runs it"
    return of_mesh(request)


def unproven(request: Request) -> str | None:
    """Why "auto" does not consider it, or None: what no device file proves equal and faster."""
    reason = device_file.against("pallas", request)
    if reason is None and request.where.platform != "gpu":
        reason = f"it runs interpreted on a {request.where.platform}"
    return None if reason is None else f"{reason}; {BY_NAME}"


def passed_over(request: Request) -> str | None:
    """Why "auto" skips it although it could serve, or None: unproven, hidden shards, decoding."""
    reason = unproven(request)
    if reason is not None:
        return reason
    if request.where.axes == "auto":
        return "XLA may divide the request over several devices, which it cannot do for this kernel"
    if request.sizes.T < FEW_QUERIES:
        return f"a block of {request.sizes.T} queries would read all keys, one after the other"
    return protocol.passed_over(request)
