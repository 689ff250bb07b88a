"""Differences in module state after a call: counters, buffers, running statistics."""

import numpy as np

from ...sides.pair import Names
from ...sides.run import Run


def changed_alone(path: str, run: Run, truth: Run, names: Names) -> str:
    """Hint which side changes a variable in its call while the other does not, or ""."""
    carried = names.carried(truth.state)
    torch_buffers = {names.tap(name): name for name in truth.state if name not in carried}
    before = {path for path in carried if _moves(path, truth, names)}
    changed = path in before or torch_buffers.get(path) in truth.changed
    flax_changes, value = path in run.changed, run.state.get(path)
    if flax_changes == changed or value is None:
        return ""
    if flax_changes:
        return f"Flax changes {path} in this call, torch does not"
    hint = f"torch changes {path} in this call, Flax does not"
    want = carried.get(path, truth.state.get(torch_buffers.get(path, "")))
    one_more = want is not None and want.dtype.kind in "iu" and np.array_equal(want, value + 1)
    return f"a counter that is not counted up: {hint}" if one_more else hint


def _moves(path: str, truth: Run, names: Names) -> bool:
    """Whether torch changes a buffer that is mapped to `path`."""
    moved = {name: truth.state[name] for name in truth.changed if name in truth.state}
    return path in names.carried(moved)
