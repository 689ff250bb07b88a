"""Attention with a choice of backends: `attend`, `explain`, `attention_weights`."""

import os
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, get_args, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ._internal.checks import check_choice, checked_arguments
from ._internal.silent import look_at_arrays
from .backends import BACKENDS
from .backends.choice import KERNELS, Explanation, Verdict, warn_if_slow
from .backends.local import attend_locally, no_row_is_empty, weights_locally
from .dropout import Drop
from .masks import FULL, Mask
from .places import Places
from .reference import Stats
from .rules import Request, Rules, bind_rules, nan_beyond, rules_of
from .scores import IDENTITY, Score
from .sharding import auto, explicit
from .sharding.sequence import Sequence, prepared
from .sharding.work import work_of

FORWARD_MODE = (
    "Forward mode (jax.jvp, jax.jacfwd, jax.linearize) is not supported by backends with custom "
    'gradients. Call attend(..., backend="autodiff"), or put the call inside '
    'flax_attn.use_backend("autodiff"): it has every derivative, in memory linear in the '
    'lengths. "reference" has it too, and stores all T x S weights; '
    "flax_attn.attend_by_weights takes forward mode too, without sinks, positions and lse."
)
SEVERAL_DEVICES = (
    "Derivatives of derivatives are not supported by blocks that XLA divides over several devices. "
    'Call attend(..., backend="autodiff"), or put the call inside '
    'flax_attn.use_backend("autodiff").'
)
DIFFERENTIATED_BY_JAX = ("autodiff", "reference")
MIXED_DTYPES = (
    "attention over a mesh that mixes Explicit and other axes is not supported; make all its axes "
    "Explicit or all Auto, call attend inside a jax.shard_map over all of them, or ask for "
    'backend="reference".'
)
Empty = Literal["zero", "mean"]
_requested = jax.make_user_context(os.environ.get("FLAX_ATTN_BACKEND", "auto"))


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
@partial(checked_arguments, look=look_at_arrays)
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

    Also called: scaled dot-product attention (SDPA), flash attention, memory-efficient attention.

    In this order: `logits = scale * q.k`; the score, as chained; the mask; softmax over S, with the
    sink logits (unscaled, unmasked) in the denominator; dropout; times v. Softmax and accumulation
    run in `promote_types(dtype, float32)`. A fully masked row returns zeros, zero gradients and
    lse = -inf (its sink, if there are sinks), as torch's `scaled_dot_product_attention` does.
    `jax.nn` returns the mean of v there, as does `empty="mean"`. NaN in fully masked queries, or in
    fully masked keys and values, never reaches outputs or gradients, except by that mean.

    Args:
      q: queries, `*B T N H`; any number of batch axes, none included.
      k: keys, `*B S K H`; K must divide N.
      v: values, `*B S K h`; h may differ from H.
      mask: a mask, or a boolean array that broadcasts to `*B N T S`, True to attend. None is FULL.
      score: a change of the scaled logits, from `flax_attn.scores`. None is IDENTITY.
      scale: None means `H ** -0.5`; 1.0 means unscaled; may be a scalar array.
      sinks: one logit per query head. One of -inf is no sink; one of +inf gives NaN.
      dropout: `Dropout(rate, key)` or `DropoutMask(mask, rate)`.
      empty: the output of a row without any key or sink (lse = -inf): "zero", or "mean", the mean
        of v over all S keys of its batch entry and key/value head. The additive masks of
        `finfo.min` in Hugging Face's models give this mean. Dropout then drops from S equal
        weights, and a finite sink takes the whole weight, so the row is zero. The mean is over all
        S values, so NaN in padding reaches these rows. Their lse stays -inf, and only v gets
        gradients from them. torch's autograd also sends some to q and k through the sum
        `logits + finfo.min`, although it rounds the logits away; `masked_fill` sends none.
      places: inside your own `jax.shard_map`, the global indices of this shard's batch entries and
        heads, so that dropout and functions of b and n equal those of the unsharded call. Outside
        of a `jax.shard_map`, sharded arrays need no `places`: batch and heads are computed on
        their devices, without communication. `sharding.context_parallel` sets the strategy for a
        sharded length.
      q_positions, kv_positions: the order of queries and keys in their rows, integers that
        broadcast to `*B T` and `*B S`; None means 0, 1, 2, ... A cache passes them, because its
        slots hold keys in any order. Layers compute them: docs/recipes.md, "Order and position";
        here they are the only indices that a mask or score reads. The mask, the score and the
        dropout get them instead of the indices, so CAUSAL and Window mean the same in every cache.
        Objects with an array along T or S (Dense, Segments, Additive, DropoutMask, a class of yours
        whose AXES name q or k) are read by index. A key at a negative position is always masked,
        even under `~mask`, and a query there is fully masked. With `empty="mean"`, the mean is then
        over the keys that are present, and a query at a negative position still gives zeros.
      backend: "auto", which warns once if only a slow backend fits an accelerator, or a name that
        `explain` lists; `use_backend` sets it for a whole context. "auto" takes "reference" below
        128 x 128 weights per head and, for few queries, up to 64 KiB of keys and of values.
        Forward mode (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) and derivatives of derivatives
        (`jax.hessian`, `jax.grad` of a `jax.jvp` or of a `jax.grad`) need "autodiff", in memory
        linear in the lengths, or "reference". In a process with one device "blockwise" has
        `jax.jvp` of a gradient too, and `jax.grad` of one with residuals for all T x S weights of a
        head. If `attend` is differentiated as part of a `jax.lax.scan` or of an inner `jax.jit`, or
        in the function that `jax.linearize` returns, the error is jax's own and does not say so.
      return_lse: whether to return the log-sum-exp too; it is differentiable.

    Returns:
      The output, `*B T N h` in the dtype of q; with `return_lse` also the lse, `*B T N` in float32
      or wider.

    Raises:
      ValueError: for ranks, sizes or positions that do not fit, an unknown backend or `empty`; for
        `offset="end"` with positions.
      TypeError: for integer or mixed dtypes, positions that are not integers, a mask that is not
        boolean, a score or dropout of another class; for forward mode through a backend with
        custom gradients.
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
    check_choice("empty", empty, *get_args(Empty))
    parts = {"mask": mask, "score": score, "scale": scale, "sinks": sinks, "dropout": dropout}
    rules = rules_of(**parts, q_positions=q_positions, kv_positions=kv_positions)
    o, stats = nan_beyond(rules, dispatch(Request.of(q, k, v, rules, places), backend, empty))
    return (o, jnp.moveaxis(stats.lse, -2, -1)) if return_lse else o


def dispatch(request: Request, backend: str, empty: Empty) -> tuple[jax.Array, Stats]:
    """Computes the output `*B T N h` and softmax statistics `*B N T` on the chosen backend.

    Raises:
      ValueError, TypeError, NotImplementedError: as `attend` does.
    """
    axes, sequence = request.where.axes, None
    if axes == "explicit":
        sequence, request = prepared(request)
    rules = bind_rules(request.q, request.k, request.rules, request.places)
    name = _choose(backend, request, rules, sequence)
    if name not in DIFFERENTIATED_BY_JAX:
        # While a program is traced JAX would raise its own error later, outside of this call.
        kinds = {type(getattr(x, "val", x)).__name__ for x in jax.tree.leaves(request)}
        if "JVPTracer" in kinds:
            raise TypeError(FORWARD_MODE)
    attention = BACKENDS[name].attention
    if empty == "mean" and no_row_is_empty(rules, request.sizes):
        empty = "zero"
    try:
        if axes == "explicit":
            return explicit.attend(request, sequence, name, attention, empty)
        if axes == "mixed" and name != "reference":
            raise NotImplementedError(MIXED_DTYPES)
        if axes == "auto" and name == "blockwise" and _is_known(request):
            return auto.attend(request, empty)
        return attend_locally(attention, request.q, request.k, request.v, rules, empty)
    except (TypeError, NotImplementedError) as error:
        instead = without_rule(error)
        if instead is None or name in DIFFERENTIATED_BY_JAX:
            raise
        raise instead from error


def _is_known(request: Request) -> bool:
    """Whether all sizes are positive integers; `jax.export` may leave some symbolic."""
    arrays = request.q, request.k, request.v
    return all(isinstance(n, int) and n for x in arrays for n in x.shape)


def without_rule(error: Exception) -> Exception | None:
    """The error to raise for a derivative that one of our custom rules lacks, or None for another.

    JAX has no type for it, and raises a bare TypeError or NotImplementedError: its words tell.
    """
    if isinstance(error, TypeError) and "custom_vjp" in str(error):
        return TypeError(FORWARD_MODE)
    if isinstance(error, NotImplementedError) and "custom_partitioning" in str(error):
        return NotImplementedError(SEVERAL_DEVICES)
    return None


@checked_arguments
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
    """The attention weights of `attend`, before dropout, by the plain formula.

    Also called: attention map, attention probabilities, `output_attentions`.

    In float32 or wider. Fully masked rows are zero, whatever `empty` is in `attend`. The other rows
    sum to one, minus the weight of the sink.

    Args:
      q, k: queries `*B T N H` and keys `*B S K H`.
      mask, score, scale, sinks, q_positions, kv_positions: as in `attend`.

    Raises:
      ValueError, TypeError: as `attend` does.

    Source: Vaswani et al., "Attention Is All You Need", 2017.

    >>> import jax.numpy as jnp
    >>> from flax_attn import CAUSAL, attention_weights
    >>> attention_weights(jnp.ones((2, 1, 4)), jnp.ones((2, 1, 4)), mask=CAUSAL).tolist()
    [[[1.0, 0.0], [0.5, 0.5]]]
    """
    parts: dict[str, Any] = {"mask": mask, "score": score, "scale": scale, "sinks": sinks}
    rules = rules_of(**parts, q_positions=q_positions, kv_positions=kv_positions)
    return nan_beyond(rules, _weights(Request.of(q, k, k, rules)))


def _weights(request: Request) -> jax.Array:
    if request.where.axes != "explicit":
        return weights_locally(
            request.q, request.k, bind_rules(request.q, request.k, request.rules)
        )
    sequence, request = prepared(request, "all_gather")
    bind_rules(request.q, request.k, request.rules)  # so that errors refer to global shapes
    return explicit.weights(request, sequence)


def use_backend(name: str) -> AbstractContextManager[None]:
    """Context manager that sets the backend of `attend(backend="auto")`, and so of layers.

    A request that the backend cannot serve raises an error. "auto" restores the automatic choice.
    `jax.jit` traces again for another backend. The environment variable FLAX_ATTN_BACKEND sets the
    backend for a whole process.

    Args:
      name: "auto", or a backend that `explain` lists.

    Raises:
      ValueError: if there is no backend of this name.

    >>> import jax.numpy as jnp
    >>> from flax_attn import attend, use_backend
    >>> x = jnp.ones((5, 2, 4))
    >>> with use_backend("blockwise"):
    ...     attend(x, x, x).shape
    (5, 2, 4)
    """
    if name != "auto":
        _check_backend(name)
    return _requested(name)


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

    A backend that is passed over works if you name it, but another fits this request better.

    Computes nothing. Prints as a table; `.chosen` is the name of the backend that `attend` takes.

    Args:
      q, k, v: `*B T N H`, `*B S K H`, `*B S K h`; arrays, or `jax.ShapeDtypeStruct`s.
      mask, score, scale, sinks, dropout: as in `attend`; `jax.ShapeDtypeStruct`s in place of arrays
        stand for values that are known when the program runs, as under jit.
      empty: as in `attend`; every backend supports both, so no verdict depends on it.
      q_positions, kv_positions: as in `attend`; `jax.ShapeDtypeStruct`s too.

    Raises:
      ValueError, TypeError: as `attend` does. A refusal by a backend is reported, not raised.

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
    check_choice("empty", empty, *get_args(Empty))
    rules = {"mask": mask, "score": score, "scale": scale, "sinks": sinks, "dropout": dropout}
    positions = {"q_positions": q_positions, "kv_positions": kv_positions}
    leaves, structure = jax.tree.flatten({**rules, **positions}, is_leaf=_is_shape)
    explanations: list[Explanation] = []

    def ask(*unknown: jax.Array) -> None:
        left = iter(unknown)
        known = [next(left) if _is_shape(x) else x for x in leaves]
        rules = rules_of(**structure.unflatten(known))
        sequence, request = prepared(Request.of(q, k, v, rules))
        whole = bind_rules(request.q, request.k, request.rules)
        explanations.append(_verdicts(request, whole, sequence))
        explanations[0].work = work_of(request, sequence, positioned=q_positions is not None)

    unknown = [x for x in leaves if _is_shape(x)]
    jax.eval_shape(ask, *unknown) if unknown else ask()
    return explanations[0]


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def requested_backend(name: str) -> str:
    """Resolves "auto" to the backend of `use_backend` or the environment, if set."""
    return _requested.value if name == "auto" else name


def choice(request: Request, backend: str) -> str:
    """The name of the backend that computes a request on one device; errors as of `dispatch`."""
    return _choose(backend, request, bind_rules(request.q, request.k, request.rules), None)


def kernel_for(request: Request, backend: str) -> str | None:
    """The kernel that `backend`, a name or "auto", takes for a request on one device, if any."""
    wanted, rules = requested_backend(backend), bind_rules(request.q, request.k, request.rules)
    for name, kernel in BACKENDS.items():
        if request.where.platform not in (kernel.platforms or ()) or wanted not in ("auto", name):
            continue
        if wanted == "auto" and kernel.unproven is not None and kernel.unproven(request):
            continue
        verdict = _verdict(name, request, rules, None)
        if verdict.refusal is None and (wanted == name or verdict.passed_over is None):
            return name
    return None


def _choose(name: str, request: Request, rules: Rules, sequence: Sequence | None) -> str:
    """The requested backend, or for "auto" the first that accepts and is not passed over."""
    name = _requested.value if name == "auto" else name
    if name != "auto":
        _check_backend(name)
        reason = _verdict(name, request, rules, sequence).refusal
        if reason is not None:
            raise NotImplementedError(f"backend {name!r} cannot serve this request: {reason}.")
        return name
    platform = request.where.platform
    homes = {name: backend.platforms for name, backend in BACKENDS.items()}
    names = [name for name, known in homes.items() if known is None or platform in known]
    asks = {name: BACKENDS[name].unproven for name in names}
    names = [name for name, ask in asks.items() if ask is None or ask(request) is None]
    verdicts = (_verdict(name, request, rules, sequence) for name in names)
    if platform in KERNELS:
        verdicts = [*verdicts]
        warn_if_slow(request, Explanation(verdicts))
    fit = (x.backend for x in verdicts if x.refusal is None and x.passed_over is None)
    return next(fit, "reference")  # which supports every request


def _verdict(name: str, request: Request, rules: Rules, sequence: Sequence | None) -> Verdict:
    """One backend's verdict on a request, for backend "auto". "reference" serves all requests."""
    backend = BACKENDS[name]
    reason = None if sequence is None else sequence.refusal(name)
    if reason is None and name != "reference":
        if not all(isinstance(x.shape[-3], int) for x in (request.q, request.k)):
            reason = "needs lengths that are known when it is compiled"
        elif backend.refusal is not None:
            reason = backend.refusal(request, rules)
    has_others = sequence is None or sequence.refusal("reference") is None
    if reason is not None or not has_others or backend.passed_over is None:
        return Verdict(name, reason)
    return Verdict(name, None, backend.passed_over(request))


def _verdicts(request: Request, rules: Rules, sequence: Sequence | None) -> Explanation:
    wanted = _requested.value
    verdicts = [_verdict(name, request, rules, sequence) for name in BACKENDS]
    if wanted != "auto":
        _check_backend(wanted)
        reason = f"{wanted} is asked for"
        verdicts = [
            x._replace(passed_over=None if x.backend == wanted else reason) for x in verdicts
        ]
    return Explanation(verdicts, sequence)


def _check_backend(name: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f'backend must be "auto" or one of {", ".join(BACKENDS)}; got {name!r}.')
