"""`Request`: the validated arguments of one attention."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ._internal.arrays import check_number
from ._internal.silent import FEW, RATIO, warn_if_heads_first
from ._internal.types import Sizes, frozen, is_frozen
from .dropout import Drop
from .masks import FULL, Mask, as_mask
from .places import Places, Positions
from .rules import Rules, sizes_of
from .scores import IDENTITY, Score


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
        _check_arrays(q=q, k=k, v=v)
        return cls(q, k, v, rules, places)

    @property
    def sizes(self) -> Sizes:
        """Batch axes, query heads and lengths."""
        return sizes_of(self.q, self.k)


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
    mask = FULL if mask is None else as_mask(mask)
    score = IDENTITY if score is None else score
    scale, sinks = (x[...] if isinstance(x, nnx.Variable) else x for x in (scale, sinks))
    if not isinstance(score, Score):
        raise TypeError(
            f"score must be one of flax_attn's scores; got {type(score).__name__}. "
            "A bias goes to score=Additive(array)."
        )
    _check_frozen(mask, score)
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


def _check_frozen(*nodes: Any) -> None:
    """Raises TypeError for a mask or a score of a user's class that is not `frozen`."""
    for node in nodes:
        if not isinstance(node, Mask | Score):
            continue
        if not is_frozen(type(node)):
            raise TypeError(
                f"{type(node).__name__} is no pytree that is equal by value, as masks and scores "
                "must be; decorate the class with flax_attn.frozen, which also makes it a "
                "dataclass."
            )
        _check_frozen(*vars(node).values())


def _check_arrays(**arrays: jax.Array) -> None:
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
