"""Grouped-query attention: N query heads share K key/value heads (Ainslie et al., 2023)."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jaxtyping import Array, Bool, Float, Int

from .._checks import check_choice, check_divides, check_input, check_positive
from ..attend import Empty, attend
from ..dropout import AttentionDropout
from ..masks import CAUSAL, Dense, Mask, as_mask
from ..rules import Rules
from ._common import as_attribute, check_tokens, merge_heads, split_heads, torch_linears

Norm = Callable[[jax.Array], jax.Array]
Turn = Callable[[jax.Array, jax.Array | None], jax.Array]


class GroupedQueryAttention(nnx.Module):
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

    >>> layer = GroupedQueryAttention(12, 6, 3, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 12))).shape
    (2, 5, 12)
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rotary: Turn | None = None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        norm_after_rotary: bool = False,
        mask: Mask | Array = CAUSAL,
        rules: Rules = Rules(),  # noqa: B008
        sinks: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
        dropout: float = 0.0,
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        _check_sizes(in_features, num_heads, num_kv_heads, head_dim)
        _check_order(norm_after_rotary, rotary, q_norm, k_norm)
        self.head_dim, self.rotary = head_dim, as_attribute(rotary)
        self.q_norm, self.k_norm, self.norm_after_rotary = q_norm, k_norm, norm_after_rotary
        self.mask, self.rules = as_attribute(as_mask(mask)), as_attribute(_score_and_scale(rules))
        linear = torch_linears(kernel_init, bias_init, dtype, param_dtype, rngs)
        self.q_proj = linear(in_features, num_heads * head_dim, use_bias=qkv_bias)
        self.k_proj = linear(in_features, num_kv_heads * head_dim, use_bias=qkv_bias)
        self.v_proj = linear(in_features, num_kv_heads * head_dim, use_bias=qkv_bias)
        self.o_proj = linear(num_heads * head_dim, in_features, use_bias=out_bias)
        self.sinks = nnx.Param(jnp.zeros(num_heads, param_dtype)) if sinks else None
        # Without dropout there is no random key in the layer's state.
        self.dropout = AttentionDropout(dropout, rngs=rngs) if dropout else None

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        mask: Mask | Array | None = None,
        positions: Int[Array, "... T"] | None = None,
        valid: Bool[Array, "*#B T"] | None = None,
        empty: Empty = "zero",
        deterministic: bool | None = None,
    ) -> Float[Array, "*B T D"]:
        """Attention of x over itself.

        Args:
          x: the tokens.
          mask: replaces the layer's; `layer.mask & Lengths(n)` narrows it. None is the layer's.
          positions: what the rotary is given, and nothing else; None stands for 0 ... T - 1. They
            are `*B T`, or `A *B T` for a rotary whose tokens have several positions.
          valid: which tokens are there. Others are neither read nor seen, whatever they hold, and
            their outputs are zero.
          empty: what a token gives that may look at nothing: "zero", or "mean", the mean of all
            values, as padding in Hugging Face's models with their additive `finfo.min`; see
            `attend`.
          deterministic: overrules `train()` and `eval()`.
        """
        x = check_input("x", x, self.q_proj.in_features)
        check_choice("empty", empty, *get_args(Empty))
        seen = self.mask if mask is None else as_mask(mask)
        there = check_tokens("valid", valid, x)[..., None]  # *B T 1
        if valid is not None:
            x = jnp.where(there, x, 0)
            seen = seen & Dense(there[..., None, None, :, 0])  # *B 1 1 T
        q = self._placed(self.q_proj(x), self.q_norm, positions)  # *B T N H
        k = self._placed(self.k_proj(x), self.k_norm, positions)  # *B T K H
        v = split_heads(self.v_proj(x), self.head_dim)  # *B T K H
        dropout = None if self.dropout is None else self.dropout(deterministic)
        how = {
            "score": self.rules.score,
            "scale": self.rules.scale,
            "sinks": self.sinks if self.sinks is None else self.sinks[...],
            "empty": empty,
        }
        o = attend(q, k, v, mask=seen, dropout=dropout, **how)  # *B T N H
        y = self.o_proj(merge_heads(o))  # *B T D
        return y if valid is None else jnp.where(there, y, 0)

    def _placed(self, x: jax.Array, norm: Norm | None, positions: Any) -> jax.Array:
        """Heads, normed and turned by their positions where the layer has a norm and a rotary."""
        if self.rotary is None and positions is not None:
            raise ValueError(
                "positions are what the layer's rotary is given, and this layer was built with "
                "rotary=None; build it with rotary=Rotary(), or leave positions out."
            )
        x = split_heads(x, self.head_dim)
        x = x if norm is None or self.norm_after_rotary else norm(x)
        x = x if self.rotary is None else self.rotary(x, positions)
        return norm(x) if norm is not None and self.norm_after_rotary else x


def _check_sizes(in_features: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    check_positive(in_features=in_features, num_heads=num_heads, num_kv_heads=num_kv_heads)
    check_positive(head_dim=head_dim)
    check_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)


def _check_order(after: bool, rotary: Turn | None, *norms: Norm | None) -> None:
    if after and (rotary is None or all(norm is None for norm in norms)):
        raise ValueError(
            "norm_after_rotary=True says which of a norm and a rotary comes first; hand in rotary= "
            "and one of q_norm= and k_norm=, or leave it out."
        )


def _score_and_scale(rules: Rules) -> Rules:
    """`rules`, if nothing but score and scale is set there."""
    if not isinstance(rules, Rules):
        raise TypeError(f"rules must be a flax_attn.Rules; got {type(rules).__name__}.")
    shape = jax.tree.structure  # a default has no leaves, so that equal structures are equal
    more = [
        part.name
        for part in fields(rules)
        if part.name not in ("score", "scale")
        and shape(getattr(rules, part.name)) != shape(part.default)
    ]
    if more:
        raise ValueError(
            f"rules of a layer carry score and scale only; got Rules with {', '.join(more)}. The "
            "layer takes mask=, sinks=True and dropout=rate as arguments of its own."
        )
    return rules
