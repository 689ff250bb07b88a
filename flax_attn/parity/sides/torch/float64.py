"""Keeps a torch run in float64 where its code requests float32.

Many torch classes hard-code float32: `x.float()`, `softmax(..., dtype=torch.float32)`, `arange(...,
dtype=torch.float32)`. Such a module, moved to float64, still computes in float32 inside, and no
port can agree with it to better than 5e-8. Lifted, it computes the same function in float64.

Casts to bfloat16 or float16 are different: float32 is requested for more precision than the model
has, 16 bits for less, in every dtype the model runs in. Such rounding is part of the function, so
it is kept, and a note names its line.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

from .dispatch import dispatch_mode

PARITY_DIR = str(Path(__file__).parents[2])
# These take a dtype to reinterpret bits or to answer a query, not to compute in it.
PASSED_THROUGH = ("view", "promote_types", "can_cast", "set_default_dtype")
# These read Python numbers, which are rounded before the dispatcher is called.
READERS = ("tensor", "as_tensor", "asarray", "scalar_tensor", "new_tensor")

# Note on a line that rounds to 16 bits.
ROUNDED = "torch's own rounding, part of the function: the port must round here too"


@contextmanager
def lifted(all_narrow: bool = False) -> Iterator[list[str]]:
    """Replaces every float32 that torch code requests by float64, and complex64 by complex128.

    Affects casts, factories and reductions with a dtype, and integers converted to floats; the
    default dtype becomes float64. Requests for bfloat16 or float16 round as usual. Weights and
    inputs are not converted: move the module and its inputs to float64 first. Other dispatch modes
    may be active outside or inside.

    Args:
      all_narrow: whether to lift bfloat16 and float16 too. The truth of a narrow dtype is computed
        in this way, so that torch's error against it includes all of torch's rounding.

    Yields:
      A list that grows by one sentence for each source line that was lifted, that rounds to 16
      bits, or that stayed float32 because its inputs were float32 before.

    Example (needs torch):

        with lifted() as notes:
            out = module.double()(x)
        assert out.dtype == torch.float64
    """
    import torch

    notes = _Notes()
    default = torch.get_default_dtype()
    functions, dispatch = _modes(notes, _wide(all_narrow))
    torch.set_default_dtype(torch.float64)
    try:
        with dispatch, functions:
            yield notes.sentences
    finally:
        torch.set_default_dtype(default)


class _Notes:
    """Collects one sentence per source line, and tracks the torch functions being called."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.reported: set[tuple[str, str]] = set()
        self.calls: list[str] = []

    def add(self, name: str, dtype: Any, what: str) -> None:
        place = _place()
        # The outermost function is the one that the user's line calls.
        name = self.calls[0] if self.calls else name.strip("_").replace("to_copy", "cast")
        if (place, what) not in self.reported:
            self.reported.add((place, what))
            self.sentences.append(f"{place} {name} in {str(dtype).removeprefix('torch.')}: {what}")


def _modes(notes: _Notes, wide: dict[Any, Any]) -> tuple[Any, Any]:
    """Returns a function mode, which tracks names and lifts `READERS`, and a dispatch mode."""
    from torch.overrides import TorchFunctionMode

    def to_float64(name: str, args: Any, kwargs: Any) -> tuple[Any, dict]:
        requested_dtypes = [x for x in (*args, *kwargs.values()) if _is_dtype(x) and x in wide]
        if not requested_dtypes:
            return args, kwargs
        half = requested_dtypes[0] not in _wide(False)
        notes.add(name, requested_dtypes[0], ROUNDED if half else "lifted to float64")
        args = tuple(wide.get(x, x) if _is_dtype(x) else x for x in args)
        return args, {k: wide.get(x, x) if _is_dtype(x) else x for k, x in kwargs.items()}

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            name, kwargs = getattr(func, "__name__", ""), kwargs or {}
            notes.calls.append(name)
            try:
                if name not in READERS:
                    return func(*args, **kwargs)
                args, kwargs = to_float64(name, args, kwargs)
                out = func(*args, **kwargs)
                _note_narrow(notes, name, out, {})
                return out
            finally:
                notes.calls.pop()

    def in_float64(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if name not in PASSED_THROUGH:
            args, kwargs = to_float64(name, args, kwargs)
        out = func(*args, **kwargs)
        if not _computes_nothing(func, name, args, out):
            _note_narrow(notes, name, out, wide)
        return out

    return Functions(), dispatch_mode(in_float64)


def _computes_nothing(func: Any, name: str, args: tuple[Any, ...], out: Any) -> bool:
    """Whether an operation is a view or copy; a cast in inference mode counts as computing."""
    # In inference mode a cast is marked as a view, although it rounds: its dtype shows it.
    if not func.is_view:
        return name in ("detach", "clone", "lift_fresh", "empty_like")
    first = out[0] if isinstance(out, tuple | list) else out
    return first.dtype == getattr(args[0], "dtype", first.dtype)


def _note_narrow(notes: _Notes, name: str, out: Any, wide: dict) -> None:
    """Adds a note for a result that is narrow in spite of lifting.

    Of 16-bit results only those of the forward pass count: autograd inserts casts of its own.
    """
    import torch

    half = (torch.bfloat16, torch.float16, torch.complex32)
    for x in out if isinstance(out, tuple | list) else (out,):
        if torch.is_tensor(x) and x.dtype in half and not _called_by_autograd():
            notes.add(name, x.dtype, ROUNDED)
        elif torch.is_tensor(x) and x.dtype in wide and x.dtype not in half:
            notes.add(name, x.dtype, "left so, since what it is computed from is")


def _called_by_autograd() -> bool:
    """Whether autograd's engine called the operation, without a user line in between."""
    frame = sys._getframe(1)
    while frame is not None and _is_plumbing(frame.f_code):
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False


def _is_dtype(x: Any) -> bool:
    import torch

    return isinstance(x, torch.dtype)


def _wide(all_narrow: bool) -> dict[Any, Any]:
    """Maps each lifted dtype to its replacement."""
    import torch

    dtypes = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    if all_narrow:
        dtypes |= dict.fromkeys((torch.bfloat16, torch.float16), torch.float64)
        dtypes[torch.complex32] = torch.complex128
    return dtypes


def _place() -> str:
    """Returns "file.py:line" of the innermost line outside torch and this package."""

    frame = sys._getframe(1)
    while frame is not None and _is_plumbing(frame.f_code):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "torch"


def _is_plumbing(code: CodeType) -> bool:
    import torch

    if code.co_name in ("__torch_dispatch__", "__torch_function__"):
        return True
    paths = sysconfig.get_paths()
    # Torch may be inside the standard library's folder, in site-packages: it is a root of its own.
    roots = (PARITY_DIR, torch.__path__[0], paths["stdlib"])
    inside = next((root for root in roots if code.co_filename.startswith(root + os.sep)), None)
    return inside is not None and "site-packages" not in code.co_filename.removeprefix(inside)
