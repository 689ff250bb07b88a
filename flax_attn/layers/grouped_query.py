"""Grouped-query attention: N query heads share K key/value heads (Ainslie et al., 2023)."""

import math
from typing import Unpack

from ._self_attention import DecodingHeads, Grouped, NormFn, SelfAttention, grouped_signature


class GroupedQueryAttention(DecodingHeads, SelfAttention):
    """`o_proj(attend(rotary(q_norm(q_proj(x))), rotary(k_norm(k_proj(x))), v_proj(x)))`.

    Also called: grouped-query attention (GQA), multi-query attention (MQA) with one key head.

    Query head n uses key/value head n // (N / K): K = N is multi-head, K = 1 multi-query.

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
      mask: the default mask of a call; kept as `layer.mask`.
      rules: `Rules(score=..., scale=...)`: scaling and change of the logits. Other fields of
        `Rules` are arguments of the layer or the call.
      sinks: whether each query head has a trained logit `layer.sinks`, from zero, that joins the
        softmax's denominator.
      clip_qkv: components of queries, keys and values are clamped to [-clip_qkv, clip_qkv], before
        the rotation and after norms that come before it (OLMo, MPT); None for no clamping.
      o_norm: a norm before `o_proj`, such as
        `RMSNorm(num_heads * head_dim, eps=1e-5, over_heads=True)` (BitNet); None for none.
      key_bias: whether qkv_bias includes `k_proj`; False for DINOv3.
      qkv_bias, out_bias: whether `q_proj`, `k_proj` and `v_proj`, and `o_proj`, have biases; for
        some of the first three their letters, such as "qv".
      dropout: dropout rate of the weights in training, from 0 to 1.
      kernel_init, bias_init: initializers of the projections; None for PyTorch's.
      rngs: source of the initial values, torch's U(+-1 / sqrt(width in)), and of the dropout.
      dtype: of the arithmetic; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, K that does not divide N, a rate outside [0, 1], a qkv_bias
        of other letters, rules with more than score and scale, norm_after_rotary without a rotary
        and a norm, a clip_qkv that is no finite number above zero; in the call, if x is not
        `*B T in_features`, masks, positions or valid do not broadcast, or for an unknown `empty`.
      TypeError: if x is not floating, or a mask or valid not boolean.

    Source: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", 2023; names
    as in Llama's published checkpoints.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from flax_attn import Rotary
    >>> layer = GroupedQueryAttention(12, 6, 3, 4, rotary=Rotary(), rngs=nnx.Rngs(0))
    >>> x = jnp.ones((2, 5, 12))
    >>> run = nnx.jit(GroupedQueryAttention.__call__)  # layer(x), compiled
    >>> run(layer, x, valid=jnp.arange(5)[None] < jnp.asarray([[5], [3]])).shape  # padding behind
    (2, 5, 12)
    >>> y, cache = run(layer, x, cache=layer.init_cache(2, length=8))  # a prompt
    >>> run(layer, x[:, :1], cache=cache)[0].shape  # then token by token
    (2, 1, 12)
    """

    @grouped_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        clip_qkv: float | None = None,
        o_norm: NormFn | None = None,
        key_bias: bool = True,
        **grouped: Unpack[Grouped],
    ):
        self.key_bias = key_bias  # before the base constructor, which reads it
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        if clip_qkv is not None and not 0 < clip_qkv < math.inf:
            raise ValueError(
                f"clip_qkv must be a finite number above zero, or None; got {clip_qkv!r}."
            )
        self.clip_qkv, self.o_norm = clip_qkv, o_norm
