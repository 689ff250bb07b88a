"""The forward pass of self attention, and its steps before and after attention.

x           = the tokens, zeros at padding
mask, score = the call's; each part indexed by slot, order or position (`_token_indices.py`)
positions   = input of the rotary: the caller's positions, or the order of the tokens
q, k, v     = project(x, positions): the layer's hook, which also returns `combine` or None
mask        = narrowed(mask, x, positions, k): fewer keys, in layers that select keys
o           = attend(q, k, v), or attend_cached with a cache
y           = o_proj(combine(o, v)); zeros at padding

A layer inherits `__call__` from `SelfAttention`, or from `WeightsAttention` in `_weights.py`. A
layer whose call has more keywords defines its own, which calls `forward`.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple, Unpack, get_args, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from .._internal.checks import check_choice
from ..attend import Empty, attend
from ..cache import Cache, PagedCache, attend_cached
from ..cache.attention import Stored, attend_stored
from ..cache.checks import check_kind, check_no_mean, refuse_later
from ..dropout import AttentionDropout
from ..masks import Mask, as_mask
from ..rules import Rules
from ..scores import Score
from ._cached import AnyCache, C, Call
from ._common import as_module_data, mask_padding, merge_heads
from ._init import keywords_of
from ._inputs import zero_padding
from ._layer import Layer
from ._token_indices import (
    RotaryPositions,
    TokenIndices,
    one_per_token,
    rotary_input,
    rotate_by,
    token_indices,
)

RotaryFn = Callable[[jax.Array, jax.Array | None], jax.Array]
NormFn = Callable[[jax.Array], jax.Array]
CombineFn = Callable[[jax.Array, jax.Array], jax.Array]


class Tokens(NamedTuple):
    """The tokens of a call, with mask, score and rotary input for their indices.

    Attributes:
      x: the tokens, zeros at padding.
      mask, score: each part evaluated at the indices that it reads.
      positions: input of the rotary.
      indices: indices of the tokens.
    """

    x: Float[Array, "*B T D"]
    mask: Mask
    score: Score
    positions: RotaryPositions
    indices: TokenIndices


class Heads(Layer):
    """The steps before and after attention in a self-attention layer.

    A subclass calls `set_rules` and sets `o_proj`, and optionally `dropout` and `sinks`.
    """

    rotary: RotaryFn | None
    index_rotary: RotaryFn | None = None  # in layers with an indexer
    mask: Mask
    rules: Rules
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
        self.rotary, self.mask = as_module_data(rotary), as_module_data(as_mask(mask))
        self.rules = as_module_data(_score_and_scale(rules))

    def tokens(
        self,
        x: Float[Array, "*B T D"],
        mask: Mask | Array | None,
        valid: Bool[Array, "*#B T"] | None,
        positions: Int[Array, "... T"] | None = None,
        cache: AnyCache | Stored | None = None,
    ) -> Tokens:
        """Zeros padding, and binds mask, score and rotary input to the token indices."""
        if cache is not None:
            check_kind(cache.cache if isinstance(cache, Stored) else cache, x)
            if mask is None and self.mask.shows_later:
                refuse_later(self.mask)
        visible, score = self.mask if mask is None else as_mask(mask), self.rules.score
        x, shown = mask_padding(
            x, visible, valid, self.o_proj.out_features, mask_keys=cache is None
        )
        if valid is positions is self.rotary is self.index_rotary is None:
            return Tokens(x, shown, score, None, TokenIndices())  # every index equals the slot
        single = one_per_token(x, positions, self.rotary)
        indices = token_indices(x, valid, single, cache=cache, readers=(visible, score))
        order = indices.order
        if cache is not None and positions is None and self.rotary is not None:
            order = jnp.maximum(cache.next_places(x.shape[-2], valid), 0)
        at = rotary_input(x, valid, positions, order, visible, self.rotary, self.index_rotary)
        return Tokens(x, indices.mask(shown), indices.score(score), at, indices)

    def rotate(
        self, x: Float[Array, "*B T N H"], positions: RotaryPositions
    ) -> Float[Array, "*B T N H"]:
        """Rotates the heads by their positions, if the layer has a rotary."""
        return x if self.rotary is None else rotate_by(self.rotary, x, positions)

    def attend_kwargs(self, deterministic: bool | None) -> dict[str, Any]:
        """Keyword arguments of `attend`, except mask and score."""
        return {
            "scale": self.rules.scale,
            "sinks": None if self.sinks is None else self.sinks[...],
            "dropout": None if self.dropout is None else self.dropout(deterministic),
        }

    def project(
        self, x: Float[Array, "*B T D"], positions: RotaryPositions, cached: bool = False
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T K H"], Float[Array, "*B T K h"], Any]:
        """Queries, keys, values, and `combine` or None.

        `combine(o, v)` maps the attention output to the input of `o_proj`. `cached` says whether
        the keys go to a cache.
        """
        raise NotImplementedError

    def output(
        self, o: Float[Array, "*B T N H"], valid: Bool[Array, "*#B T"] | None
    ) -> Float[Array, "*B T D"]:
        """Applies `o_norm`, if there is one, and the output projection; zeros at padding."""
        o = o if self.o_norm is None else self.o_norm(o)
        y = self.o_proj(merge_heads(o))  # *B T D
        return y if valid is None else zero_padding(y, valid)


class Forward(Heads):
    """Self attention by `attend`. Subclasses define `project`."""

    stores_latent = False  # whether a cache stores only keys, which contain the values
    # A layer whose attention is not one call of `attend` defines `attended(q, k, v, **kwargs)`, and
    # `attended_cached(q, k, v, cache, **kwargs)` to replace `attend_cached`.
    attended: Callable[..., Array] | None = None
    attended_cached: Callable[..., Any] | None = None
    # `narrowed(mask, x, positions, k, cache, valid)` returns the mask of layers that select keys.
    narrowed: Callable[..., Mask] | None = None

    def forward(
        self,
        project: Callable[..., tuple[Array, Array, Array, Any]],
        x: Float[Array, "*B T D"],
        *,
        mask: Mask | Array | None = None,
        positions: Int[Array, "... T"] | None = None,
        valid: Bool[Array, "*#B T"] | None = None,
        empty: Empty = "zero",
        deterministic: bool | None = None,
        cache: AnyCache | Stored | None = None,
    ) -> Any:
        """`o_proj(combine(attend(project(x))))`; arguments as in the call.

        With what a call has `Stored`, the layer attends over that and stores nothing.
        """
        if cache is None:
            check_choice("empty", empty, *get_args(Empty))
        else:
            check_no_mean(empty)
        x, visible, score, at, indices = self.tokens(x, mask, valid, positions, cache)  # *B T D
        q, k, v, combine = project(x, at, cache is not None)  # *B T N H, *B T K H
        if self.narrowed is not None:
            visible = self.narrowed(visible, x, at, k, cache, valid)
        attend_kwargs = {"mask": visible, "score": score, **self.attend_kwargs(deterministic)}
        if cache is None:
            o = (self.attended or attend)(q, k, v, empty=empty, **attend_kwargs)  # *B T N h
        elif isinstance(cache, Stored):
            o = attend_stored(q, cache, **attend_kwargs)  # *B T N h
        else:
            values = None if self.stores_latent else v
            stored: Any = cache  # either kind of cache
            attend_fn = self.attended_cached or attend_cached
            o, cache = attend_fn(q, k, values, stored, valid=valid, **attend_kwargs)  # *B T N h
        o = o if indices.unknown is None else indices.outputs(o)  # *B T N h
        o = o if combine is None else combine(o, v)  # *B T N h
        y = self.output(o, valid)  # *B T D
        return (y, cache) if isinstance(cache, Cache | PagedCache) else y


class SelfAttention(Forward):
    """A self-attention layer that is called with x and the keyword arguments in `Call`."""

    @overload
    def __call__(
        self, x: Float[Array, "*B T D"], *, cache: None = None, **call: Unpack[Call]
    ) -> Float[Array, "*B T D"]: ...
    @overload
    def __call__(
        self, x: Float[Array, "*B T D"], *, cache: C, **call: Unpack[Call]
    ) -> tuple[Float[Array, "*B T D"], C]: ...
    @keywords_of(Forward.forward)
    def __call__(self, x: Float[Array, "*B T D"], **call: Any) -> Any:
        """Attention of x over itself.

        Args:
          x: the tokens.
          mask: replaces the layer's; `layer.mask & Lengths(n)` narrows it. None keeps the layer's.
          positions: token positions, `*B T`: read by the rotary, by masks such as `Chunked` and
            `Prefix`, and by masks and scores whose `reads` is "position". None counts the real
            tokens of a row, continuing from the cache if there is one. Causal order and distances
            never depend on positions. `A *B T` is for a rotary with several position axes, and
            then only the rotary reads it.
          valid: which tokens are real. Padding is masked out, whatever it holds, and its outputs
            are zero.
          empty: the output of a fully masked token: "zero", or "mean", the mean of all values, as
            for padding in Hugging Face's models with their additive `finfo.min`; see `attend`.
          deterministic: overrides `train()` and `eval()`.
          cache: from `init_cache` or an earlier call. x then holds the next tokens, which also
            attend to those in the cache, and the call returns y and the new cache.
        """
        return self.forward(self.project, x, **call)


def _score_and_scale(rules: Rules) -> Rules:
    """Returns `rules`; raises ValueError if it sets more than score and scale."""
    if not isinstance(rules, Rules):
        raise TypeError(f"rules must be a flax_attn.Rules; got {type(rules).__name__}.")
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
    return rules
