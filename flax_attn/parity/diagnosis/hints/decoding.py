"""Hints for a wrong decoding step: which tokens it attends to, and what its cache contains.

Only the leaves of a cache are known. The tokens an output depends on are found by its gradient,
the tokens in a cache by searching it for the known keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from ... import draw, judge
from ...report import plural
from ...rows.decoding import CutComparison, Place
from ...sides.leaves import leaves
from ...sides.run import Run, is_floating
from ...sides.steps import Decoded, joined
from .contents import Contents, contents

NARROW = (np.dtype(ml_dtypes.bfloat16), np.dtype("float16"), np.dtype("float32"))
Tokens = list[int]

BEFORE = "the cache is read before it is written, or `valid` is inverted"
OVER = "a step writes over its own tokens before it reads them"
OF_ROW_0 = "row 0 is right: its length or slots serve all rows, or padding counts as tokens"


@dataclass(frozen=True)
class DecodeFailure:
    """A split that differs, with everything available for the diagnosis.

    Attributes:
      steps: both sides' steps.
      place: the first difference of the split.
      wrong: all splits that differ from the same reference.
      count: the number of splits.
      whole, truth: the full forward passes of Flax and torch.
    """

    steps: Decoded
    place: Place
    wrong: Sequence[CutComparison]
    count: int
    whole: Run
    truth: Run

    @property
    def start(self) -> int:
        """The first token of the wrong step."""
        return self.place.cut.spans[self.place.step][0]

    @property
    def before(self) -> list[tuple[str, np.ndarray]]:
        """The floating-point arrays of the cache passed to the wrong step, by name."""
        caches = self.steps.got[self.place.cut].caches[: self.place.step]
        named = leaves(caches[-1], "cache") if caches else ()
        arrays = ((name, np.asarray(x)) for name, x in named if isinstance(x, jax.Array))
        return [(name, x) for name, x in arrays if is_floating(x)]

    def contents(self, kind: str) -> list[Contents]:
        """The keys or values in the cache passed to the wrong step, for each attention layer."""
        side, caches = self.steps.side, [x for _, x in self.before]
        if len(self.place.row) != 1:
            return []
        sizes = side.arrays[side.first].shape[0], side.tokens
        runs = (contents(caches, run.taps, kind, *sizes) for run in (self.whole, self.truth))
        return next(filter(None, map(list, runs)), [])

    @cached_property
    def dependence(self) -> "TokenDependence":
        return TokenDependence.of(self)

    @property
    def singles(self) -> bool:
        """Whether all wrong steps have a single token."""
        steps = (each.place for each in self.wrong if each.place is not None)
        return all(place.cut.lengths[place.step] == 1 for place in steps)

    @cached_property
    def first_row_is_right(self) -> bool:
        """Whether all differences are in rows other than the first."""
        want, axis = self.whole.outputs[self.steps.output], self.steps.axis
        if not self.place.row or len(want) < 2:
            return False
        steps = [joined(self.steps.got[each.cut].outputs, axis) for each in self.wrong]
        return all(
            x is not None and judge.same_function(x[0], want[0], fill=True).ok for x in steps
        )


def decode_hint(failure: DecodeFailure) -> str:
    """The likely cause of a wrong step, or ""."""
    for look in (narrowed, other_rows, missing_tokens, extra_tokens, wrong_weights):
        if hint := look(failure):
            return hint
    return ""


def narrowed(failure: DecodeFailure) -> str:
    """Detects cached values that lost precision."""
    for name, x in failure.before:
        for dtype in NARROW if x.any() and x.dtype == np.float64 else ():
            with np.errstate(over="ignore"):
                exact = x.astype(dtype).astype(np.float64) == x
            if exact.all() and (x != np.round(x)).any():
                return f"numbers narrowed on their way into the cache: {name} holds {dtype.name}"
        if x.dtype in NARROW:
            return f"numbers narrowed on their way into the cache: {name} is {x.dtype.name}"
    return ""


@dataclass(frozen=True)
class TokenDependence:
    """The tokens that the first wrong row depends on.

    Attributes:
      row, token: indices of the wrong row.
      cut, whole: tokens of the same batch row that it depends on, step by step and in Flax's full
        forward pass.
      others: other batch rows that it depends on, step by step.
    """

    row: tuple[int, ...]
    token: int
    cut: Tokens
    whole: Tokens
    others: list[tuple[int, ...]]

    @classmethod
    def of(cls, failure: DecodeFailure) -> "TokenDependence":
        place, steps = failure.place, failure.steps.side
        axis = steps.axes[steps.first]
        with steps.side.precise():
            x = steps.arrays[steps.first]

            def by_steps(x: Any) -> Any:
                outputs, _ = steps.take(place.cut, {**steps.arrays, steps.first: x}, place.step + 1)
                return _row(outputs[-1], place, axis, place.token - failure.start)

            def at_once(x: Any) -> Any:
                args, kwargs = steps.request.fill({**steps.arrays, steps.first: x})
                out = steps.side.call(nnx.merge(*steps.module_state), *args, **kwargs)
                named = dict(leaves(out))
                return _row(named[failure.steps.output], place, axis, place.token)

            by_step, whole = (_depends(f, x, axis) for f in (by_steps, at_once))
        batch = [tuple(map(int, at)) for at in np.argwhere(by_step.any(-1))]
        others = [at for at in batch if at != place.row and not whole[at].any()]
        mine, wanted = (np.flatnonzero(tokens[place.row]).tolist() for tokens in (by_step, whole))
        return cls(place.row, place.token, mine, wanted, others)

    @property
    def missing(self) -> Tokens:
        """Tokens that only the full forward pass depends on."""
        return [token for token in self.whole if token not in self.cut]

    @property
    def extra(self) -> Tokens:
        """Tokens that only the steps depend on."""
        return [token for token in self.cut if token not in self.whole]


def _row(y: Any, place: Place, axis: int, token: int) -> Any:
    at: list[Any] = [slice(None)] * y.ndim
    at[: len(place.row)] = place.row
    at[axis] = token
    return y[tuple(at)]


def _depends(function: Any, x: Any, axis: int) -> np.ndarray:
    """Whether the result depends on each token, as a boolean per row and token."""
    y, back = jax.vjp(function, x)
    (slope,) = back(jax.numpy.asarray(draw.normal(0, "sight", y.shape), y.dtype))
    slope = np.nan_to_num(np.abs(np.asarray(slope)), nan=np.inf)
    axis = axis % slope.ndim
    size = slope.max(axis=tuple(range(axis + 1, slope.ndim)), initial=0.0)
    return size > judge.SAME_FUNCTION * np.where(np.isfinite(size), size, 0.0).max(initial=0.0)


def other_rows(failure: DecodeFailure) -> str:
    """Detects a dependence on another batch row."""
    dependence = failure.dependence
    if not dependence.others:
        return ""
    return (
        f"row {list(dependence.row)} depends on row {list(dependence.others[0])}: {_moved(failure)}"
    )


def _moved(failure: DecodeFailure) -> str:
    """Describes whether only keys or only values are in other cache rows."""
    keys, values = (failure.contents(kind) for kind in ("key", "value"))
    keys, values = (
        any(x.in_other_rows for x in caches) if caches else None for caches in (keys, values)
    )
    if keys is None or values is None or keys == values:
        return "rows of the cache in another order"
    moved, correct = ("keys", "values") if keys else ("values", "keys")
    return f"the {moved} of the cache lie in another order of rows, its {correct} do not"


def missing_tokens(failure: DecodeFailure) -> str:
    """Detects tokens that only the full forward pass attends to."""
    dependence, start = failure.dependence, failure.start
    if not dependence.missing:
        return ""
    itself = dependence.missing == [dependence.token]
    hidden = "itself" if itself else _token_list(dependence.missing)
    text = f"token {dependence.token} does not see {hidden}"
    if start and dependence.cut and dependence.cut[-1] == dependence.token - start:
        return f"{text}: the mask is asked at its place in the step, {dependence.token - start}"
    if dependence.extra:
        return f"{text}, and sees {_token_list(dependence.extra)} in their place: places shifted"
    if dependence.token in dependence.missing:
        return f"{text}: {OVER if len(failure.wrong) < failure.count else BEFORE}"
    if failure.first_row_is_right:
        return f"{text}; {OF_ROW_0}"
    if min(dependence.missing) >= start:
        return f"{text} of its own step: {OVER}"
    if dependence.missing == [start - 1]:
        return f"{text}, the last of the step before: a length that is short"
    return f"{text}: overwritten, dropped or hidden"


def extra_tokens(failure: DecodeFailure) -> str:
    """Detects tokens that only the step attends to."""
    dependence = failure.dependence
    if not dependence.extra:
        return ""
    text = f"token {dependence.token} sees {_token_list(dependence.extra)}, which the mask hides"
    if failure.singles:
        return f"{text}: a window or mask left out in steps of one token"
    return f"{text}: a mask left out, or asked at slots and not at positions"


def wrong_weights(failure: DecodeFailure) -> str:
    """The case of equal tokens with other weights or values."""
    dependence = failure.dependence
    if not dependence.whole or failure.place.step == 0:
        return _at_once(failure) if dependence.whole else ""
    text = "the same tokens seen with other"
    keys, values = (failure.contents(kind) for kind in ("key", "value"))
    if not keys or not values:
        return f"{text} weights or values: positions of another step, or other contents"
    row, before = dependence.row[0], [token for token in dependence.whole if token < failure.start]
    missing = [
        sorted({t for x in caches for t in x.missing(row, before)}) for caches in (keys, values)
    ]
    if all(missing):
        return f"{text} keys and values: the cache of another layer, or other contents"
    if missing[1]:
        listed = _token_list(missing[1])
        return f"{text} values: of {listed} the cache holds others than were computed"
    if missing[0]:
        listed = _token_list(missing[0])
        return f"{text} keys: of {listed} the cache holds them rotated by other positions"
    text += " weights, though their keys and values are right"
    if failure.first_row_is_right:
        return f"{text}; {OF_ROW_0}"
    if any(row in x.strangers for x in keys):
        return f"{text}: keys of no token are in the cache too, as of a truncate that keeps them"
    other = ", or the cache of another layer read" if len(keys) > 1 else ""
    return f"{text}: the query rotated by another position, or a mask or bias asked at one{other}"


def _at_once(failure: DecodeFailure) -> str:
    """The case of a first step, from an empty cache, that is already wrong."""
    if len(failure.place.cut.lengths) > 1 and len(failure.wrong) < failure.count:
        return ""
    return (
        "the same tokens seen with other weights or values, already from an empty cache: positions "
        "counted otherwise than without a cache, or the tokens themselves not stored"
    )


def _token_list(tokens: Tokens) -> str:
    """Formats a list of tokens.

    >>> _token_list([3]), _token_list([2, 3, 4]), _token_list([0, 2])
    ('token 3', 'tokens 2 to 4', 'tokens 0, 2')
    """
    if len(tokens) == 1:
        return f"token {tokens[0]}"
    if tokens == list(range(tokens[0], tokens[-1] + 1)):
        return f"tokens {tokens[0]} to {tokens[-1]}"
    some = ", ".join(map(str, tokens[:6]))
    return f"tokens {some}" + (f" and {plural(len(tokens) - 6, 'more')}" if len(tokens) > 6 else "")
