"""Measures a softmax attention as a function: of queries, keys and positions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from .attention import Attention, Leaves
from .neutral import without_masks
from .norms import Side, side_of
from .program import Program
from .roles import Unclear, roles_of
from .rotation import Rotation, rotation_of

MOST_FORMS = 9  # pairs of tokens whose forms are measured
# Of two float64 results of some hundred operations each.
CLOSE = 1e-9
# Of forms whose cos and sin were computed in float32.
FLOAT32 = 1e-6


@dataclass(frozen=True)
class Called:
    """Mask and bias of a call, `batch head query key`.

    Attributes:
      visible: which keys a query attends to.
      bias: what is added to the logits, NaN where hidden.
    """

    visible: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True)
class Measured:
    """What one recorded run says about an attention.

    Attributes:
      attention: the run.
      query, key: norm and clamp of each side.
      rotation: rotation and scale of the logits.
      after_rotary: whether the norms come after the rotation.
      softcap: c of `c tanh(logits / c)`, or None.
      capped_bias: whether the softcap comes after the bias.
      visible: which keys a query attends to, `batch head query key`.
      bias: what is added to the logits, `batch head query key`, NaN where hidden.
      sinks: logits that join the denominator, `batch head`, or None.
      called: the same run with masks and biases as the caller gives them.
    """

    attention: Attention
    query: Side
    key: Side
    rotation: Rotation
    after_rotary: bool
    softcap: float | None
    capped_bias: bool
    visible: np.ndarray
    bias: np.ndarray
    sinks: np.ndarray | None
    called: "Called"


def measured(program: Program, batch: int, queries: int, keys: int) -> Measured:
    """Measures a recorded run.

    Args:
      batch, queries, keys: sizes of the call.

    Raises:
      Unclear: with the step that is nothing of ours.
    """
    roles = roles_of(program, batch, queries, keys)
    as_called = Attention.of(program, roles)
    widths = {len(c) for part in (*roles.query, *roles.key) for c in part.heads}
    if widths != {roles.head_dim}:
        raise Unclear(f"heads of queries and keys with {sorted(widths)} components")
    attention = without_masks(as_called)
    softcap, logits = _before_softcap(attention)
    query, key = (side_of(attention, role, logits) for role in ("query", "key"))
    forms = _forms(attention, query, key, logits)
    usual = attention.roles.head_dim**-0.5
    rotation = rotation_of(forms, usual) or rotation_of(forms, usual, FLOAT32)
    if rotation is None:
        raise Unclear("the logits are no scaled products of queries and keys, rotated or not")
    before = _bias_of(logits, query, key)
    capped_bias = softcap is None or _is_bias(before)
    bias = before if capped_bias else _bias_of(attention.scores, query, key)
    called = Called(as_called.visible, bias)
    if attention.neutral:
        sides = (replace(side, attention=as_called) for side in (query, key))
        added_to = _before_softcap(as_called)[1] if capped_bias else as_called.scores
        called = Called(as_called.visible, _bias_of(added_to, *sides))
    sinks = _sink_logits(attention, query, key)
    plain = attention, query, key, rotation
    after = _norms_after_rotary(query, key, rotation, logits)
    return Measured(*plain, after, softcap, capped_bias, attention.visible, bias, sinks, called)


def _before_softcap(attention: Attention) -> tuple[float | None, Any]:
    """The softcap, and the logits before it as a function of leaves."""
    program = attention.program
    queries = [head.projection.value for head in attention.heads.query]
    scores = [pair[0] for pair in program.softmaxes]
    capped = [
        node
        for node in program.behind(*queries)
        if node.name == "tanh" and node.outs[0] < min(scores)
    ]
    if not capped:
        return None, attention.scores
    if len(capped) != len(scores):
        raise Unclear("a tanh that is no softcap")
    import torch

    outs = [node.outs[0] for node in capped]
    values = program.tape.values
    one, zero = (
        attention.scores({x: torch.full_like(values[x], c) for x in outs}) for c in (1.0, 0.0)
    )
    caps = (one - zero)[attention.visible]
    if np.ptp(caps) > CLOSE * abs(caps[0]):
        raise Unclear("a softcap that differs between heads")
    cap = float(f"{caps[0]:.9g}")

    def before(leaves: Leaves) -> np.ndarray:
        made = attention.by_head([node.operands[0] for node in capped], leaves)
        return np.where(attention.visible, cap * made, np.nan)

    return cap, before


def _forms(
    attention: Attention, query: Side, key: Side, logits: Any
) -> Mapping[tuple[int, int], np.ndarray]:
    """For pairs of tokens the matrix M of `q @ M @ k`.

    Heads and rows of the batch give a row of it each, if all attend to the same keys.
    """
    width, unit = attention.roles.head_dim, np.eye(attention.roles.head_dim)
    rows, heads = attention.visible.shape[:2]
    together = query.takes_any and bool((attention.visible == attention.visible[:1, :1]).all())
    shape = (rows, heads) if together else (1, 1)
    forms = {pair: np.empty((width, width)) for pair in _token_pairs(attention.visible[0, 0])}
    for j, start in product(range(width), range(0, width, shape[0] * shape[1])):
        leaves, one = key.at(unit[j], {})
        i = (start + np.arange(shape[0] * shape[1]).reshape(shape)) % width
        vectors = unit[i][:, None] if together else unit[start]
        both, other = query.at(vectors, leaves)
        minus, _ = query.at(-vectors, leaves)
        made = (logits(both) - logits(minus))[: shape[0], : shape[1]] / (2 * one * other)
        for (t, s), form in forms.items():
            form[i, j] = made[:, :, t, s]
    if query.loses_mean or key.loses_mean:
        return {pair: _with_mean(form) for pair, form in forms.items()}
    return forms


def _with_mean(form: np.ndarray) -> np.ndarray:
    """The form of heads without a mean, as it is for a multiple of the product of whole heads."""
    width = len(form)
    return form + np.trace(form) / (width - 1) / width


def _token_pairs(visible: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of tokens at every distance that is visible, and some at the same distance."""
    every = [(int(t), int(s)) for t, s in np.argwhere(visible)]
    by_distance: dict[int, list[tuple[int, int]]] = {}
    for t, s in sorted(every, key=lambda pair: (abs(pair[0] - pair[1]), -pair[0])):
        by_distance.setdefault(t - s, []).append((t, s))
    firsts = [pairs[0] for pairs in by_distance.values()]
    lasts = [pairs[-1] for pairs in by_distance.values() if len(pairs) > 1]
    return list(dict.fromkeys([*firsts[:MOST_FORMS], *lasts[:3]]))


def _norms_after_rotary(query: Side, key: Side, rotation: Rotation, logits: Any) -> bool:
    """Whether norms after the rotation make the logits, rather than norms before it."""
    if not rotation.width or (query.norm is None and key.norm is None):
        return False
    random = np.random.RandomState(6).standard_normal
    one, other = random(query.width), random(key.width)
    attention = query.attention
    leaves = attention.put("key", other)
    plus, minus = (logits(attention.put("query", x, leaves))[0, 0] for x in (one, -one))
    t, s = max(_token_pairs(attention.visible[0, 0]), key=lambda pair: min(pair))
    query_matrix, key_matrix = (rotation.matrix(place, query.width) for place in (t, s))

    def error(after: bool) -> float:
        made = key.normed(other, key_matrix, after)
        odd = query.normed(one, query_matrix, after) - query.normed(-one, query_matrix, after)
        return abs(rotation.scale * float(odd @ made) - float((plus - minus)[t, s]))

    return error(True) < error(False)


def _bias_of(logits: Any, query: Side, key: Side) -> np.ndarray:
    """The part of the logits that is even in the queries.

    Args:
      logits: from leaves to `batch head query key`, linear in the queries; scores behind a softcap
        are odd but for what is added to them.
    """
    vector = np.random.RandomState(5).standard_normal(query.width)
    leaves, _ = key.at(vector, {})
    one, two = (logits(query.at(x, leaves)[0]) for x in (vector, -vector))
    return (one + two) / 2


def _is_bias(table: np.ndarray) -> bool:
    """Whether a table is more than a constant in a row, which no softmax sees."""
    return bool(np.nanmax(np.nanmax(table, -1) - np.nanmin(table, -1)) > CLOSE)


def _sink_logits(attention: Attention, query: Side, key: Side) -> np.ndarray | None:
    """The logits that the denominator has beside those of the keys."""
    leaves: Leaves = {}
    for side in (query, key):  # such that no weight is lost beside a large one
        leaves = attention.put(side.role, 1e-3 * np.arange(1.0, side.width + 1), leaves)
    scores, weights = attention.scores(leaves), attention.weights(leaves)
    top = np.nanmax(scores, -1, keepdims=True)
    shares = np.nansum(np.exp(scores - top), -1)
    total = weights.sum(-1)
    rest = shares * (1 / total - 1)
    shown = attention.visible.any(-1) & (total > 0)
    if (np.abs(total - 1)[shown] < CLOSE).all():
        return None
    sinks = np.where(shown, np.log(np.maximum(rest, 1e-300)) + top[..., 0], np.nan)
    if np.nanmax(np.ptp(np.where(np.isfinite(sinks), sinks, np.nanmean(sinks)), axis=-1)) > 1e-6:
        raise Unclear("the weights of a row do not add up to one, and not by a constant logit")
    return np.nanmean(sinks, -1)
