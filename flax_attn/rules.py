"""`Rules`: mask, score, scale, sinks, dropout and positions; `Request`: arrays and their rules."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ._internal.arrays import INT32_MAX, check_number, ids_dtype
from ._internal.silent import FEW, RATIO, warn_if_heads_first
from ._internal.types import FROZEN, Sizes, frozen, variable_types
from .dropout import Drop
from .masks import FULL, Mask, Segments, as_mask
from .masks.at_positions import at_positions
from .places import Places, Positions
from .scores import IDENTITY, Score
from .where import where_of


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
    factor = None
    for x, most in _limited(rules):
        if isinstance(x, Tracer) and jnp.iinfo(x.dtype).max > most:
            nan = jnp.where((x > most).any(), jnp.nan, 1)
            factor = nan if factor is None else factor * nan
    if factor is None:
        return result
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), result)


def _limited(node: Any) -> Iterator[tuple[Any, int]]:
    """Yields the ids and positions in rules, a mask or a score, and the largest allowed."""
    if type(node) in (Segments, Positions):
        most = INT32_MAX if type(node) is Positions else jnp.iinfo(ids_dtype()).max
        yield from ((x, most) for x in jax.tree.leaves(node))
    elif isinstance(node, Rules | Mask | Score | Drop):
        for part in vars(node).values():
            yield from _limited(part)


def sizes_of(q: jax.Array, k: jax.Array) -> Sizes:
    """The sizes of the attention of `q`, `*B T N H`, over `k`, `*B S K H`."""
    return Sizes(q.shape[:-3], q.shape[-2], q.shape[-3], k.shape[-3])


@frozen
class Request:
    """Queries, keys and values, and unbound rules.

    `Request.of` creates and validates one. Unflattening, as inside `jax.jit`, does not validate
    again. `jax.ShapeDtypeStruct`s may replace arrays.

    Attributes:
      q, k, v: `*B T N H`, `*B S K H`, `*B S K h`.
      rules: not bound to sizes.
      places: inside a caller's `jax.shard_map`, the global indices of this shard, or None.
    """

    q: Any
    k: Any
    v: Any
    rules: Rules
    places: Places | None = None

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, rules: Rules, places: Places | None = None) -> "Request":
        """Validates arrays, or shapes, and returns their request.

        Raises:
          ValueError, TypeError: as `attend` does, but for rules that do not fit the sizes.
        """
        shape = jax.ShapeDtypeStruct
        q, k, v = (x if isinstance(x, shape) else jnp.asarray(x) for x in (q, k, v))
        check_arrays(q=q, k=k, v=v)
        return cls(q, k, v, rules, places)

    @property
    def sizes(self) -> Sizes:
        """Batch axes, query heads and lengths."""
        return sizes_of(self.q, self.k)

    # Found at first use, and no leaf: a request of other arrays, or under another trace, finds its
    # own.
    where = cached_property(where_of)


def bind_rules(q: jax.Array, k: jax.Array, rules: Rules, places: Places | None = None) -> Rules:
    """Binds rules to the sizes of these arrays; `places` are the shard's global indices.

    Raises:
      ValueError: if a part of them does not fit.
    """
    sizes = sizes_of(q, k)
    if places is not None:
        rules = rules.at(places.bind(sizes))
    return rules.bind(sizes, q.shape[-1])


def rules_of(
    *,
    mask: Any = FULL,
    score: Any = IDENTITY,
    scale: Any = None,
    sinks: Any = None,
    dropout: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
) -> Rules:
    """Collects the arguments of `attend` in `Rules`; None means the default.

    Raises:
      TypeError: for an argument that is not a mask, score, dropout or number.
    """
    mask = FULL if mask is None else checked_mask(mask)
    score = IDENTITY if score is None else score
    variables = variable_types(sys.modules.get("flax.nnx"))
    scale, sinks = (x[...] if isinstance(x, variables) else x for x in (scale, sinks))
    if not isinstance(score, Score):
        raise TypeError(
            f"score must be one of flax_attn's scores; got {type(score).__name__}. A bias goes to "
            "score=Additive(array), a function to ScoreFn(lambda logits, b, n, q, k: ...)."
        )
    _check_frozen(score)
    if not isinstance(dropout, Drop | None):
        raise TypeError(
            "dropout must be Dropout(rate, key), DropoutMask(mask, rate) or None; "
            f"got {type(dropout).__name__}."
        )
    if scale is not None:
        check_number("scale", scale)
    at_positions = q_positions is not None or kv_positions is not None
    positions = Positions(q_positions, kv_positions) if at_positions else None
    return Rules(mask, score, scale, sinks, dropout, positions)


def checked_mask(mask: Any) -> Mask:
    """A mask, or a boolean array, as a mask; TypeError for another, or one that is not `frozen`."""
    mask = as_mask(mask)
    _check_frozen(mask)
    return mask


def _check_frozen(node: Any) -> None:
    """Raises TypeError for a mask or a score of a user's class that is not `frozen`."""
    if type(node) not in FROZEN:
        raise TypeError(
            f"{type(node).__name__} is no pytree that is equal by value, as masks and scores "
            "must be; decorate the class with flax_attn.frozen, which also makes it a dataclass."
        )
    for part in vars(node).values():
        if isinstance(part, Mask | Score):
            _check_frozen(part)


def check_arrays(**arrays: Any) -> None:
    """Raises TypeError or ValueError unless q, k and v fit each other, in kind and shape."""
    q, k, v = (x.shape for x in arrays.values())
    dtypes = ", ".join(f"{name} {x.dtype}" for name, x in arrays.items())
    shapes = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays.values()):
        raise TypeError(f"attend works on floating arrays; got {dtypes}.")
    if len({x.dtype for x in arrays.values()}) > 1:
        raise TypeError(
            f"q, k and v must share one dtype; got {dtypes}. Cast them first: x.astype(dtype)."
        )
    if min(len(q), len(k), len(v)) < 3:
        raise ValueError(f"q, k and v need at least the axes (length, heads, width); got {shapes}.")
    if not q[:-3] == k[:-3] == v[:-3]:
        raise ValueError(
            f"q, k and v must share their batch axes; got {shapes}. Broadcast them first."
        )
    if k[-3:-1] != v[-3:-1]:
        raise ValueError(f"k and v must share length and heads; got {shapes}.")
    if q[-1] != k[-1] or q[-1] == 0:
        raise ValueError(f"q and k must share a head width of at least 1; got {shapes}.")
    if k[-2] == 0 or q[-2] == 0 or q[-2] % k[-2]:
        raise ValueError(f"The key/value heads must divide the query heads; got {shapes}.")
    if isinstance(q[-3], int) and 1 < q[-3] <= FEW and q[-2] >= RATIO * q[-3]:
        warn_if_heads_first(q, k, v)
