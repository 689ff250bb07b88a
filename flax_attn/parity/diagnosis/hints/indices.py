"""Faults in integer inputs: token ids, positions, expert indices."""

import numpy as np

from ...report import Row, plural
from ..places import Local


def other_indices(local: Local, row: Row) -> str:
    """How a step's input indices differ from torch's, or ""."""
    pair = _indices(local, row)
    if pair is None or np.array_equal(*pair):
        return ""
    got, want = pair
    differs = got != want
    first = tuple(int(i) for i in np.argwhere(differs)[0])
    shifts = np.unique((got - want)[differs])
    where = "all" if differs.all() else f"{int(differs.sum())} of {plural(got.size, 'place')}"
    if len(shifts) == 1:
        way = "higher" if shifts[0] > 0 else "lower"
        difference = f"{abs(int(shifts[0]))} {way} than torch's in {where}"
    else:
        difference = f"other than torch's in {where}"
    example = f"{list(first)} is {got[first]}, torch {want[first]}"
    return f"given other indices, rows or positions: {difference}; {example}"


def arrived_wrong(local: Local, row: Row) -> bool:
    """Whether a step's wrong input indices are already the output of another step."""
    pair = _indices(local, row)
    if pair is None or np.array_equal(*pair):
        return False
    got, want = pair
    for name, torch_name in local.torch_names.items():
        value = local.run.taps.get(name)
        if value is not None and value.dtype.kind in "iu" and name != row.name:
            made, torch_value = value.ravel(), local.truth.taps[torch_name].ravel()
            if np.array_equal(made, got.ravel()) and np.array_equal(torch_value, want.ravel()):
                return True
    return False


def _indices(local: Local, row: Row) -> tuple[np.ndarray, np.ndarray] | None:
    """The first integer inputs of a step on both sides, in the same shape."""
    call = local.truth.calls.get(local.torch_names.get(row.name, ""))
    torch_indices = [x for x in call.inputs.values() if x.dtype.kind in "iu"] if call else []
    flax_indices = [x for x in local.run.inputs.get(row.name, ()) if x.dtype.kind in "iu"]
    if not flax_indices or not torch_indices or flax_indices[0].size != torch_indices[0].size:
        return None
    return flax_indices[0].astype(np.int64).reshape(torch_indices[0].shape), torch_indices[
        0
    ].astype(np.int64)
