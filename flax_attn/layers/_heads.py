"""The steps around attention that layers share, whatever their queries and keys are made of."""

from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ..cache.asked import check_kind
from ..dropout import AttentionDropout
from ..masks import Mask, as_mask
from ..rules import Rules
from ._cached import AnyCache
from ._common import as_attribute, merge_heads
from ._sources import tokens, zero_absent

Turn = Callable[[jax.Array, jax.Array | None], jax.Array]
Init = TypeVar("Init", bound=Callable[..., None])


class Heads(nnx.Module):
    """What a layer of self attention does before and after it.

    A subclass hands what it was given to `keep`, and sets `o_proj`, `dropout` and maybe `sinks`.
    """

    rotary: Turn | None
    mask: Mask
    rules: Rules
    dropout: AttentionDropout | None
    o_proj: nnx.Linear
    sinks: nnx.Param | None = None

    def keep(self, rotary: Turn | None, mask: Mask | Array, rules: Rules) -> None:
        """Checks the arguments of these names, and keeps them as attributes."""
        self.rotary, self.mask = as_attribute(rotary), as_attribute(as_mask(mask))
        self.rules = as_attribute(_score_and_scale(rules))

    def tokens(
        self,
        x: Float[Array, "*B T D"],
        mask: Mask | Array | None,
        valid: Bool[Array, "*#B T"] | None,
        cache: AnyCache | None = None,
    ) -> tuple[Float[Array, "*B T D"], Mask]:
        """x with zeros for the tokens that are not there, and who may look at whom."""
        width = self.o_proj.out_features
        if cache is not None:
            check_kind(cache)
        x, _, seen = tokens(x, None, self.mask, mask, valid, (width, width), cache)
        return x, seen

    def places(
        self,
        x: Float[Array, "*B T D"],
        positions: Int[Array, "... T"] | None,
        valid: Bool[Array, "*#B T"] | None,
        cache: AnyCache | None,
    ) -> Int[Array, "... T"] | None:
        """What the rotary is given: the positions, or without any the places in the cache."""
        if positions is not None or cache is None or self.rotary is None:
            return positions
        return jnp.maximum(cache.next_places(x.shape[-2], valid), 0)

    def turned(
        self, x: Float[Array, "*B T N H"], positions: Int[Array, "... T"] | None
    ) -> Float[Array, "*B T N H"]:
        """Heads, turned by their positions if the layer has a rotary."""
        if self.rotary is None and positions is not None:
            raise ValueError(
                "positions are what the layer's rotary is given, and this layer was built with "
                "rotary=None; build it with rotary=Rotary(), or leave positions out."
            )
        return x if self.rotary is None else self.rotary(x, positions)

    def how(self, deterministic: bool | None) -> dict[str, Any]:
        """What `attend` is given beside the heads and the mask."""
        sinks = None if self.sinks is None else self.sinks[...]
        return {"sinks": sinks, **self.how_by_weights(deterministic)}

    def how_by_weights(self, deterministic: bool | None) -> dict[str, Any]:
        """What `attend_by_weights` is given beside the heads and the mask."""
        return {
            "score": self.rules.score,
            "scale": self.rules.scale,
            "dropout": None if self.dropout is None else self.dropout(deterministic),
        }

    def output(
        self, o: Float[Array, "*B T N H"], valid: Bool[Array, "*#B T"] | None
    ) -> Float[Array, "*B T D"]:
        """The output projection, and zeros for the tokens that are not there."""
        return zero_absent(self.o_proj(merge_heads(o)), valid)  # *B T D


def keywords_of(base: type) -> Callable[[Init], Init]:
    """Decorator of a constructor with `**more`: `help` and `inspect` show the keywords of `base`.

    >>> class Base:
    ...     def __init__(self, size, *, bias=False): ...
    >>> @keywords_of(Base)
    ... def init(self, size, *, gate, **more): ...
    >>> print(signature(init))
    (self, size, *, gate, bias=False)
    """

    def decorate(init: Init) -> Init:
        own = [x for x in signature(init).parameters.values() if x.kind != Parameter.VAR_KEYWORD]
        names = {x.name for x in own}
        more = [x for x in signature(base.__init__).parameters.values() if x.name not in names]
        init.__signature__ = Signature([*own, *more])  # pyright: ignore[reportFunctionMemberAccess]
        return init

    return decorate


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
            f"rules of a layer carry score and scale only; got Rules with {', '.join(more)}. A "
            "layer that has them takes mask=, sinks=True and dropout=rate as arguments of its own."
        )
    return rules
