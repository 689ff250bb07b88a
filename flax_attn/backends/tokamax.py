"""Tokamax's Mosaic kernels on Hopper and Blackwell: softcap, biases, ranges of keys, h != H.

For requests that cuDNN refuses. The visible keys of each query must be contiguous and are passed as
start and end: causal at any offset, windows, chunks, prefixes, lengths and their combinations by
`&`. With a bias and a softcap, Tokamax caps the sum.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import reference
from .._internal.types import Sizes
from ..masks import Mask
from ..masks.algebra import parts_of
from ..masks.ranges import runs_of
from ..rules import Request, Rules, sizes_of
from ..scores import IDENTITY, Additive, Chain, Identity, Score, Softcap
from .protocol import NO_POSITIONS, Stats, is_number, of_mesh, serve, with_dlse, zero_gradient

MODULE = "tokamax._src.ops.attention."
MIN_VERSION = (0, 0, 12)
DTYPES = (jnp.float16, jnp.bfloat16)
PRESETS = {
    "bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32,
}
MAX_HEAD_DIM = 256
# Replaces a bias of -inf, which would make a fully masked row NaN.
FINITE_MINUS_INF = -1e30
Ends = tuple[Any, Any]


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules, *, kernel: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Output in the dtype of q and lse, B N T in float32, for bound rules.

    `kernel` replaces Tokamax's kernel in tests without a GPU.
    """
    if 0 in (*q.shape, *k.shape, *v.shape):
        return reference.forward(q, k, v, rules)
    bias, cap = _bias_and_cap(rules.score) or (None, None)
    bias = None if bias is None else jnp.maximum(bias, jnp.asarray(FINITE_MINUS_INF, bias.dtype))
    extras = {"ends": _run_ends(rules.mask, sizes_of(q, k)), "bias": bias}
    return serve(Tokamax(float(rules.scale), cap, bias is not None, kernel), q, k, v, rules, extras)


class Tokamax(NamedTuple):
    """Scale, softcap or None, whether a bias may mask a whole row, and the kernel to call."""

    scale: float
    cap: float | None
    fully_masked: bool
    kernel: Any

    def run(self, q, k, v, extras):
        with _implicit_promotion():
            o, (m, l) = self._op()(
                q, k, v, return_residuals=True, **self._kernel_options(q, extras)
            )
        return o, Stats(
            jnp.where(m < FINITE_MINUS_INF / 2, -jnp.inf, m) if self.fully_masked else m, l
        )

    def backward(self, q, k, v, extras, o, stats, do, dlse):
        # `with_dlse` may call the kernel twice; the gradients of the bias add up as well.
        bias, dbias = extras["bias"], []

        def backward(v, o, do):
            gradients = self._op().vjp(
                tuple(stats),
                o,
                do,
                q,
                k,
                v,
                logits_dtype=jnp.dtype(jnp.float32),
                dropout_mask=None,
                dropout_rate=0.0,
                paging_info=None,
                q_indices=None,
                k_indices=None,
                normalize_output=True,
                **self._kernel_options(q, extras),
            )
            dbias.append(gradients.get("bias"))
            return gradients["q"], gradients["k"], gradients["v"]

        with _implicit_promotion():
            grads = with_dlse(backward, v, o, do, dlse)
        more = None if bias is None else sum(dbias[1:], start=dbias[0]).astype(bias.dtype)
        return *grads, {"ends": jax.tree.map(zero_gradient, extras["ends"]), "bias": more}

    def _op(self) -> Any:
        return self.kernel or _kernel_module("pallas_mosaic_gpu").PallasMosaicGpuFlashAttention()

    def _kernel_options(self, q: jax.Array, extras: Any) -> dict[str, Any]:
        first, end = extras["ends"]
        return {
            "precision": (PRESETS.get(q.dtype.name, jax.lax.DotAlgorithmPreset.F32_F32_F32),) * 2,
            "logits_scale": self.scale,
            "logits_soft_cap": self.cap,
            "bias": extras["bias"],
            "mask": _kernel_module("base").Mask(k_start=first, k_end=end),
        }


# The visible range of keys of each query.


def _run_ends(mask: Mask, sizes: Sizes) -> Ends:
    """Start and end of each query's visible keys, B|1 1 T, in Tokamax's layout."""
    run = runs_of(mask, jnp.arange(sizes.T, dtype=jnp.int32)[None])
    assert run is not None, mask
    first, end = (
        None if x is None else jnp.broadcast_to(x, (x.shape[0], sizes.T))[:, None].clip(0, sizes.S)
        for x in run
    )
    return first, end


def _bias_and_cap(score: Score) -> tuple[jax.Array | None, float | None] | None:
    """A score as a bias and a softcap of the sum, or None if it is not of this form."""
    first, then = (score.first, score.then) if isinstance(score, Chain) else (score, IDENTITY)
    if isinstance(first, Softcap | Identity):
        first, then = (IDENTITY, first) if isinstance(then, Identity) else (first, then)
    fits = isinstance(first, Additive | Identity) and isinstance(then, Softcap | Identity)
    if not fits or (isinstance(then, Softcap) and not is_number(then.cap)):
        return None
    return (
        first.array if isinstance(first, Additive) else None,
        float(then.cap) if isinstance(then, Softcap) else None,
    )


# Refusals.


def refusal(request: Request, rules: Rules) -> str | None:
    """Why Tokamax cannot serve a request, or None; whether it is installed is checked first."""
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed: pip install flax-attn[tokamax]"
    q, k, v, where = request.q, request.k, request.v, request.where
    capability = where.capability
    if capability is None:
        return f"needs an NVIDIA GPU; the platform is {where.platform}"
    if capability[0] not in (9, 10):
        at = ".".join(map(str, capability))
        return f"needs an NVIDIA GPU of compute capability 9 or 10; this one has {at}"
    if q.dtype not in DTYPES:
        return f"needs float16 or bfloat16, since it would round {q.dtype}"
    return unsupported_reason(q, k, v, rules) or of_mesh(request) or _of_version()


def unsupported_reason(q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> str | None:
    """Why it cannot serve a request on any platform, or None."""
    if any(x.shape[-1] % 8 or x.shape[-1] > MAX_HEAD_DIM for x in (q, v)):
        return (
            f"needs widths that are multiples of 8 and at most {MAX_HEAD_DIM}; "
            f"keys are {q.shape[-1]} and values {v.shape[-1]} wide"
        )
    if rules.positions is not None:
        return NO_POSITIONS
    if rules.dropout is not None:
        return "has no dropout; blockwise and reference do"
    if not is_number(rules.scale):
        return "needs scale as a number, not as an array; multiply q by it and give scale=1.0"
    bias_and_cap = _bias_and_cap(rules.score)
    if bias_and_cap is None:
        return "takes Additive, Softcap by a number, or Additive >> Softcap as a score"
    if bias_and_cap[0] is not None and q.shape[-3] == 1:
        return "takes Additive for two queries or more: of one its gradients are wrong"
    some = np.zeros((1, 1), np.int32)
    others = [type(part).__name__ for part in parts_of(rules.mask) if runs_of(part, some) is None]
    if others:
        hint = ": Documents(lengths) gives one" if others == ["Segments"] else ""
        return f"needs one run of keys for each query; {', '.join(others)} may give several{hint}"
    return None


@cache
def _of_version() -> str | None:
    installed = metadata.version("tokamax")
    numbers = tuple(int(x) for x in installed.split(".")[:3] if x.isdigit())
    if numbers < MIN_VERSION:
        return f"needs tokamax {'.'.join(map(str, MIN_VERSION))} or later; {installed} is installed"
    try:
        known = hasattr(_kernel_module("pallas_mosaic_gpu"), "PallasMosaicGpuFlashAttention")
    except ImportError as error:  # of a dependency such as xprof, or of a file that has moved
        return f"cannot import tokamax {installed}: {error}"
    return None if known else f"does not know this version of tokamax, {installed}"


@contextlib.contextmanager
def _implicit_promotion() -> Iterator[None]:
    """A context with the implicit promotion that tokamax's code needs, whatever the caller's."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def _kernel_module(part: str) -> Any:
    flags = importlib.import_module("absl.flags").FLAGS
    if not flags.is_parsed():
        flags.mark_as_parsed()  # else tokamax would parse the program's own arguments
    return importlib.import_module(MODULE + part)
