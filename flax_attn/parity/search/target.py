"""Flax's value at a place, and whether a changed program gives it."""

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from .. import judge
from ..groups import groups
from ..sides.match import layouts

MAX_LAYOUTS = 6  # number of layouts in which torch's value is compared with Flax's
FEW = 64  # number of elements that are compared first
ROUGHLY = 1e-7  # relative error that those may have
# A value of up to so many different numbers must have this much information: of thousands of
# changes one gives it by chance otherwise.
DISTINCT, BITS = 8, 40.0


@dataclass(frozen=True)
class Target:
    """A value of torch's program, and Flax's in its place.

    Attributes:
      number: of the value on the tape.
      got, want: Flax's and torch's array.
    """

    number: int
    got: np.ndarray
    want: np.ndarray

    @cached_property
    def orders(self) -> list[np.ndarray]:
        """For each layout, where Flax's elements stand in torch's array."""
        plain = np.arange(self.want.size).reshape(self.want.shape)
        made = (x.value(plain) for x in islice(layouts("", self.got.shape, self.want.shape), 24))
        whole = (x for x in made if x.shape == self.got.shape and x.dtype.kind in "iu")
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

    def gap(self, made: Any) -> np.ndarray | None:
        """A few differences in the first layout; None if shapes or kinds differ."""
        if tuple(made.shape) != self.want.shape or not self.few:
            return None
        where, got = self.few[0]
        return _numpy(made).ravel()[where] - got

    def equals(self, made: Any) -> bool:
        """Whether Flax's array is this one, in one of the layouts."""
        if tuple(made.shape) != self.want.shape:
            return False
        array = _numpy(made)
        if array.dtype.kind != self.got.dtype.kind:
            return False
        flat = array.ravel()
        for (where, got), order in zip(self.few, self.orders, strict=True):
            close = np.abs(flat[where] - got) <= ROUGHLY * self.size
            if (close | (flat[where] == got)).all():
                verdict = judge.same_function(flat[order], self.got, zero=True)
                if verdict.ok:
                    return True
        return False


def _numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().resolve_conj().resolve_neg().numpy()
