"""Runs a case on several devices: its inputs are sharded, and its reference runs on one."""

from collections.abc import Mapping
from copy import copy
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import P

from ...errors import ParityError
from ..report import Report

if TYPE_CHECKING:
    from .case import Case


class Split(NamedTuple):
    """Number of shards along the batch and along the length."""

    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.length}"


def sharded_report(case: "Case", live: bool, devices: int) -> tuple[Report, Split] | None:
    """The comparison on as many devices as the case's sizes allow, and the split used.

    Runs in float64 under jit, without decoding. The weights are replicated. If a layer raises for a
    sharded length, only the batch is sharded, as the split shows. None if the sizes allow no split.

    Raises:
      ParityError: if the modules cannot be compared.
    """
    arrays, refused = case.arrays(), None
    for split in splits(arrays, min(devices, jax.device_count())):
        try:
            return _over(case, split, arrays, live), split
        except ParityError as error:
            if error.__cause__ is None:  # not raised by the layer
                raise
            refused = error
    if refused is not None:
        raise refused
    return None


def splits(arrays: Mapping[str, np.ndarray], devices: int) -> list[Split]:
    """The split over the most devices, along batch and length; then the one along the batch only.

    >>> splits({"x": np.ones((2, 12, 5))}, 8)
    [Split(batch=2, length=4), Split(batch=2, length=1)]
    >>> splits({"x": np.ones((2, 7, 5))}, 8)
    [Split(batch=1, length=7), Split(batch=2, length=1)]
    """
    batch = _entries(arrays)
    length = gcd(*(x.shape[1] for x in arrays.values() if _is_sequence(x))) or 1
    counts = range(1, devices + 1)
    fit = [Split(b, t) for b in counts for t in counts if batch % b == 0 == length % t]
    fit = [split for split in fit if split.batch * split.length <= devices]
    both = max(fit, key=lambda x: (x.batch * x.length, min(x)))
    alone = max(x for x in fit if x.length == 1)
    return [x for x in dict.fromkeys([both, alone]) if x != (1, 1)]


def _entries(arrays: Mapping[str, np.ndarray]) -> int:
    """Size of the first batch axis."""
    return max((x.shape[0] for x in arrays.values() if x.ndim > 2), default=1)


def _is_sequence(x: np.ndarray) -> bool:
    """Whether an input is a sequence of vectors, B T D."""
    return x.ndim == 3 and x.dtype.kind == "f"


def _over(case: "Case", split: Split, arrays: Mapping[str, np.ndarray], live: bool) -> Report:
    devices = jax.devices()[: split.batch * split.length]
    mesh = jax.make_mesh(split, ("batch", "length"), devices=devices)
    specs = {name: _spec(x, split, _entries(arrays)) for name, x in arrays.items()}

    def call(module: Any, **inputs: Any) -> Any:
        arguments = {
            name: jax.reshard(x, specs[name]) if name in specs else x for name, x in inputs.items()
        }
        outputs = case.flax_call(module, **arguments)
        return jax.tree.map(
            lambda x: jax.reshard(x, P()) if isinstance(x, jax.Array) else x, outputs
        )

    spread = copy(case)
    spread.flax_call, spread.decode, spread.dtypes = call, None, ("float64",)
    with jax.set_mesh(mesh):
        return spread.report(live, eager=False)


def _spec(x: np.ndarray, split: Split, entries: int) -> P:
    """The partition spec of an input.

    Vectors are sharded along batch and length. Other inputs whose first axis is the batch, such as
    masks, are sharded along that; the rest are replicated.
    """
    batch, length = (name if n > 1 else None for name, n in split._asdict().items())
    if _is_sequence(x):
        return P(batch, length)
    return P(batch) if x.ndim > 1 and x.shape[0] == entries else P()
