"""`Rules`: mask, score, scale, sinks, dropout and positions of one attention."""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ._internal.arrays import INT32_MAX, ids_dtype
from ._internal.types import Sizes, frozen
from .dropout import Drop
from .masks import FULL, Mask, Segments
from .masks.at_positions import at_positions
from .places import Places, Positions
from .scores import IDENTITY, Score


@frozen
class Rules:
    """`softmax(mask(score(scale * q.k)), with sinks)`, then dropout: the input of a backend.

    `attend` and `explain` take the parts by name; a custom backend takes them as one object.

    Attributes:
      mask: which query may attend to which key.
      score: a change of the scaled logits before the mask.
      scale: the factor of q.k; None means `H ** -0.5`, 1.0 means unscaled.
      sinks: one logit per query head that joins the softmax's denominator, shape N, or None.
      dropout: `Dropout`, `DropoutMask` or None.
      positions: positions of queries and keys, or None if they equal the indices. `bind` passes
        them to the mask, the score and the dropout, which backends then evaluate at slots.

    Raises:
      ValueError: by `bind`, if a part does not fit the sizes.

    >>> from flax_attn import CAUSAL, Softcap
    >>> Rules(CAUSAL, Softcap(30.0)) == Rules(CAUSAL, Softcap(30.0))
    True
    """

    mask: Mask = FULL
    score: Score = IDENTITY
    scale: Any = None
    sinks: Any = None
    dropout: Drop | None = None
    positions: Positions | None = None

    AXES: ClassVar = {"sinks": "n"}

    def at(self, places: Places) -> "Rules":
        """These rules for a shard with global indices `places` of batch entries and heads."""
        drop = None if self.dropout is None else self.dropout.at(places)
        return replace(self, mask=self.mask.at(places), score=self.score.at(places), dropout=drop)

    def bind(self, sizes: Sizes, width: int) -> "Rules":
        """These rules for one attention: checks shapes, flattens batch axes, sets the scale."""
        if self.sinks is not None and jnp.shape(self.sinks) != (sizes.N,):
            raise ValueError(
                f"sinks needs one logit a query head, shape ({sizes.N},); "
                f"got shape {jnp.shape(self.sinks)}."
            )
        mask, score, drop = self.mask, self.score, self.dropout
        positions = None if self.positions is None else self.positions.bind(sizes)
        if positions is not None:
            mask, score = at_positions(mask, positions), score.at_positions(positions)
            drop = None if drop is None else drop.at_positions(positions)
        return Rules(
            mask=mask.bind(sizes),
            score=score.bind(sizes),
            scale=width**-0.5 if self.scale is None else self.scale,
            sinks=None if self.sinks is None else jnp.asarray(self.sinks),
            dropout=None if drop is None else drop.bind(sizes),
            positions=positions,
        )


def nan_beyond(rules: Rules, result: Any) -> Any:
    """Returns `result`, or NaN if a traced position or document id overflows JAX's int dtype.

    Concrete values raise an error earlier; traced ones are only known at run time.
    """
    if rules.mask.is_static and rules.positions is None:
        return result
    limits, factor = {Segments: jnp.iinfo(ids_dtype()).max, Positions: INT32_MAX}, None
    for node in jax.tree.leaves(rules, is_leaf=lambda x: type(x) in limits):
        for x in jax.tree.leaves(node) if type(node) in limits else ():
            most = limits[type(node)]
            if isinstance(x, Tracer) and jnp.iinfo(x.dtype).max > most:
                nan = jnp.where((x > most).any(), jnp.nan, 1)
                factor = nan if factor is None else factor * nan
    if factor is None:
        return result
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), result)


def sizes_of(q: jax.Array, k: jax.Array) -> Sizes:
    """The sizes of the attention of `q`, `*B T N H`, over `k`, `*B S K H`."""
    return Sizes(q.shape[:-3], q.shape[-2], q.shape[-3], k.shape[-3])
