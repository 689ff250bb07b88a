"""A mask over the slots of a cache, for kernels that read the cache in place."""

from typing import Any, ClassVar

from .._internal.arrays import look_up
from .._internal.types import frozen
from .algebra import Mask
from .ranges import Band


@frozen
class StoredKeys(Mask):
    """Query q attends to the slots `first <= k < end`; a first of None is slot 0.

    Masked keys are not replaced by zeros, which would copy the cache: NaN in them may reach the
    outputs of a kernel, and the caller checks these.

    Attributes:
      first, end: `B T`, integers, at least 0.
    """

    first: Any
    end: Any

    AXES: ClassVar = {"first": "bq", "end": "bq"}
    reads = "slot"

    def __call__(self, b, n, q, k):
        shown = k < look_up(self.end, b, q)
        return shown if self.first is None else shown & (k >= look_up(self.first, b, q))

    def as_band(self):
        is_lengths = self.first is None and self.end.shape[1] == 1
        return Band(kv=self.end[:, 0]) if is_lengths else None

    def as_runs(self, q):
        return self.first, self.end
