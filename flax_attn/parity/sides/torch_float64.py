"""A torch run kept in float64 where its code asks for float32.

Many torch classes hard-code float32: `x.float()`, `softmax(..., dtype=torch.float32)`, `arange(...,
dtype=torch.float32)`. A module of them, moved to float64, still computes in float32 inside, and no
port can agree with it beyond 5e-8. Lifted, it is the float64 function that it stands for.

A cast to bfloat16 or float16 is another matter: an author who asks for float32 wants more digits
than the model has, one who asks for 16 bits wants fewer, in every dtype the model runs in. Such
rounding is part of the function, so it stays, and a note names its line.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from .torch_dispatch import dispatch_mode

# These take a dtype to look at bits or to answer a question, not to compute in it.
PASSED_THROUGH = ("view", "promote_types", "can_cast", "set_default_dtype")
# These read Python numbers, which would be rounded before the dispatcher sees them.
READERS = ("tensor", "as_tensor", "asarray", "scalar_tensor", "new_tensor")

# What is said of a line that rounds to 16 bits.
ROUNDED = "torch's own rounding, part of the function: the port must round here too"


@contextmanager
def lifted(all_narrow: bool = False) -> Iterator[list[str]]:
    """Every float32 that torch code asks for meanwhile is float64, every complex64 complex128.

    Casts, factories and reductions with a dtype, integers made floats; the default dtype is float64
    meanwhile. What asks for bfloat16 or float16 is rounded as it asks. Weights and inputs are not
    touched: move the module and its inputs to float64 first. Other dispatch modes may be active
    around it or inside it.

    Args:
      all_narrow: whether bfloat16 and float16 are lifted as well. So the truth of a narrow dtype is
        made, since torch's error against it holds its roundings, at whichever elements they fall.

    Yields:
      One sentence for each source line that was lifted, growing as the code runs; for each line
      that rounds to 16 bits; and for each line that stayed float32 since what it computes with was
      float32 before.

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
    """The sentences, one for each source line; and the torch function that is being called."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.reported: set[tuple[str, str]] = set()
        self.calls: list[str] = []

    def add(self, name: str, dtype: Any, what: str) -> None:
        place = _place()
        name = self.calls[0] if self.calls else name.strip("_").replace("to_copy", "cast")
        if (place, what) not in self.reported:
            self.reported.add((place, what))
            self.sentences.append(f"{place} {name} in {str(dtype).removeprefix('torch.')}: {what}")


def _modes(notes: _Notes, wide: dict[Any, Any]) -> tuple[Any, Any]:
    """One mode that knows torch functions by the names they are called by, one that lifts."""
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
    """Views and copies; but a cast in inference mode, which calls itself a view, does round."""
    if not func.is_view:
        return name in ("detach", "clone", "lift_fresh", "empty_like")
    first = out[0] if isinstance(out, tuple | list) else out
    return first.dtype == getattr(args[0], "dtype", first.dtype)


def _note_narrow(notes: _Notes, name: str, out: Any, wide: dict) -> None:
    """A sentence where a result is narrow all the same.

    Of 16 bits only the forward pass is told: behind it autograd casts without being asked.
    """
    import torch

    half = (torch.bfloat16, torch.float16, torch.complex32)
    for x in out if isinstance(out, tuple | list) else (out,):
        if torch.is_tensor(x) and x.dtype in half and not _called_by_autograd():
            notes.add(name, x.dtype, ROUNDED)
        elif torch.is_tensor(x) and x.dtype in wide and x.dtype not in half:
            notes.add(name, x.dtype, "left so, since what it is computed from is")


def _called_by_autograd() -> bool:
    """Whether the engine of gradients runs, and no line of a person's inside it."""
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
    """What each dtype that is lifted becomes."""
    import torch

    dtypes = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    if all_narrow:
        dtypes |= dict.fromkeys((torch.bfloat16, torch.float16), torch.float64)
        dtypes[torch.complex32] = torch.complex128
    return dtypes


def _place() -> str:
    """ "file.py:line" of the innermost Python line that is not torch's or this package's own."""

    frame = sys._getframe(1)
    while frame is not None and _is_plumbing(frame.f_code):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "torch"


def _is_plumbing(code: CodeType) -> bool:
    import torch

    if code.co_name in ("__torch_dispatch__", "__torch_function__"):
        return True
    paths = sysconfig.get_paths()
    roots = (os.path.dirname(os.path.dirname(__file__)), torch.__path__[0], paths["stdlib"])
    inside = next((root for root in roots if code.co_filename.startswith(root + os.sep)), None)
    return inside is not None and "site-packages" not in code.co_filename.removeprefix(inside)
