"""cuDNN's fused attention on NVIDIA GPUs, through jax: float16 and bfloat16, bands of keys.

`jax.nn.dot_product_attention(implementation="cudnn")` rounds the log-sum-exp to the dtype of q and
drops its gradient, so this module binds the two primitives under it: forward returns the lse in
float32, backward takes the lse and the output with the sinks applied. Requests that cuDNN cannot
serve are refused by name. Padding before the tokens of a row is moved after them, since cuDNN takes
lengths alone. Its dropout draws other elements than `Dropout` does, and dense masks
would be biases as large as the weights (whose gradients are NaN for some lengths). Packed documents
are refused: with the offsets that jax can pass, cuDNN ended in an illegal memory access on an H100
(jax 0.11.2), and its lse would take documents times tokens.
"""

import importlib
import inspect
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import reference
from .._internal.arrays import rotate_rows, saturate
from ..masks import FULL, Band, Lengths, Window
from ..masks.algebra import padding_before, parts_of
from ..masks.ranges import as_known_band
from ..rules import Request, Rules, sizes_of
from ..scores import Identity
from .protocol import (
    NO_POSITIONS,
    Grads,
    is_number,
    of_lse,
    serve,
    with_dlse,
    zero_gradient,
)

MODULE = "jax._src.cudnn.fused_attention_stablehlo"
REQUIRED_NAMES = ("_dot_product_attention_fwd_p_wrapper", "_dot_product_attention_bwd_p_wrapper")
DTYPES = (jnp.float16, jnp.bfloat16)


def forward(q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> tuple[jax.Array, jax.Array]:
    """Output in the dtype of q and lse, B N T in float32, for bound rules."""
    if 0 in (*q.shape, *k.shape):
        return reference.forward(q, k, v, rules)
    if _padding_before(rules) is not None:
        return _moved_left(q, k, v, rules)
    # cuDNN takes a length for every batch entry, or none at all.
    band, sizes = _band(rules), sizes_of(q, k)
    lengths = tuple(
        jnp.broadcast_to(
            jnp.clip(jnp.asarray(most if n is None else n, jnp.int32), 0, most), sizes.B
        )
        for n, most in ((band.rows, sizes.T), (band.kv, sizes.S))
    )
    padded = band.rows is not None or band.kv is not None
    causal = band.hi is not None
    # Its window counts the query's own key.
    window = None if band.lo is None else saturate(1 - band.lo)
    kernel = Cudnn(float(rules.scale), padded, causal, window)
    return serve(kernel, q, k, v, rules, lengths if padded else ())


def _moved_left(
    q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules
) -> tuple[jax.Array, jax.Array]:
    """`forward` of rows that begin with padding, by rows that end with it."""
    band, T = _band(rules), q.shape[1]
    padding = jnp.clip(jnp.broadcast_to(_padding_before(rules), q.shape[0]), 0, T)
    kv, rows = (jnp.clip(T if n is None else n, 0, T) - padding for n in (band.kv, band.rows))
    mask = FULL & Lengths(kv)  # by which padding sees the tokens
    if band.hi is not None:
        mask = Window(None if band.lo is None else -band.lo, 0) & Lengths(kv, q=rows)
    q, k, v = (rotate_rows(x, padding) for x in (q, k, v))
    o, lse = forward(q, k, v, replace(rules, mask=mask))
    lse = rotate_rows(jnp.swapaxes(lse, 1, 2), -padding)
    return rotate_rows(o, -padding), jnp.swapaxes(lse, 1, 2)


class Cudnn(NamedTuple):
    """A cuDNN kernel with one of its masks.

    Attributes:
      scale: factor of q.k.
      padded: whether there are lengths.
      causal: whether keys after the query are masked.
      window: number of keys that a query sees, including its own, or None.
    """

    scale: float
    padded: bool
    causal: bool
    window: int | None

    fully_masked = False

    def run(self, q, k, v, extras):
        o, lse = self._call("fwd", q, k, v, extras, is_training=True)
        return o, of_lse(lse)

    def backward(self, q, k, v, extras, o, stats, do, dlse):
        def backward(v, o, do) -> Grads:
            return tuple(self._call("bwd", q, k, v, extras, stats.lse, o, do))

        return *with_dlse(backward, v, o, do, dlse), jax.tree.map(zero_gradient, extras)

    def _call(
        self, phase: str, q: Any, k: Any, v: Any, extras: Any, *more: Any, **options: Any
    ) -> Any:
        """Binds jax's cuDNN primitive without bias, offsets and pages."""
        home = importlib.import_module(MODULE)
        # The primitive marks absent operands by arrays of size zero.
        none = jnp.zeros(0, q.dtype)
        rows, kv = extras or (none, none)
        kind = ("PADDING_CAUSAL" if self.causal else "PADDING") if self.padded else "NO_MASK"
        kind = "CAUSAL" if self.causal and not self.padded else kind
        if (
            "score_mod" in inspect.signature(home.dot_product_attention).parameters
        ):  # of a later jax
            options["score_mod"] = None
        bind = partial(
            getattr(home, f"_dot_product_attention_{phase}_p_wrapper").bind,
            scale=self.scale,
            seed=42,
            dropout_rate=0.0,
            variadic_args=(False, False),
            mask_type=home.MaskType[kind],
            layout=home.AttentionLayout.BTNH.value,
            sliding_window_length=self.window,
            **options,
        )

        @jax.custom_batching.custom_vmap
        def call(q: Any, k: Any, v: Any, rows: Any, kv: Any, *more: Any) -> list[jax.Array]:
            none = jnp.zeros(0, q.dtype)
            return list(bind(q, k, v, none, rows, kv, none, none, none, none, *more))

        # That of jax fails where one array has the axis and another has not.
        @call.def_vmap
        def _(size: int, mapped: list[bool], *arrays: jax.Array) -> Any:
            wide = [
                x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
                for x, is_mapped in zip(arrays, mapped, strict=True)
            ]
            results = call(*(x.reshape(-1, *x.shape[2:]) for x in wide))
            return [x.reshape(size, -1, *x.shape[1:]) for x in results], [True] * len(results)

        return call(q, k, v, rows, kv, *more)


def refusal(request: Request, rules: Rules) -> str | None:
    """Why cuDNN cannot serve a request, or None; platform and dtype are checked first."""
    q, k, v, capability = request.q, request.k, request.v, request.where.capability
    if capability is None:
        return f"needs an NVIDIA GPU; the platform is {request.where.platform}"
    if capability < (8, 0):
        at = ".".join(map(str, capability))
        return f"needs an NVIDIA GPU of compute capability 8.0 or later; this one has {at}"
    if q.dtype not in DTYPES:
        return f"needs float16 or bfloat16, since it would round {q.dtype}"
    most = 256 if capability >= (9, 0) else 128
    if q.shape[-1] % 8 or q.shape[-1] > most:
        return f"needs a head width that is a multiple of 8 and at most {most}; it is {q.shape[-1]}"
    if v.shape[-1] != q.shape[-1]:
        return f"needs values as wide as keys; they are {v.shape[-1]} and {q.shape[-1]} wide"
    return _of_rules(rules, q.shape[-3], k.shape[-3]) or _of_version()


def _of_rules(rules: Rules, T: int, S: int) -> str | None:
    if rules.positions is not None:
        return NO_POSITIONS
    if rules.dropout is not None:
        return "draws other dropout masks than Dropout; blockwise and reference draw its masks"
    if not isinstance(rules.score, Identity):
        return f"takes no score; got {type(rules.score).__name__}"
    if not is_number(rules.scale):
        return "needs scale as a number, not as an array; multiply q by it and give scale=1.0"
    parts = [x for x in parts_of(rules.mask) if padding_before(x) is None]
    others = [type(x).__name__ for x in parts if as_known_band(x) is None]
    if others or len(parts) < len(parts_of(rules.mask)) - 1:
        names = ", ".join(others) or "several ~Lengths"
        return f"takes causal, left-window and length masks; got {names}"
    if len(parts) < len(parts_of(rules.mask)) and (T != S or _band(rules).rows is not None):
        return "takes ~Lengths for as many queries as keys, without Lengths(q=)"
    return _of_band(_band(rules), T, S)


def _of_band(band: Band, T: int, S: int) -> str | None:
    if band.hi is not None and band.hi != 0:
        return f"takes causal masks without an offset; this one ends at {band.hi:+d} keys"
    if band.lo is not None and (band.hi is None or band.lo > 0):
        return "takes a window to the left alone, Window(left, 0); the mask has another"
    if band.lo is not None and T > S:
        return f"takes a window for no more queries than keys; they are {T} and {S}"
    return None


def _of_version() -> str | None:
    home = importlib.import_module(MODULE)
    missing = [name for name in REQUIRED_NAMES if not hasattr(home, name)]
    return f"does not know this version of jax, {jax.__version__}" if missing else None


def _band(rules: Rules) -> Band:
    """The band of a mask, but for padding before the tokens."""
    bands = (as_known_band(x) for x in parts_of(rules.mask) if padding_before(x) is None)
    return reduce(Band.combine, (x for x in bands if x is not None), Band())


def _padding_before(rules: Rules) -> Any:
    """The number of tokens of padding before those of each row, or None."""
    counts = (padding_before(part) for part in parts_of(rules.mask))
    return next((n for n in counts if n is not None), None)
