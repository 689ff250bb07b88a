"""Multi-head latent attention: keys and values are computed from one narrow latent per token."""

from typing import Unpack

from ._cached import AnyCache, CacheOptions, arithmetic_dtype, new_cache
from ._latent import LatentHeads
from ._self_attention import SelfAttention


class LatentAttention(LatentHeads, SelfAttention):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`o_proj(attend([q_n; R q_r], [W_k c; R k_r], W_v c))`, c the latent, k_r one for all heads.

    Also called: multi-head latent attention (MLA).

    `[c; k_r] = kv_a_proj_with_mqa(x)`, c normalised; `kv_b_proj` holds W_k and W_v of each head.
    Queries are `q_proj(x)`, or with a q_rank `q_b_proj(q_a_layernorm(q_a_proj(x)))`. The logits are
    scaled by `(nope_dim + rotary_dim) ** -0.5`.

    Two forms give the same outputs and gradients. Expanded, each token has N keys and values
    computed from its latent, and k_r is copied into each key; that is
    `N (nope_dim + rotary_dim + value_dim)` numbers per token. Absorbed, W_k is applied to the
    queries and W_v to the outputs, and all heads share one key of width `kv_rank + rotary_dim`,
    whose value is the latent. Nothing is copied, but a pair of tokens costs each head
    `2 kv_rank + rotary_dim` products instead of `nope_dim + rotary_dim + value_dim`.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token.
      num_heads: heads, N.
      kv_rank: width of the latent, L.
      nope_dim: number of components per head that are not rotated.
      rotary_dim: number of rotated components per head; all heads share their keys.
      value_dim: width of a value head, h.
      q_rank: width of the latent of the queries; None for queries directly from x.
      rotary: a `Rotary`, or anything called as `rotary(x, positions)` on `*B T N rotary_dim`; None
        for none. DeepSeek's pairs are `Rotary(layout="interleaved")`.
      mask: the default mask of a call; kept as `layer.mask`.
      rules: `Rules(score=..., scale=...)`, applied to the logits. With YaRN, DeepSeek
        multiplies the scale by `(0.1 * mscale_all_dim * log(factor) + 1) ** 2`.
      absorbed: whether to use the absorbed form.
      qkv_bias: whether `q_a_proj` and `kv_a_proj_with_mqa` have biases; `q_proj`, `q_b_proj` and
        `kv_b_proj` have none.
      out_bias: whether `o_proj` has a bias.
      dropout, kernel_init, bias_init, rngs, dtype, param_dtype: as in `GroupedQueryAttention`.

    A cache stores only the latent and the shared key; a call with a cache uses the absorbed form.

    The norms have eps 1e-6, as all published classes do. LongCat-Flash multiplies both normed
    latents by `sqrt(in_features / rank)`: multiply the scales of the norms by it.

    Raises:
      ValueError: for counts below 1, a rate outside [0, 1], rules with more than score and scale;
        in the call, if x is not `*B T in_features`, masks, positions or valid do not broadcast, or
        for an unknown `empty`.
      TypeError: if x is not floating, or a mask or valid not boolean.

    Source: DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts
    Language Model", 2024; names as in its published checkpoints.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = LatentAttention(12, 3, 5, 6, 4, 7, q_rank=8, rngs=nnx.Rngs(0))
    >>> x = jnp.ones((2, 5, 12))
    >>> run = nnx.jit(LatentAttention.__call__)  # layer(x), compiled
    >>> run(layer, x, valid=jnp.arange(5)[None] < jnp.asarray([[5], [3]])).shape  # padding behind
    (2, 5, 12)
    >>> y, cache = run(layer, x, cache=layer.init_cache(2, length=8))  # a prompt
    >>> run(layer, x[:, :1], cache=cache)[0].shape  # then token by token
    (2, 1, 12)
    """

    def init_cache(
        self, batch: int | tuple[int, ...], length: int, **options: Unpack[CacheOptions]
    ) -> AnyCache:
        """An empty cache; arguments as in `GroupedQueryAttention.init_cache`.

        It stores kv_rank + rotary_dim numbers per token, for any number of heads.
        """
        width = self.kv_b_proj.in_features + self.rotary_dim
        dtype = arithmetic_dtype(self.kv_a_proj_with_mqa)
        return new_cache(batch, length, (1, width, width), self.mask, dtype, options, latent=True)
