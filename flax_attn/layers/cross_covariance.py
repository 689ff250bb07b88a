"""Cross-covariance attention: channels attend to channels, linear in T (XCiT, 2021)."""

from typing import Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from .._internal.arrays import aligned
from .._internal.checks import check_divides, check_input, check_positive, check_rate
from .._internal.types import wide
from ..masks import Mask
from ..norms import l2_norm
from ..reference import softmax
from ..taps import tap
from ._common import check_tokens, merge_heads
from ._dropout import LayerDropout
from ._init import LayerInit, LayerInitKeywords, layer_init_signature
from ._inputs import zero_padding
from ._layer import Layer

EPS = 1e-12  # lower bound of the norm in divisions, as in torch


class CrossCovarianceAttention(Layer):
    """`proj(softmax(temperature * q k^T) v)` with channels as the sequence axis.

    Also called: cross-covariance attention (XCA), XCiT attention.

    In each head q, k and v are H x T: each channel of q and k is a vector over the tokens, of norm
    one. Their products are the H x H weights, so time and memory grow with T, not with its square.
    There are no weights between tokens, so there is no mask; `valid` excludes padding. For 16-bit
    inputs norms, scores and weights are float32.

    Shapes: x `*B T dim` -> `*B T dim`.

    Args:
      dim: width of a token, D.
      num_heads: number of heads, of width D / N; must divide dim.
      qkv_bias: whether `qkv` has a bias; `proj` always has one. Layout [3, N, H].
      dropout: dropout rate of the weights in training, from 0 to 1.
      kernel_init, bias_init: initializers of the projections; None for PyTorch's. The
        `temperature` of each head, N x 1 x 1, starts from one.
      rngs: source of the initial values, torch's U(+-1 / sqrt(width in)), and of the dropout.
      dtype: of the projections; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, heads that do not divide dim, a rate outside [0, 1]; in the
        call, if x or valid do not fit.
      TypeError: if x is not floating, or valid not boolean.

    Source: El-Nouby et al., "XCiT: Cross-Covariance Image Transformers", 2021, section 3.2, whose
    published checkpoints have these names.

    >>> layer = CrossCovarianceAttention(12, 3, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 12))).shape
    (2, 5, 12)
    """

    @layer_init_signature
    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = False,
        **more: Unpack[LayerInitKeywords],
    ):
        check_positive(dim=dim, num_heads=num_heads)
        self.num_heads = num_heads
        self.head_dim = check_divides("num_heads", num_heads, "dim", dim)
        init = LayerInit(**more)
        self.qkv = init.linear(dim, 3 * dim, use_bias=qkv_bias)
        self.temperature = nnx.Param(jnp.ones((num_heads, 1, 1), init.param_dtype))
        self.proj = init.linear(dim, dim)
        self.dropout = LayerDropout(check_rate("dropout", init.dropout), rngs=init.rngs)

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B T D"]:
        """Attention of the channels of x over each other.

        Args:
          x: the tokens.
          valid: which tokens are real. Padding enters no norm and no product, and its outputs are
            zero.
          deterministic: overrides `train()` and `eval()`.
        """
        x = check_input("x", x, self.qkv.in_features)
        is_valid = check_tokens("valid", valid, x)[..., None]  # *B T 1
        qkv = jnp.where(is_valid, self.qkv(jnp.where(is_valid, x, 0)), 0)  # *B T 3D
        out = qkv.dtype
        qkv = qkv.astype(wide(out)).reshape(*x.shape[:-1], 3, self.num_heads, self.head_dim)
        q, k, v = jnp.moveaxis(qkv, (-3, -4), (0, -1))  # *B N H T each
        q, k = (l2_norm(channels, eps=EPS, floor=True) for channels in (q, k))
        temperature = aligned(self.temperature[...], q)  # N 1 1
        scores = tap("scores", q @ k.mT * temperature)  # *B N H H
        weights = tap("weights", softmax(scores))  # *B N H H
        weights = self.dropout(weights, deterministic=deterministic)
        context = tap("context", jnp.moveaxis(weights @ v, -1, -3))  # *B T N H
        return zero_padding(self.proj(merge_heads(context.astype(out))), valid)  # *B T D
