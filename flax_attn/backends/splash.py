"""Splash attention on TPUs, jax's Pallas kernel: static masks, segments, lengths, softcap.

The static part of a mask is computed from indices inside the kernel, and fully masked blocks are
skipped; segments and lengths become segment ids. Lengths are padded to a multiple of 128. The
kernel has no scale, so q is multiplied by it first, in its own dtype: one more rounding in
bfloat16, unless the scale is a power of two.
"""

import importlib
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import reference
from .._internal.types import Sizes, wide
from ..masks import FULL, Full, Mask
from ..masks.algebra import padding_before, parts_of
from ..masks.ranges import as_known_band, segments_of
from ..rules import Request, Rules, sizes_of
from ..scores import Identity, Score, Softcap
from .protocol import (
    NO_POSITIONS,
    is_number,
    of_lse,
    of_mesh,
    serve,
    visible_in_band,
    zero_gradient,
)

MODULE = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_"
REQUIRED_NAMES = (
    "_splash_attention_forward",
    "_splash_attention_bwd_dkv",
    "_splash_attention_bwd_dq",
)
DTYPES = (jnp.float32, jnp.bfloat16)
LANES = 128
BLOCKS = (512, 384, 256, LANES)


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Output in the dtype of q and lse, B N T in float32, for bound rules.

    With `interpret` the kernel is emulated on any platform, slowly.
    """
    if 0 in (*q.shape, *k.shape, *v.shape):
        return reference.forward(q, k, v, rules)
    sizes = sizes_of(q, k)._replace(batch=())
    kernel = Splash(
        mask=_static(rules.mask),
        sizes=sizes,
        cap=_cap(rules.score),
        precision=getattr(jax.config, "jax_default_matmul_precision"),  # noqa: B009
        interpret=interpret,
    )
    kind = wide(q.dtype)
    q = (q.astype(kind) * jnp.asarray(rules.scale, kind)).astype(q.dtype)
    return serve(kernel, q, k, v, rules, _ids(rules.mask, sizes_of(q, k)))


class Splash(NamedTuple):
    """The static arguments of one kernel.

    Attributes:
      mask: the static part of the mask.
      sizes: N, T and S, before padding.
      cap: softcap of the logits, or None.
      precision: of every product: `jax_default_matmul_precision` at the call.
      interpret: whether it is emulated without a TPU.
    """

    mask: Mask
    sizes: Sizes
    cap: float | None
    precision: Any
    interpret: bool

    fully_masked = False

    def run(self, q, k, v, extras):
        home, info = _kernel_module("kernel"), _mask_info(self.mask, self.sizes)
        ids, (q, k, v) = self._ids(extras), map(self._to_kernel_layout, (q, k, v))

        def one(q, k, v, ids):
            return home._splash_attention_forward(
                info.forward, q, k, v, ids, None, save_residuals=True, **self._block_options(info)
            )

        with jax.default_matmul_precision(self.precision):
            o, (lse,) = jax.vmap(one)(q, k, v, ids)
        return jnp.swapaxes(o, 1, 2)[:, : self.sizes.T], of_lse(lse[:, :, : self.sizes.T])

    def backward(self, q, k, v, extras, o, stats, do, dlse):
        # The kernel takes no dlse, but it takes delta = rowsum(do * o), from which dlse subtracts.
        info, T, lse = _mask_info(self.mask, self.sizes), self.sizes.T, stats.lse
        delta = jnp.sum(do.astype(lse.dtype) * o.astype(lse.dtype), axis=-1)
        delta = jnp.swapaxes(delta, 1, 2) - (0.0 if dlse is None else dlse)  # B N T
        rows = ((0, 0), (0, 0), (0, -T % LANES))
        lse, delta = (jnp.pad(x, rows) for x in (lse, delta))
        q, k, v, do = map(self._to_kernel_layout, (q, k, v, do))

        with jax.default_matmul_precision(self.precision):
            grads = jax.vmap(lambda *args: self._grads(info, *args))(
                q, k, v, self._ids(extras), lse, do, delta
            )
        dq, dk, dv = (jnp.swapaxes(x, 1, 2) for x in grads)
        S = self.sizes.S
        return dq[:, :T], dk[:, :S], dv[:, :S], jax.tree.map(zero_gradient, extras)

    def _grads(
        self, info: "SplashMaskInfo", q: Any, k: Any, v: Any, ids: Any, lse: Any, do: Any, di: Any
    ):
        home, layout = _kernel_module("kernel"), _kernel_module("kernel").QKVLayout.HEAD_DIM_MINOR
        args = (q, k, v, ids, None, lse, do, di)
        block_options = self._block_options(info)
        block_options |= {"q_layout": layout, "k_layout": layout, "v_layout": layout}
        # The backward kernels take the block sizes by themselves.
        for unknown in ("block_sizes", "residual_checkpoint_name"):
            del block_options[unknown]
        block_options |= {"bq": info.rows, "bkv": info.cols}
        _, dk, dv = home._splash_attention_bwd_dkv(
            *args,
            mask_info=info.backward,
            bkv_compute=info.cols,
            use_fused_bwd_kernel=False,
            **block_options,
        )
        return home._splash_attention_bwd_dq(*args, mask_info=info.forward, **block_options), dk, dv

    def _block_options(self, info: "SplashMaskInfo") -> dict[str, Any]:
        home = _kernel_module("kernel")
        return {
            "mask_value": home.DEFAULT_MASK_VALUE,
            "is_mqa": False,
            "block_sizes": home.BlockSizes(info.rows, info.cols),
            "residual_checkpoint_name": None,
            "mask_function": info.visible,
            "attn_logits_soft_cap": self.cap,
            "interpret": self.interpret,
        }

    def _to_kernel_layout(self, x: jax.Array) -> jax.Array:
        """B T N H to B N, padded length, H."""
        B, T, N, H = x.shape
        if T % LANES:
            x = jnp.pad(x, ((0, 0), (0, -T % LANES), (0, 0), (0, 0)))
        # Of one head nothing is to be moved, as of a cache, whose heads are batch entries.
        return x.reshape(B, 1, -1, H) if N == 1 else jnp.swapaxes(x, 1, 2)

    def _ids(self, extras: Any) -> Any:
        if not extras:
            return None
        return _kernel_module("kernel").SegmentIds(
            *(jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES))) for x in extras)
        )


class SplashMaskInfo(NamedTuple):
    """Splash attention's description of a static mask: blocks to run and their masks."""

    forward: Any
    backward: Any
    visible: Any
    rows: int
    cols: int


@cache
def _mask_info(mask: Mask, sizes: Sizes) -> SplashMaskInfo:
    T, S = (n + -n % LANES for n in (sizes.T, sizes.S))
    rows, cols = (next(b for b in BLOCKS if n % b == 0) for n in (T, S))
    masks, info = _kernel_module("mask"), _kernel_module("mask_info")
    if isinstance(mask, Full) and S == sizes.S:
        one = masks.FullMask((T, S))
    else:
        one = _computable_mask(
            (T, S), VisibleMask(mask, sizes, _visible_queries(mask, sizes) or (0, T))
        )
    heads = masks.MultiHeadMask([one] * sizes.N)
    forward, visible = info.process_mask(heads, (rows, cols))
    backward, _ = info.process_mask_dkv(heads, (rows, cols))
    return SplashMaskInfo(forward, backward, visible, rows, cols)


class VisibleMask(NamedTuple):
    """The static part of a mask as a function of indices, with padded keys masked.

    The kernel needs a visible key for every query, so fully masked queries see key 0; `serve`
    zeroes their output.
    """

    mask: Mask
    sizes: Sizes
    seeing: tuple[int, int]

    def __call__(self, q: Any, k: Any) -> Any:
        visible = _evaluate_mask(self.mask, q, k)
        # The kernel needs the full shape, which a mask of queries or keys alone does not have.
        if visible.shape != np.broadcast_shapes(q.shape, k.shape):
            visible = visible & (q >= 0) & (k >= 0)
        first, end = self.seeing
        if self.sizes.S % LANES:
            visible = visible & (k < self.sizes.S)
        if first > 0:
            visible = visible | ((k == 0) & (q < first))
        return visible | ((k == 0) & (q >= end)) if end % LANES or end < self.sizes.T else visible


def _computable_mask(shape: tuple[int, int], visible: VisibleMask) -> Any:
    """Lazily computed splash mask; hashed by the mask it wraps."""

    class Computed(_kernel_module("mask")._ComputableMask):
        def __eq__(self, other: Any) -> bool:
            return (self.shape, visible) == (other.shape, getattr(other, "mask_function", None))

        def __hash__(self) -> int:
            return hash((self.shape, visible))

    return Computed(shape, visible)


@cache
def _visible_queries(mask: Mask, sizes: Sizes) -> tuple[int, int] | None:
    """`first, end` of the queries that see a key, or None if they are not contiguous."""
    seeing = _rows(mask, sizes)
    if not seeing.any():
        return 0, 0
    first, end = int(seeing.argmax()), sizes.T - int(seeing[::-1].argmax())
    return (first, end) if seeing[first:end].all() else None


def _evaluate_mask(mask: Mask, q: Any, k: Any) -> Any:
    """The static mask at these indices; numpy in, numpy out."""
    if not isinstance(q, np.ndarray):  # inside the kernel
        return mask(0, 0, q, k)
    with jax.ensure_compile_time_eval():  # a user's class may compute in jax.numpy
        return np.asarray(mask(0, 0, q, k))


def _rows(mask: Mask, sizes: Sizes) -> np.ndarray:
    """Queries that see a key of a static mask, T."""
    band = as_known_band(mask)
    if band is not None:
        return np.broadcast_to(visible_in_band(band, sizes)[0][0], sizes.T)
    k = np.arange(sizes.S, dtype=np.int32)[None]
    parts = [np.arange(q, min(q + 512, sizes.T)) for q in range(0, sizes.T, 512)]
    tables = [_evaluate_mask(mask, q.astype(np.int32)[:, None], k) for q in parts]
    rows = [
        np.broadcast_to(x, (len(q), sizes.S)).any(1) for x, q in zip(tables, parts, strict=True)
    ]
    return np.concatenate(rows)


def _ids(mask: Mask, sizes: Sizes) -> tuple[jax.Array, jax.Array] | tuple[()]:
    """Segment ids of queries and keys for the non-static part of a mask, if there is any.

    Keys beyond a length get an id that no query has; `serve` zeroes queries beyond a length.
    """
    parts = [part for part in parts_of(mask) if not part.is_static]
    if not parts:
        return ()
    q, k = (jnp.zeros((sizes.B, n), jnp.int32) for n in (sizes.T, sizes.S))
    for part in parts:
        ids = segments_of(part)
        q, k = (q, k) if ids is None else map(jnp.broadcast_to, ids, (q.shape, k.shape))
    nobodys = q.min() - 1
    for part in parts:
        band = as_known_band(part)
        if band is not None and band.kv is not None:
            lengths = jnp.asarray(band.kv, jnp.int32).reshape(-1, 1)
            k = jnp.where(jnp.arange(sizes.S, dtype=jnp.int32)[None] < lengths, k, nobodys)
        padding = padding_before(part)
        if padding is not None:
            padding = jnp.asarray(padding, jnp.int32).reshape(-1, 1)
            k = jnp.where(jnp.arange(sizes.S, dtype=jnp.int32)[None] >= padding, k, nobodys)
    return q, k


def _static(mask: Mask) -> Mask:
    static = [part for part in parts_of(mask) if part.is_static and not isinstance(part, Full)]
    whole = static[0] if static else FULL
    for part in static[1:]:
        whole = whole & part
    return whole


def _cap(score: Score) -> float | None:
    return float(score.cap) if isinstance(score, Softcap) else None


def refusal(request: Request, rules: Rules) -> str | None:
    """Why splash attention cannot serve a request, or None; the platform is checked first."""
    if request.where.platform != "tpu":
        return f"needs a TPU; the platform is {request.where.platform}"
    q, k, v = request.q, request.k, request.v
    return unsupported_reason(q, k, v, rules) or of_mesh(request) or _of_version()


def unsupported_reason(q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> str | None:
    """Why it cannot serve a request on any platform and mesh, or None."""
    if q.dtype not in DTYPES:
        return f"needs float32 or bfloat16; q is {q.dtype}"
    if rules.positions is not None:
        return NO_POSITIONS
    if rules.dropout is not None:
        return "has no dropout; blockwise and reference do"
    if not isinstance(rules.score, Identity | Softcap):
        return f"takes only Softcap as a score; got {type(rules.score).__name__}"
    if isinstance(rules.score, Softcap) and not is_number(rules.score.cap):
        return "needs the cap of Softcap as a number, not as an array"
    return _of_mask(rules.mask, sizes_of(q, k))


def _of_mask(mask: Mask, sizes: Sizes) -> str | None:
    moving = [part for part in parts_of(mask) if not part.is_static]
    segments = [part for part in moving if segments_of(part) is not None]
    others = [part for part in moving if segments_of(part) is None and not _is_lengths(part)]
    if others:
        names = ", ".join(type(part).__name__ for part in others)
        return f"takes static masks, Segments, Documents and Lengths; got {names}"
    if len(segments) > 1:
        return "takes one Segments or Documents; combine their ids into one"
    if _visible_queries(_static(mask), sizes._replace(batch=())) is None:
        return "needs queries that see nothing to stand at the ends; this mask has some between"
    return None


def _is_lengths(part: Mask) -> bool:
    band = as_known_band(part)
    is_lengths = band is not None and band.lo is None and band.hi is None
    return is_lengths or padding_before(part) is not None


def _of_version() -> str | None:
    missing = [name for name in REQUIRED_NAMES if not hasattr(_kernel_module("kernel"), name)]
    return f"does not know this version of jax, {jax.__version__}" if missing else None


@cache
def _kernel_module(part: str) -> Any:
    return importlib.import_module(MODULE + part)
