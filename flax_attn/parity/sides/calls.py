"""How modules are called, and what is said when such a call fails."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...errors import ParityError

# Torch's names of dtypes.
NAMES = {
    **{f"{kind}{bits}": f"{kind}{bits}" for kind in ("bfloat", "float") for bits in (16, 32, 64)},
    **{"double": "float64", "float": "float32", "half": "float16"},
}


def plain_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """How a module is called unless somebody says otherwise."""
    return module(*args, **kwargs)


@contextmanager
def errors_of(
    side: str,
    name: str,
    dtype: str,
    call: Callable[..., Any],
    wrong_dtype_buffers: Callable[[], Sequence[str]] = list,
) -> Iterator[None]:
    """An exception of a module's call, told as what it is: its own, in this dtype.

    Args:
      side: "torch" or "Flax".
      name: of the module's class.
      dtype: that it runs in.
      call: how it is called.
      stiff: asked what of it does not follow its dtype.
    """
    try:
        yield
    except ParityError:
        raise
    except Exception as error:
        message = str(error).strip().rstrip(".")
        advice = _advice(side, dtype, message, call is plain_call, wrong_dtype_buffers)
        gap = "\n" if "\n" in message else " "  # a long message is told whole, and advice below it
        raise ParityError(
            f"{name} of {side} fails in {dtype}: {type(error).__name__}: {message}.{gap}{advice}"
        ) from error


def _advice(
    side: str,
    dtype: str,
    message: str,
    is_plain: bool,
    wrong_dtype_buffers: Callable[[], Sequence[str]],
) -> str:
    """What to do about an exception, by what it says."""
    call = f"{side.lower()}_call="
    if "not implemented for" in message:
        return f"Torch has no such operation in {dtype} here: leave it out of dtypes."
    named = {NAMES[word] for word in re.findall("|".join(NAMES), message.lower())}
    if len(named) > 1 and dtype in named:
        constants = wrong_dtype_buffers()
        what = f"{', '.join(constants[:3])} of it" if constants else "its constants"
        advice = f"Make {what} follow the dtype of its input"
    else:
        advice = "Call it with these inputs by itself"
    return f"{advice}, or pass {call}." if is_plain else f"{advice}, or change {call}."
