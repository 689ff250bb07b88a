"""What layers with grouped heads share: a constructor, and the steps around attention.

N query heads read K key/value heads, head n the head n // (N / K).
"""

from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, Signature, signature
from typing import Any, Required, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jaxtyping import Array, Bool, Float, Int

from .._checks import check_divides, check_input, check_positive
from ..dropout import AttentionDropout
from ..masks import CAUSAL, Dense, Mask, as_mask
from ..rules import Rules
from ._common import as_attribute, check_tokens, merge_heads, split_heads, torch_linears

Norm = Callable[[jax.Array], jax.Array]
Turn = Callable[[jax.Array, jax.Array | None], jax.Array]
Init = TypeVar("Init", bound=Callable[..., None])


class Grouped(TypedDict, total=False):
    """The keywords of `GroupedHeads`, for a layer that takes them too and hands them on.

    Such a layer writes `@grouped_signature def __init__(..., **grouped: Unpack[Grouped])`.
    """

    rotary: Turn | None
    q_norm: Norm | None
    k_norm: Norm | None
    norm_after_rotary: bool
    mask: Mask | Array
    rules: Rules
    sinks: bool
    qkv_bias: bool
    out_bias: bool
    dropout: float
    kernel_init: Initializer | None
    bias_init: Initializer | None
    rngs: Required[nnx.Rngs]
    dtype: Any
    param_dtype: Any


class GroupedHeads(nnx.Module):
    """The parts of a layer with grouped heads; a layer adds the equation, as its `__call__`.

    Arguments are those of `GroupedQueryAttention`.
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

    def tokens(
        self,
        x: Float[Array, "*B T D"],
        mask: Mask | Array | None,
        valid: Bool[Array, "*#B T"] | None,
    ) -> tuple[Float[Array, "*B T D"], Mask]:
        """x with zeros for the tokens that are not there, and who may look at whom."""
        x = check_input("x", x, self.q_proj.in_features)
        seen = self.mask if mask is None else as_mask(mask)
        if valid is None:
            return x, seen
        there = check_tokens("valid", valid, x)  # *B T
        return jnp.where(there[..., None], x, 0), seen & Dense(there[..., None, None, :])

    def heads(
        self, x: Float[Array, "*B T D"], positions: Int[Array, "... T"] | None
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T K H"], Float[Array, "*B T K H"]]:
        """Queries, keys and values, normed and turned where the layer has norms and a rotary."""
        q = self.placed(split_heads(self.q_proj(x), self.head_dim), self.q_norm, positions)
        k = self.placed(split_heads(self.k_proj(x), self.head_dim), self.k_norm, positions)
        return q, k, split_heads(self.v_proj(x), self.head_dim)

    def placed(
        self, x: Float[Array, "*B T N H"], norm: Norm | None, positions: Int[Array, "... T"] | None
    ) -> Float[Array, "*B T N H"]:
        """Heads, normed and turned by their positions, in the layer's order."""
        if self.rotary is None and positions is not None:
            raise ValueError(
                "positions are what the layer's rotary is given, and this layer was built with "
                "rotary=None; build it with rotary=Rotary(), or leave positions out."
            )
        x = x if norm is None or self.norm_after_rotary else norm(x)
        x = x if self.rotary is None else self.rotary(x, positions)
        return norm(x) if norm is not None and self.norm_after_rotary else x

    def how(self, deterministic: bool | None) -> dict[str, Any]:
        """What `attend` is given beside the heads and the mask."""
        return {
            "score": self.rules.score,
            "scale": self.rules.scale,
            "sinks": None if self.sinks is None else self.sinks[...],
            "dropout": None if self.dropout is None else self.dropout(deterministic),
        }

    def output(
        self, o: Float[Array, "*B T N H"], valid: Bool[Array, "*#B T"] | None
    ) -> Float[Array, "*B T D"]:
        """The output projection, and zeros for the tokens that are not there."""
        y = self.o_proj(merge_heads(o))  # *B T D
        return y if valid is None else jnp.where(check_tokens("valid", valid, y)[..., None], y, 0)


def grouped_signature(init: Init) -> Init:
    """A constructor that takes `**grouped`, with all of its keywords for `help` and `inspect`."""
    own = [x for x in signature(init).parameters.values() if x.kind != Parameter.VAR_KEYWORD]
    names = {x.name for x in own}
    more = [x for x in signature(GroupedHeads.__init__).parameters.values() if x.name not in names]
    init.__signature__ = Signature([*own, *more])  # pyright: ignore[reportFunctionMemberAccess]
    return init


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
