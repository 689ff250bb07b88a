"""Flax's value at a place, and whether a changed program gives it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from .. import judge
from ..groups import groups
from ..sides.match import array_layouts, hidden

MAX_LAYOUTS = 6  # number of layouts in which torch's value is compared with Flax's
FEW = 64  # number of elements that are compared first
ROUGHLY = 1e-7  # relative error that those may have
# A value of up to so many different numbers must have this much information: of thousands of
# changes one gives it by chance otherwise.
DISTINCT, BITS = 8, 40.0
# Share of the elements which a change moves that must differ, where a fault is in some of them.
MIN_SHARE = 0.6
MIN_VALUES = 3  # of torch's numbers there; fewer, as of a mask, agree by chance


@dataclass(frozen=True)
class Target:
    """A value of torch's program, and Flax's in its place.

    Attributes:
      number: of the value on the tape.
      got, want: Flax's and torch's array.
      point: "scores" if all fills count as -inf.
    """

    number: int
    got: np.ndarray
    want: np.ndarray
    point: str = ""

    @cached_property
    def orders(self) -> list[np.ndarray]:
        """For each layout, where Flax's elements stand in torch's array."""
        plain = np.arange(self.want.size).reshape(self.want.shape)
        ways = islice(array_layouts(self.point, self.got.shape, self.want.shape), 24)
        whole = (x for way in ways if (x := way.value(plain)).shape == self.got.shape)
        unique = {x.tobytes(): x for x in whole if len(np.unique(x)) == x.size}
        return list(unique.values())[:MAX_LAYOUTS]

    @cached_property
    def ordinary(self) -> np.ndarray:
        """Where Flax's elements are of ordinary size; all of them if none is.

        Beside a mask's -1e9 the others are too small to count, and its own rounding is too large.
        """
        size = np.abs(self.got.ravel()).astype(np.float64)
        finite = np.flatnonzero(np.isfinite(size))
        some = finite[groups(size[finite]) == 0]
        return some if some.size else np.arange(size.size)

    @cached_property
    def few(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each layout, elements that differ most and some others: where, and Flax's."""
        rng, some = np.random.RandomState(0), self.ordinary
        pairs = []
        for order in self.orders:
            with np.errstate(all="ignore"):
                gap = np.nan_to_num(np.abs(self.got - self.want.ravel()[order]), nan=0.0).ravel()
            worst = np.argsort(-gap[some], kind="stable")[: FEW // 2]
            at = some[np.concatenate([worst, rng.randint(0, some.size, FEW // 2)])]
            pairs.append((order.ravel()[at], self.got.ravel()[at]))
        return pairs

    @cached_property
    def size(self) -> float:
        """The largest finite number of ordinary size in Flax's array."""
        some = np.abs(self.got.ravel()[self.ordinary])
        return float(np.max(some, where=np.isfinite(some), initial=0.0)) or 1.0

    @property
    def tells(self) -> bool:
        """Whether Flax's array has enough information to tell one change from another."""
        _, counts = np.unique(self.got, return_counts=True)
        shares = counts / max(self.got.size, 1)
        entropy = -float((shares * np.log2(shares)).sum())
        return len(counts) > DISTINCT or self.got.size <= DISTINCT or entropy * self.got.size > BITS

    @cached_property
    def is_spoiled(self) -> bool:
        """Whether Flax differs by NaN alone, which many a function gives in place of numbers."""
        if self.got.size != self.want.size or not self.orders:
            return False
        moved = differing(self.got, self.want.ravel()[self.orders[0]])
        return bool(moved.any() and np.isnan(self.got[moved]).all())

    def gap(self, made: Any) -> np.ndarray | None:
        """A few differences in the first layout; None if shapes or kinds differ."""
        if tuple(made.shape) != self.want.shape or not self.few:
            return None
        where, got = self.few[0]
        return self._numpy(made).ravel()[where] - got

    def whole_gap(self, made: Any) -> np.ndarray | None:
        """All finite differences in the first layout; None if shapes or kinds differ."""
        flat = self._flat(made)
        if flat is None or not self.orders:
            return None
        gap = flat[self.orders[0].ravel()] - self.got.ravel()
        return np.where(np.isfinite(gap), gap, 0.0)

    def equals(self, made: Any) -> bool:
        """Whether Flax's array is this one, in one of the layouts."""
        flat = self._flat(made)
        for (where, got), order in zip(self.few, self.orders, strict=True):
            if flat is not None and self._close(flat[where], got).all():
                verdict = judge.same_function(flat[order], self.got, zero=True)
                if verdict.ok:
                    return True
        return False

    def equals_where_it_differs(self, made: Any) -> bool:
        """Whether Flax's array is this one wherever it differs from torch's.

        Of the elements that differ between `made` and torch's, `MIN_SHARE` must be among them.
        """
        flat = self._flat(made)
        for (where, got), order in zip(self.few, self.orders, strict=True):
            worst = slice(0, FEW // 2)
            if flat is None or not self._close(flat[where][worst], got[worst]).any():
                continue
            values, want = flat[order], self.want.ravel()[order]
            moved = differing(self.got, want)
            one, other = values[moved], self.got[moved]
            enough = moved.sum() >= MIN_SHARE * differing(values, want).sum()
            enough = enough and np.unique(want[moved]).size > MIN_VALUES
            if enough and judge.same_function(one, other, zero=True).ok:
                return True
        return False

    def like_torch(self, shape: Sequence[int]) -> np.ndarray | None:
        """Flax's array in torch's first layout and in this shape; None if it does not fit."""
        if not self.orders or self.got.size != np.prod(shape) or self.got.size != self.want.size:
            return None
        made = np.empty(self.got.size, self.got.dtype)
        made[self.orders[0].ravel()] = self.got.ravel()
        return made.reshape(shape)

    def _close(self, made: np.ndarray, got: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return (np.abs(made - got) <= ROUGHLY * self.size) | (made == got)

    def _flat(self, made: Any) -> np.ndarray | None:
        if tuple(made.shape) != self.want.shape:
            return None
        array = self._numpy(made)
        return array.ravel() if array.dtype.kind == self.got.dtype.kind else None

    def _numpy(self, tensor: Any) -> np.ndarray:
        array = tensor.detach().resolve_conj().resolve_neg().numpy()
        return hidden(array) if self.point == "scores" else array


def differing(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Where two arrays differ by more than rounding."""
    finite = np.isfinite(want)
    scale = np.sqrt(np.mean(np.abs(want[finite]) ** 2)) if finite.any() else 1.0
    with np.errstate(invalid="ignore"):
        too_far = np.abs(got - want) > judge.SAME_FUNCTION * scale
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    return ~same & (too_far | ~np.isfinite(got) | ~finite)
