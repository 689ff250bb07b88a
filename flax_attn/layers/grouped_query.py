"""Grouped-query attention: N query heads share K key/value heads (Ainslie et al., 2023)."""

from typing import Any, Unpack, get_args, overload

from jaxtyping import Array, Bool, Float, Int

from .._checks import check_choice
from ..attend import Empty
from ..masks import Mask
from ._cached import AnyCache, C, Call, attended, with_cache
from ._grouped import DecodingHeads


class GroupedQueryAttention(DecodingHeads):
    """`o_proj(attend(rotary(q_norm(q_proj(x))), rotary(k_norm(k_proj(x))), v_proj(x)))`.

    Query head n reads key/value head n // (N / K): K = N is multi-head, K = 1 multi-query.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token.
      num_heads: query heads, N.
      num_kv_heads: key/value heads, K; must divide N.
      head_dim: width of a head, H; N * H need not be in_features.
      rotary: a `Rotary`, or anything called as `rotary(x, positions)` on `*B T N H`; None for none.
      q_norm, k_norm: a norm over the last axis of `*B T N H`, such as
        `RMSNorm(head_dim, eps=1e-6)`; None for none.
      norm_after_rotary: whether the norms follow the rotation; by default they come before it.
      mask: what may look at what when a call gives no other; kept as `layer.mask`.
      rules: `Rules(score=..., scale=...)`: what happens to the logits. Its other parts are
        arguments of the layer or the call.
      sinks: whether each query head has a trained logit `layer.sinks`, from zero, that joins the
        softmax's denominator.
      qkv_bias, out_bias: whether `q_proj`, `k_proj` and `v_proj`, and `o_proj`, have biases.
      dropout: share of the weights that is dropped in training, from 0 to 1.
      kernel_init, bias_init: initializers of the projections; None draws as torch does.
      rngs: source of the random start, torch's U(+-1 / sqrt(width in)), and of the dropout.
      dtype: of the arithmetic; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, K that does not divide N, a share outside [0, 1], rules with
        more than score and scale, norm_after_rotary without a rotary and a norm; in the call, if x
        is not `*B T in_features`, masks, positions or valid do not broadcast, for positions without
        a rotary, or another word for `empty`.
      TypeError: if x is not floating, or a mask or valid not boolean.

    Source: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", 2023; names
    as in Llama's published checkpoints.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = GroupedQueryAttention(12, 6, 3, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 12))).shape
    (2, 5, 12)
    """

    @overload
    def __call__(
        self, x: Float[Array, "*B T D"], *, cache: None = None, **call: Unpack[Call]
    ) -> Float[Array, "*B T D"]: ...
    @overload
    def __call__(
        self, x: Float[Array, "*B T D"], *, cache: C, **call: Unpack[Call]
    ) -> tuple[Float[Array, "*B T D"], C]: ...
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        mask: Mask | Array | None = None,
        positions: Int[Array, "... T"] | None = None,
        valid: Bool[Array, "*#B T"] | None = None,
        empty: Empty = "zero",
        deterministic: bool | None = None,
        cache: AnyCache | None = None,
    ) -> Any:
        """Attention of x over itself.

        Args:
          x: the tokens.
          mask: replaces the layer's; `layer.mask & Lengths(n)` narrows it. None is the layer's.
          positions: what the rotary is given, and nothing else; None stands for 0 ... T - 1, or
            beside a cache for the tokens' places there. They are `*B T`, or `A *B T` for a rotary
            whose tokens have several positions.
          valid: which tokens are there. Others are neither read nor seen, whatever they hold, and
            their outputs are zero.
          empty: what a token gives that may look at nothing: "zero", or "mean", the mean of all
            values, as padding in Hugging Face's models with their additive `finfo.min`; see
            `attend`.
          deterministic: overrules `train()` and `eval()`.
          cache: what `init_cache` made, or an earlier call gave; x then are the next tokens, which
            look at those in the cache too, and the call gives y and the cache with them.
        """
        check_choice("empty", empty, *get_args(Empty))
        x, seen = self.tokens(x, mask, valid, cache)
        positions = self.places(x, positions, valid, cache)
        q, k, v = self.heads(x, positions)  # *B T N H, *B T K H, *B T K H
        how = {"mask": seen, "valid": valid, "empty": empty, **self.how(deterministic)}
        o, cache = attended(q, k, v, cache, **how)  # *B T N H
        return with_cache(self.output(o, valid), cache)  # *B T D
