"""The one verb: `attend` picks a backend, `explain` says why, `attention_weights` shows weights."""

import os
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ._arrays import check_number
from ._checks import check_choice
from ._types import is_frozen
from .backends import BACKENDS
from .backends.choice import Explanation, Verdict, warn_if_slow
from .backends.local import attend_locally, bound, none_empty, weights_locally
from .dropout import Drop
from .masks import FULL, Mask, as_mask
from .places import Places, Positions
from .rules import Rules, sizes_of
from .scores import IDENTITY, Score
from .sharding.entry import attend_sharded, weights_sharded
from .sharding.sequence import Sequence, prepared

FORWARD_MODE = (
    "Forward mode (jax.jvp, jax.jacfwd, jax.linearize) cannot go through a backend that brings its "
    'own gradient. Ask for attend(..., backend="reference"), or put the call inside '
    'flax_attn.use_backend("reference").'
)
Empty = Literal["zero", "mean"]
_wanted = jax.make_user_context(os.environ.get("FLAX_ATTN_BACKEND", "auto"))


@overload
def attend(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K h"],
    *,
    mask: Mask | Array | None = ...,
    score: Score | None = ...,
    scale: float | Array | None = ...,
    sinks: Float[Array, " N"] | None = ...,
    dropout: Drop | None = ...,
    empty: Empty = ...,
    places: Places | None = ...,
    q_positions: ArrayLike | None = ...,
    kv_positions: ArrayLike | None = ...,
    backend: str = ...,
    return_lse: Literal[False] = False,
) -> Float[Array, "*B T N h"]: ...
@overload
def attend(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K h"],
    *,
    mask: Mask | Array | None = ...,
    score: Score | None = ...,
    scale: float | Array | None = ...,
    sinks: Float[Array, " N"] | None = ...,
    dropout: Drop | None = ...,
    empty: Empty = ...,
    places: Places | None = ...,
    q_positions: ArrayLike | None = ...,
    kv_positions: ArrayLike | None = ...,
    backend: str = ...,
    return_lse: Literal[True],
) -> tuple[Float[Array, "*B T N h"], Float[Array, "*B T N"]]: ...
def attend(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K h"],
    *,
    mask: Mask | Array | None = FULL,
    score: Score | None = IDENTITY,
    scale: float | Array | None = None,
    sinks: Float[Array, " N"] | None = None,
    dropout: Drop | None = None,
    empty: Empty = "zero",
    places: Places | None = None,
    q_positions: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Float[Array, "*B T N h"] | tuple[Float[Array, "*B T N h"], Float[Array, "*B T N"]]:
    """`softmax(mask(score(scale * q.k))) . v`, with query head n on key head n // (N // K).

    In this order: `logits = scale * q.k`; the score, as chained; the mask; softmax over S, with the
    sink logits (unscaled, unmasked) in the denominator; dropout; times v. Softmax and accumulation
    run in `promote_types(dtype, float32)`. A row that may look at nothing gives zeros, zero
    gradients and lse = -inf (its sink, if there are sinks); torch's `scaled_dot_product_attention`
    agrees, `jax.nn` gives the mean of v there, and so does `empty="mean"`. Keys and values that
    nobody may look at, and queries that see nothing, cannot reach outputs or gradients even if they
    hold NaN; in the mean of v they can.

    Args:
      q: queries, `*B T N H`; any number of batch axes, none included.
      k: keys, `*B S K H`; K must divide N.
      v: values, `*B S K h`; h may differ from H.
      mask: a mask, or a boolean array that broadcasts to `*B N T S`; True may look. None is FULL.
      score: what happens to the scaled logits, from `flax_attn.scores`. None is IDENTITY.
      scale: None means `H ** -0.5`; 1.0 means unscaled; may be a scalar array.
      sinks: one logit a query head.
      dropout: `Dropout(rate, key)` or `DropoutMask(mask, rate)`.
      empty: what a row gives whose lse is -inf, since no key and no sink is left to it: "zero", or
        "mean", the mean of v over all S keys of its batch entry and key/value head. That is what an
        additive mask of `finfo.min` gives, as Hugging Face's models have it: dropout then drops
        from S equal weights, and a finite sink takes the whole weight, so that the row is zero.
        The mean is of all S values, so NaN in padding reaches these rows. Their lse stays -inf, and
        they send gradients to v alone. torch's autograd sends some to q and k through the sum
        `logits + finfo.min`, although it rounds the logits away; `masked_fill` sends none.
      places: inside a `jax.shard_map` of the caller's, where batch entries and heads of this shard
        stand in the whole, so that dropout and functions of b and n are those of the whole.
        Sharded arrays outside of one need nothing: batch and heads stay where they are, and no
        device asks another for any. Over a length that is sharded attention goes as
        `sharding.context_parallel` says.
      q_positions, kv_positions: where queries and keys stand, integers that broadcast to `*B T` and
        `*B S`; None means 0, 1, 2, ... A cache needs them, whose slots hold keys in any order. The
        mask, the score and the dropout are asked at these in place of the indices, so that
        CAUSAL and Window mean the same in every cache; what has an array along T or S (Dense,
        Segments, Additive, DropoutMask, a class of yours whose AXES name q or k) is read by index.
        A key at a negative position is never seen, be it by `~mask`, and a query there sees
        nothing. With `empty="mean"` the mean is then of the keys that are present.
      backend: "auto", which warns once where an accelerator has but a slow path, or a name that
        `explain` lists; `use_backend` says it for all inside. Forward mode (`jax.jvp`,
        `jax.jacfwd`, `jax.linearize`) needs "reference", which "auto" takes below 128 x 128 weights
        a head and, of few queries, up to 64 KiB of keys and values each; second derivatives
        (`jax.hessian`, `jax.grad` of `jax.grad`) need "reference", or "blockwise" on one device, by
        which `jax.grad` of `jax.grad` ends at 1,024 tokens. Under `jax.jit`, and from the function
        that `jax.linearize` gives, the error is jax's own and does not say so.
      return_lse: whether the log-sum-exp is wanted too; it is differentiable.

    Returns:
      The output, `*B T N h` in the dtype of q; with `return_lse` also the lse, `*B T N` in float32
      or wider.

    Raises:
      ValueError: for ranks, sizes, positions, a backend name or a word for `empty` that do not fit;
        for `offset="end"` beside positions.
      TypeError: for integer or mixed dtypes, positions that are no integers, a mask that is not
        boolean, a score or dropout that is none; for forward mode through a backend other than
        "reference".
      NotImplementedError: if the backend asked for cannot serve the request, with its reason.

    Source: Vaswani et al., "Attention Is All You Need", 2017.

    >>> import jax.numpy as jnp
    >>> from flax_attn import CAUSAL, attend
    >>> q, kv = jnp.ones((2, 5, 6, 8)), jnp.ones((2, 9, 3, 8))
    >>> attend(q, kv, kv, mask=CAUSAL).shape
    (2, 5, 6, 8)
    >>> v = jnp.asarray([0.0, 1.0, 5.0]).reshape(3, 1, 1)
    >>> left_padded = CAUSAL & jnp.asarray([False, True, True])
    >>> attend(0 * v, v, v, mask=left_padded).ravel().tolist()
    [0.0, 1.0, 3.0]
    >>> attend(0 * v, v, v, mask=left_padded, empty="mean").ravel().tolist()
    [2.0, 1.0, 3.0]
    >>> at, slots = jnp.asarray([4]), jnp.asarray([5, 4, -1])  # of three slots, one is free
    >>> attend(v[:1], v, v, mask=CAUSAL, q_positions=at, kv_positions=slots).ravel().tolist()
    [1.0]
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    check_choice("empty", empty, *get_args(Empty))
    rules = rules_of(mask, score, scale, sinks, dropout, q_positions, kv_positions)
    whole, sequence = bound_rules(q, k, v, rules, places), None
    if places is None:
        sequence, rules, whole = _over_length(q, k, v, rules, whole)
    name = _choose(backend, q, k, v, whole, sequence)
    attention = BACKENDS[name].attention
    if empty == "mean" and none_empty(whole, sizes_of(q, k)):
        empty = "zero"
    try:
        given = name, attention, q, k, v, rules, empty, sequence
        found = attend_sharded(*given) if places is None else None
        o, stats = found or attend_locally(attention, q, k, v, whole, empty)
    except TypeError as error:
        if name == "reference" or "custom_vjp" not in str(error):
            raise
        raise TypeError(FORWARD_MODE) from error
    return (o, jnp.moveaxis(stats.lse, -2, -1)) if return_lse else o


def attention_weights(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    *,
    mask: Mask | Array | None = FULL,
    score: Score | None = IDENTITY,
    scale: float | Array | None = None,
    sinks: Float[Array, " N"] | None = None,
    q_positions: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
) -> Float[Array, "*B N T S"]:
    """The weights that `attend` gives the values, before dropout, by the plain formula.

    In float32 or wider; rows that may look at nothing are zero, whatever `empty` of `attend` says,
    the others sum to one, less what goes to the sink.

    Args:
      q, k: queries `*B T N H` and keys `*B S K H`.
      mask, score, scale, sinks, q_positions, kv_positions: as of `attend`.

    Raises:
      ValueError, TypeError: as `attend` does.

    Source: Vaswani et al., "Attention Is All You Need", 2017.

    >>> import jax.numpy as jnp
    >>> from flax_attn import CAUSAL, attention_weights
    >>> attention_weights(jnp.ones((2, 1, 4)), jnp.ones((2, 1, 4)), mask=CAUSAL).tolist()
    [[[1.0, 0.0], [0.5, 0.5]]]
    """
    q, k = jnp.asarray(q), jnp.asarray(k)
    rules = rules_of(mask, score, scale, sinks, None, q_positions, kv_positions)
    whole, found = bound_rules(q, k, k, rules), weights_sharded(q, k, rules)
    return weights_locally(q, k, whole) if found is None else found


def use_backend(name: str) -> AbstractContextManager[None]:
    """A context in which `attend(backend="auto")`, so every layer too, takes the backend `name`.

    It raises where that one cannot serve a request; "auto" gives the choice back. `jax.jit` traces
    anew for another backend. The environment variable FLAX_ATTN_BACKEND says it for a process.

    Args:
      name: "auto", or a backend that `explain` lists.

    Raises:
      ValueError: for a name that is no backend's.

    >>> import jax.numpy as jnp
    >>> from flax_attn import attend, use_backend
    >>> x = jnp.ones((5, 2, 4))
    >>> with use_backend("blockwise"):
    ...     attend(x, x, x).shape
    (5, 2, 4)
    """
    if name != "auto":
        _check_backend(name)
    return _wanted(name)


def explain(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K h"],
    *,
    mask: Mask | Array | None = FULL,
    score: Score | None = IDENTITY,
    scale: float | Array | None = None,
    sinks: Float[Array, " N"] | None = None,
    dropout: Drop | None = None,
    empty: Empty = "zero",
    q_positions: Any = None,
    kv_positions: Any = None,
) -> Explanation:
    """Every backend's verdict on a request: accepted, or why it refuses or is passed over.

    One that is passed over serves if it is named; for this request another is the better choice.

    Nothing is computed. Prints as a table; `.chosen` is the name of the one that `attend` takes.

    Args:
      q, k, v: `*B T N H`, `*B S K H`, `*B S K h`; arrays, or `jax.ShapeDtypeStruct`s.
      mask, score, scale, sinks, dropout: as of `attend`; `jax.ShapeDtypeStruct`s in place of arrays
        stand for values that are known when the program runs, as under jit.
      empty: as of `attend`; every backend serves both, so that no verdict depends on it.
      q_positions, kv_positions: as of `attend`; `jax.ShapeDtypeStruct`s too.

    Raises:
      ValueError, TypeError: as `attend` does; a backend that refuses is no error here.

    >>> import jax.numpy as jnp
    >>> from flax_attn import explain
    >>> found = explain(jnp.ones((5, 2, 4)), jnp.ones((5, 2, 4)), jnp.ones((5, 2, 4)))
    >>> found.chosen
    'reference'
    >>> print(found)  # doctest: +ELLIPSIS
    backend    verdict
    cudnn      refuses: ...
    reference  chosen
    """
    q, k, v = (x if _is_shape(x) else jnp.asarray(x) for x in (q, k, v))
    check_choice("empty", empty, *get_args(Empty))
    asked = (mask, score, scale, sinks, dropout, q_positions, kv_positions)
    leaves, structure = jax.tree.flatten(asked, is_leaf=_is_shape)
    found: list[Explanation] = []

    def ask(*unknown: jax.Array) -> None:
        left = iter(unknown)
        known = [next(left) if _is_shape(x) else x for x in leaves]
        rules = rules_of(*structure.unflatten(known))
        sequence, _, whole = _over_length(q, k, v, rules, bound_rules(q, k, v, rules))
        found.append(_verdicts(q, k, v, whole, sequence))

    unknown = [x for x in leaves if _is_shape(x)]
    jax.eval_shape(ask, *unknown) if unknown else ask()
    return found[0]


def _over_length(
    q: Any, k: Any, v: Any, rules: Rules, whole: Rules
) -> tuple[Sequence | None, Rules, Rules]:
    """How a sharded length is served, if one is, with the rules for that, not bound and bound."""
    sequence, rules = prepared(q, k, v, rules)
    return sequence, rules, whole if sequence is None else bound(q, k, rules)


def _refusal(name: str, sequence: Sequence | None, *request: Any) -> str | None:
    own = None if sequence is None else sequence.refusal(name)
    return BACKENDS[name].refusal(*request) if own is None else own


def _verdicts(
    q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules, sequence: Sequence | None
) -> Explanation:
    request, wanted = (q, k, v, rules), _wanted.value
    if wanted != "auto":
        _check_backend(wanted)
    found, others = [], sequence is None or sequence.refusal("reference") is None
    for name, backend in BACKENDS.items():
        refusal = _refusal(name, sequence, *request)
        passed_over = None if wanted in (name, "auto") else f"{wanted} is asked for"
        if refusal is None and wanted == "auto" and others:
            passed_over = backend.passed_over(*request)
        found.append(Verdict(name, refusal, passed_over))
    return Explanation(found, sequence)


def asked_for(name: str) -> str:
    """The backend of a name: for "auto" the one of `use_backend` or of the environment, if any."""
    return _wanted.value if name == "auto" else name


def _choose(
    name: str, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules, sequence: Sequence | None
) -> str:
    name = asked_for(name)
    if name == "auto":
        found = _verdicts(q, k, v, rules, sequence)
        warn_if_slow(q, k, found)
        name = found.chosen or "reference"  # which serves all
    _check_backend(name)
    reason = _refusal(name, sequence, q, k, v, rules)
    if reason is not None:
        raise NotImplementedError(f"backend {name!r} cannot serve this request: {reason}.")
    return name


def _check_backend(name: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f'backend must be "auto" or one of {", ".join(BACKENDS)}; got {name!r}.')


def rules_of(
    mask: Any,
    score: Any,
    scale: Any,
    sinks: Any,
    dropout: Any,
    q_positions: Any = None,
    kv_positions: Any = None,
) -> Rules:
    """What was asked in one object; None stands for what leaves everything as it is."""
    mask = FULL if mask is None else as_mask(mask)
    score = IDENTITY if score is None else score
    scale, sinks = (x[...] if isinstance(x, nnx.Variable) else x for x in (scale, sinks))
    given = q_positions is not None or kv_positions is not None
    positions = Positions(q_positions, kv_positions) if given else None
    rules = Rules(mask, score, scale, sinks, dropout, positions)
    _check_rules(rules)
    return rules


def bound_rules(q: Any, k: Any, v: Any, rules: Rules, places: Places | None = None) -> Rules:
    """The rules for these arrays; errors where anything does not fit."""
    arrays = {"q": q, "k": k, "v": v}
    _check_dtypes(arrays)
    _check_shapes({name: x.shape for name, x in arrays.items()})
    return bound(q, k, rules, places)


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _check_dtypes(arrays: dict[str, jax.Array]) -> None:
    kinds = [x.dtype for x in arrays.values()]
    given = ", ".join(f"{name} {x.dtype}" for name, x in arrays.items())
    if not all(jnp.issubdtype(kind, jnp.floating) for kind in kinds):
        raise TypeError(f"attend works on floating arrays; got {given}.")
    if len(set(kinds)) > 1:
        raise TypeError(
            f"q, k and v must share one dtype; got {given}. Cast them first: x.astype(dtype)."
        )


def _check_rules(rules: Rules) -> None:
    _check_frozen(rules.mask)
    if not isinstance(rules.score, Score):
        raise TypeError(
            f"score must be one of flax_attn's scores; got {type(rules.score).__name__}. "
            "A bias goes to score=Additive(array)."
        )
    _check_frozen(rules.score)
    if not isinstance(rules.dropout, Drop | None):
        raise TypeError(
            "dropout must be Dropout(rate, key), DropoutMask(mask, rate) or None; "
            f"got {type(rules.dropout).__name__}."
        )
    if rules.scale is not None:
        check_number("scale", rules.scale)


def _check_frozen(node: Any) -> None:
    """TypeError for a mask or a score of a user's class that no jitted function can take."""
    if not isinstance(node, Mask | Score):
        return
    name = type(node).__name__
    if not is_frozen(type(node)):
        raise TypeError(
            f"{name} is no pytree that is equal by value, as masks and scores must be; decorate "
            "the class with flax_attn.frozen, which also makes it a dataclass."
        )
    for part in vars(node).values():
        _check_frozen(part)


def _check_shapes(shapes: dict[str, tuple[int, ...]]) -> None:
    given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    q, k, v = shapes.values()
    if min(len(q), len(k), len(v)) < 3:
        raise ValueError(f"q, k and v need at least the axes (length, heads, width); got {given}.")
    if not q[:-3] == k[:-3] == v[:-3]:
        raise ValueError(
            f"q, k and v must share their batch axes; got {given}. Broadcast them first."
        )
    if k[-3:-1] != v[-3:-1]:
        raise ValueError(f"k and v must share length and heads; got {given}.")
    if q[-1] != k[-1] or q[-1] == 0:
        raise ValueError(f"q and k must share a head width of at least 1; got {given}.")
    if k[-2] == 0 or q[-2] == 0 or q[-2] % k[-2]:
        raise ValueError(f"The key/value heads must divide the query heads; got {given}.")
