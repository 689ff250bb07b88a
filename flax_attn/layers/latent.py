"""Multi-head latent attention: keys and values of all heads come from one narrow latent a token."""

from typing import Unpack

from ._cached import AnyCache, CacheOptions, arithmetic_dtype, new_cache
from ._forward import SelfAttention
from ._latent import LatentHeads


class LatentAttention(LatentHeads, SelfAttention):
    """`o_proj(attend([q_n; R q_r], [W_k c; R k_r], W_v c))`, c the latent, k_r one for all heads.

    Also called: multi-head latent attention (MLA).

    `[c; k_r] = kv_a_proj_with_mqa(x)`, c normed; W_k and W_v of each head lie side by side in
    `kv_b_proj`. Queries are `q_proj(x)`, with a q_rank `q_b_proj(q_a_layernorm(q_a_proj(x)))`. The
    logits are scaled by `(nope_dim + rotary_dim) ** -0.5`.

    Two forms give the same numbers and gradients. Expanded, each token has N keys and values, which
    are made of its latent, and k_r is copied into each of the keys; that is
    `N (nope_dim + rotary_dim + value_dim)` numbers a token. Absorbed, W_k is applied to the queries
    and W_v to the outputs, and all heads look at one key of width `kv_rank + rotary_dim`, whose
    value is the latent. Nothing is copied, but a pair of tokens costs each head
    `2 kv_rank + rotary_dim` products in place of `nope_dim + rotary_dim + value_dim`.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token.
      num_heads: heads, N.
      kv_rank: width of the latent, L.
      nope_dim: components of a head that no position turns.
      rotary_dim: components of a head that the rotary turns; its keys are shared by all heads.
      value_dim: width of a value head, h.
      q_rank: width of the latent of the queries; None for queries straight from x.
      rotary: a `Rotary`, or anything called as `rotary(x, positions)` on `*B T N rotary_dim`; None
        for none. DeepSeek's pairs are `Rotary(layout="interleaved")`.
      mask: the default mask of a call; kept as `layer.mask`.
      rules: `Rules(score=..., scale=...)`: what happens to the logits. With YaRN, DeepSeek
        multiplies the scale by `(0.1 * mscale_all_dim * log(factor) + 1) ** 2`.
      absorbed: which of the two forms.
      qkv_bias: whether `q_a_proj` and `kv_a_proj_with_mqa` have biases; `q_proj`, `q_b_proj` and
        `kv_b_proj` have none.
      out_bias: whether `o_proj` has a bias.
      dropout, kernel_init, bias_init, rngs, dtype, param_dtype: as of `GroupedQueryAttention`.

    A cache holds the latent and the shared key alone, and a call with one computes in the absorbed
    form.

    The norms have eps 1e-6, as all published classes do. LongCat-Flash multiplies both normed
    latents by `sqrt(in_features / rank)`: multiply the gains of the norms by it.

    Raises:
      ValueError: for counts below 1, a share outside [0, 1], rules with more than score and scale;
        in the call, if x is not `*B T in_features`, masks, positions or valid do not broadcast, or
        for another word for `empty`.
      TypeError: if x is not floating, or a mask or valid not boolean.

    Source: DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts
    Language Model", 2024; names as in its published checkpoints.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = LatentAttention(12, 3, 5, 6, 4, 7, q_rank=8, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 12))).shape
    (2, 5, 12)
    """

    def init_cache(
        self, batch: int | tuple[int, ...], length: int, **options: Unpack[CacheOptions]
    ) -> AnyCache:
        """An empty cache; arguments as of `GroupedQueryAttention.init_cache`.

        Of each token it keeps kv_rank + rotary_dim numbers, whatever the number of heads.
        """
        width = self.kv_b_proj.in_features + self.rotary_dim
        dtype = arithmetic_dtype(self.kv_a_proj_with_mqa)
        return new_cache(batch, length, (1, width, width), self.mask, dtype, options, latent=True)
