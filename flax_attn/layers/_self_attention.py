"""Self attention: the call that its layers share, step by step, and grouped heads.

    tokens    x, zeros at padding; the call's mask and score at the indices that each part reads
    project   queries, keys and values, normalised and rotated
    attention softmax(mask(score(scale * q.k))) . v, also over what a cache holds
    combine   what a layer makes of the heads, such as a gate
    output    the output projection; zeros at padding

A layer overrides the step in which it differs. One whose call takes more has a `__call__` of its
own, of the same steps.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple, Unpack, cast, get_args, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from .._internal.checks import (
    check_choice,
    check_divides,
    check_input,
    check_positive,
)
from ..attend import Empty, dispatch
from ..cache.attention import Stored, attend_cached_by_rules, attend_stored
from ..cache.checks import check_kind, check_no_mean, check_rules, refuse_later
from ..masks import CAUSAL, Mask
from ..masks.algebra import And
from ..rules import Request, Rules, checked_mask, nan_beyond, rules_of
from ._cached import AnyCache, C, CacheOptions, Call, arithmetic_dtype, new_cache
from ._common import as_module_data, check_tokens, merge_heads, split_heads
from ._dropout import AttentionDropout
from ._init import LayerInit, LayerInitKeywords, keywords_of, layer_init_signature
from ._layer import Layer
from ._token_indices import (
    RotaryPositions,
    indices_in_cache,
    indices_of,
    one_per_token,
    padding_mask,
    rotary_input,
    rotate_by,
)

RotaryFn = Callable[[jax.Array, jax.Array | None], jax.Array]
NormFn = Callable[[jax.Array], jax.Array]


class Tokens(NamedTuple):
    """The tokens of a call, and how they attend.

    Attributes:
      x: the tokens, zeros at padding.
      real: which of them are no padding; None for all.
      rules: mask, score, scale, sinks and dropout, each part of the mask and of the score at the
        indices that it reads.
      positions: input of the rotary; None for 0, 1, 2, ... or without one.
      empty: the output of a fully masked token.
      cache: that of the call, or what another layer has stored in its own.
      unknown: rows, `*B`, whose outputs are NaN, since the mask or the score reads positions that
        the cache does not store; None if there are none.
    """

    x: Float[Array, "*B T D"]
    real: Bool[Array, "*B T"] | None
    rules: Rules
    positions: RotaryPositions = None
    empty: Empty = "zero"
    cache: AnyCache | Stored | None = None
    unknown: Bool[Array, "*B"] | None = None


class Heads(Layer):
    """The steps of a self-attention layer.

    A subclass calls `set_rules` and sets `o_proj`, and optionally `dropout` and `sinks`.
    """

    rotary: RotaryFn | None
    index_rotary: RotaryFn | None = None  # in layers with an indexer
    mask: Mask
    rules: Rules
    default_scale: float | None = None  # for `rules.scale` None; None is H ** -0.5
    o_norm: NormFn | None = None  # applied before `o_proj`
    o_proj: nnx.Linear
    dropout: AttentionDropout | None = None
    sinks: nnx.Param | None = None

    def set_rules(self, rotary: RotaryFn | None, mask: Mask | Array, rules: Rules) -> None:
        """Checks the arguments, and stores them as attributes."""
        if rotary is not None and (isinstance(rotary, type) or not callable(rotary)):
            raise TypeError(
                "rotary must be a rotary object or a function rotary(x, positions), such as "
                f"rotary=Rotary(); got {getattr(rotary, '__name__', repr(rotary))}."
            )
        self.rotary, self.mask = as_module_data(rotary), as_module_data(checked_mask(mask))
        self.rules = as_module_data(_score_and_scale(rules))

    def tokens(
        self,
        x: Float[Array, "*B T D"],
        *,
        mask: Mask | Array | None = None,
        positions: Int[Array, "... T"] | None = None,
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        empty: Empty = "zero",
        deterministic: bool | None = None,
        cache: AnyCache | Stored | None = None,
    ) -> Tokens:
        """Checks the arguments of a call, and binds mask and score to the indices of its tokens."""
        if empty != "zero":
            check_choice("empty", empty, *get_args(Empty))
            if cache is not None:
                check_no_mean(empty)
        x, real = check_input("x", x, self.o_proj.out_features), None
        if valid is not None:
            real = check_tokens("valid", valid, x)
            x = jnp.where(real[..., None], x, 0)
        visible = self.mask if mask is None else checked_mask(mask)
        if cache is not None:
            check_kind(cache.cache if isinstance(cache, Stored) else cache, x)
            if mask is None and self.mask.shows_later:
                refuse_later(self.mask)
        elif real is not None:  # a cache does not hold padding; without one its keys are masked
            visible = And(visible, padding_mask(valid, real))
        score, at, unknown = self.rules.score, None, None
        rotaries = tuple(each for each in (self.rotary, self.index_rotary) if each is not None)
        if rotaries or real is not None or positions is not None:
            single = None if positions is None else one_per_token(x, positions, self.rotary)
            if cache is None:
                indices = indices_of(x, real, single, valid=valid)
            else:
                indices = indices_in_cache(cache, x, real, single, (visible, score))
                unknown = indices.unknown
            if rotaries:
                order = indices.order
                if cache is not None and positions is None:
                    order = jnp.maximum(cache.next_positions(x.shape[-2], real), 0)
                at = rotary_input(x, real, positions, order, visible, rotaries)
            if indices.by:
                visible, score = indices.mask(visible), indices.score(score)
        scale = self.default_scale if self.rules.scale is None else self.rules.scale
        sinks = None if self.sinks is None else self.sinks[...]
        drop = None if self.dropout is None else self.dropout(deterministic)
        rules = Rules(visible, score, scale, sinks, drop)
        return Tokens(x, real, rules, at, empty, cache, unknown)

    def project(
        self, tokens: Tokens
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T K H"], Float[Array, "*B T K h"], Any]:
        """Queries, keys, values, and what `combine` needs besides the heads, or None."""
        raise NotImplementedError

    def attention(
        self,
        q: Float[Array, "*B T N H"],
        k: Float[Array, "*B T K H"],
        v: Float[Array, "*B T K h"] | None,
        tokens: Tokens,
    ) -> tuple[Float[Array, "*B T N h"], Any]:
        """Attention output, and the call's cache with these keys and values, or None.

        v is None for a cache that stores keys alone, of which the output is then the weighted mean.
        """
        rules, cache = tokens.rules, cast(Any, tokens.cache)
        if cache is None:
            request = Request.of(q, k, v, rules)
            o, _ = nan_beyond(rules, dispatch(request, "auto", tokens.empty))
        elif isinstance(cache, Stored):  # by another layer; this one stores nothing
            check_rules(cache.cache, rules)
            o, cache = attend_stored(q, cache, rules), None
        else:
            o, cache = attend_cached_by_rules(q, k, v, cache, rules, tokens.real)
        if tokens.unknown is not None:
            o = jnp.where(tokens.unknown[..., None, None, None], jnp.nan, o)
        return o, cache

    def combine(self, o: Float[Array, "*B T N h"], v: Array, rest: Any) -> Array:
        """The input of `output`, from the attention output, the values and project's `rest`."""
        raise NotImplementedError

    def output(self, o: Float[Array, "*B T N h"], tokens: Tokens) -> Float[Array, "*B T D"]:
        """Applies `o_norm`, if there is one, and the output projection; zeros at padding."""
        o = o if self.o_norm is None else self.o_norm(o)
        y = self.o_proj(merge_heads(o))  # *B T D
        return y if tokens.real is None else jnp.where(tokens.real[..., None], y, 0)


class SelfAttention(Heads):
    """A self-attention layer, with or without a cache. Subclasses define `project`."""

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
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        empty: Empty = "zero",
        deterministic: bool | None = None,
        cache: AnyCache | None = None,
    ) -> Any:
        """Attention of x over itself.

        Args:
          x: the tokens.
          mask: replaces the layer's; `layer.mask & Lengths(n)` narrows it. None keeps the layer's.
          positions: token positions, `*B T`: read by the rotary, by masks such as `Chunked` and
            `Prefix`, and by masks and scores whose `reads` is "position". None counts the real
            tokens of a row, continuing from the cache if there is one. Causal order and distances
            never depend on positions. `A *B T` is for a rotary with several position axes, and
            then only the rotary reads it.
          valid: which tokens are real: an array, `Lengths(n)` for the first n of a row, or
            `~Lengths(n)` for those after n tokens of padding, which kernels take. Padding is masked
            out, whatever it holds, and its outputs are zero.
          empty: the output of a fully masked token: "zero", or "mean", the mean of all values, as
            for padding in Hugging Face's models with their additive `finfo.min`; see `attend`.
          deterministic: overrides `train()` and `eval()`.
          cache: from `init_cache` or an earlier call. x then holds the next tokens, which also
            attend to those in the cache, and the call returns y and the new cache.
        """
        tokens = self.tokens(
            x,
            mask=mask,
            positions=positions,
            valid=valid,
            empty=empty,
            deterministic=deterministic,
            cache=cache,
        )  # *B T D
        q, k, v, rest = self.project(tokens)  # *B T N H, *B T K H, *B T K h
        o, cache = self.attention(q, k, v, tokens)  # *B T N h
        o = o if rest is None else self.combine(o, v, rest)  # *B T N h
        y = self.output(o, tokens)  # *B T D
        return y if cache is None else (y, cache)


class Grouped(LayerInitKeywords, total=False):
    """Keyword arguments of `GroupedHeads`, for layers that forward them.

    Usage: `@grouped_signature def __init__(..., **grouped: Unpack[Grouped])`.
    """

    rotary: RotaryFn | None
    q_norm: NormFn | None
    k_norm: NormFn | None
    norm_after_rotary: bool
    mask: Mask | Array
    rules: Rules
    sinks: bool
    qkv_bias: bool | str
    out_bias: bool


class GroupedHeads(Heads):
    """Base of layers with grouped heads: N query heads share K key/value heads.

    Query head n uses key/value head n // (N / K). Arguments are those of `GroupedQueryAttention`.
    """

    query_parts: int = 1  # output width of `q_proj`, in multiples of N H
    kv_projections: tuple[str, ...] = ("k_proj", "v_proj")  # those that the layer has
    key_bias: bool = True  # whether `qkv_bias` includes `k_proj`
    clip_qkv: float | None = None  # largest absolute value of a head's component
    k_proj: nnx.Linear
    v_proj: nnx.Linear

    @layer_init_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rotary: RotaryFn | None = None,
        q_norm: NormFn | None = None,
        k_norm: NormFn | None = None,
        norm_after_rotary: bool = False,
        mask: Mask | Array = CAUSAL,
        rules: Rules = Rules(),  # noqa: B008
        sinks: bool = False,
        qkv_bias: bool | str = False,
        out_bias: bool = False,
        **more: Unpack[LayerInitKeywords],
    ):
        self.refuse(k_norm, sinks)
        _check_sizes(in_features, num_heads, num_kv_heads, head_dim)
        _check_order(norm_after_rotary, rotary, q_norm, k_norm)
        self.set_rules(rotary, mask, rules)
        self.head_dim, self.num_kv_heads = head_dim, num_kv_heads
        self.q_norm, self.k_norm, self.norm_after_rotary = q_norm, k_norm, norm_after_rotary
        init = LayerInit(**more)
        q_width = self.query_parts * num_heads * head_dim
        self.q_proj = init.linear(in_features, q_width, use_bias=has_bias(qkv_bias, "q"))
        for name in self.kv_projections:
            kv_width = num_kv_heads * head_dim
            biased = has_bias(qkv_bias, name[0]) and (self.key_bias or name != "k_proj")
            setattr(self, name, init.linear(in_features, kv_width, use_bias=biased))
        self.o_proj = init.linear(num_heads * head_dim, in_features, use_bias=out_bias)
        self.sinks = nnx.Param(jnp.zeros(num_heads, init.param_dtype)) if sinks else None
        self.dropout = init.attention_dropout()

    def refuse(self, k_norm: NormFn | None, sinks: bool) -> None:
        """Raises ValueError for options that a layer does not support; by default all are."""

    def project(
        self, tokens: Tokens
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T K H"], Float[Array, "*B T K H"], Any]:
        """Queries, keys and values, normalised and rotated if the layer has norms and a rotary."""
        q = split_heads(self.q_proj(tokens.x), self.head_dim)  # *B T N H
        q = self.norm_and_rotate(q, self.q_norm, tokens.positions)
        return q, *self.keys_and_values(tokens), None

    def keys_and_values(
        self, tokens: Tokens
    ) -> tuple[Float[Array, "*B T K H"], Float[Array, "*B T K H"]]:
        """Keys, normalised and rotated, and values."""
        k = split_heads(self.k_proj(tokens.x), self.head_dim)  # *B T K H
        k = self.norm_and_rotate(k, self.k_norm, tokens.positions)
        v = split_heads(self.v_proj(tokens.x), self.head_dim)  # *B T K H
        return k, v if self.clip_qkv is None else self.clipped(v, self.clip_qkv)

    def norm_and_rotate(
        self, x: Float[Array, "*B T N H"], norm: NormFn | None, positions: RotaryPositions
    ) -> Float[Array, "*B T N H"]:
        """Applies norm, clipping and rotary to the heads, in the layer's order."""
        x = x if norm is None or self.norm_after_rotary else norm(x)
        x = x if self.clip_qkv is None else self.clipped(x, self.clip_qkv)
        x = x if self.rotary is None else rotate_by(self.rotary, x, positions)
        return norm(x) if norm is not None and self.norm_after_rotary else x

    def clipped(self, x: Float[Array, "*B T N H"], most: float) -> Float[Array, "*B T N H"]:
        """Clips the components of the heads to [-most, most]."""
        return jnp.clip(x, -most, most)


class DecodingHeads(GroupedHeads):
    """`GroupedHeads` for layers that run on `attend`, and so support a cache."""

    def init_cache(
        self, batch: int | tuple[int, ...], length: int, **options: Unpack[CacheOptions]
    ) -> AnyCache:
        """An empty cache for this layer, used as `y, cache = layer(x, cache=cache)`.

        Args:
          batch: the batch axes `*B`; an int is one axis, () none.
          length: capacity of a row in tokens.
          options: window, keep_first, spare, dtype, store and layers, as in `Cache.empty`, or
            pages, as in `PagedCache.empty`, instead of a ring buffer. window="mask" covers the
            range that the layer's mask reaches back to; dtype defaults to the layer's.

        Raises:
          ValueError: for sizes and options that do not fit.
        """
        k = self.k_proj if "k_proj" in self.kv_projections else self.q_proj
        sizes = (self.num_kv_heads, self.head_dim, self.head_dim)
        return new_cache(batch, length, sizes, self.mask, arithmetic_dtype(k), options)


# For constructors with `**grouped`, so that `help` and `inspect` show all keywords.
grouped_signature = keywords_of(GroupedHeads)


def _check_sizes(in_features: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    check_positive(in_features=in_features, num_heads=num_heads, num_kv_heads=num_kv_heads)
    check_positive(head_dim=head_dim)
    check_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)


def _check_order(after: bool, rotary: RotaryFn | None, *norms: NormFn | None) -> None:
    if after and (rotary is None or all(norm is None for norm in norms)):
        raise ValueError(
            "norm_after_rotary=True says which of a norm and a rotary comes first; pass rotary= "
            "and one of q_norm= and k_norm=, or leave it out."
        )


def has_bias(qkv_bias: bool | str, projection: str) -> bool:
    """Whether "q", "k" or "v" has a bias; raises ValueError for other letters in `qkv_bias`."""
    if not isinstance(qkv_bias, str):
        return qkv_bias
    if not qkv_bias or set(qkv_bias) - set("qkv"):
        raise ValueError(
            "qkv_bias is True, False, or names the projections with a bias by their letters, such "
            f"as 'qv'; got {qkv_bias!r}."
        )
    return projection in qkv_bias


def _score_and_scale(rules: Rules) -> Rules:
    """Returns `rules`; raises ValueError if it sets more than score and scale."""
    if not isinstance(rules, Rules):
        raise TypeError(
            f"rules must be a flax_attn.Rules; got {type(rules).__name__}. A score is given as "
            "rules=Rules(score=...)."
        )
    shape = jax.tree.structure  # defaults have no leaves, so structures tell them apart
    more = [
        part.name
        for part in fields(rules)
        if part.name not in ("score", "scale")
        and shape(getattr(rules, part.name)) != shape(part.default)
    ]
    if more:
        raise ValueError(
            f"rules of a layer carry score and scale only; got Rules with {', '.join(more)}. A "
            "layer that has them takes mask=, sinks=True and dropout=rate as arguments of its own."
        )
    rules_of(score=rules.score, scale=rules.scale)  # raises TypeError for another kind
    return rules
