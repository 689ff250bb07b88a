"""Default module call, and error messages for failing calls."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from traceback import extract_tb
from typing import Any

from flax import nnx

from ...errors import ParityError
from .jax.precision import is_user_code

# Torch's dtype names, aliases included, as they occur in its error messages.
NAMES = {
    **{f"{kind}{bits}": f"{kind}{bits}" for kind in ("bfloat", "float") for bits in (16, 32, 64)},
    **{"double": "float64", "float": "float32", "half": "float16"},
}


# Of a side that calls out of its library.
ITSELF = "if it calls the other side there, that is equal to itself"


def name_of(side: Any) -> str:
    """The name of a module's class; of a function, its own."""
    return type(side).__name__


def as_module(function: Callable[..., Any]) -> nnx.Module:
    """A JAX function as an nnx module without weights, under the function's name.

    >>> import jax
    >>> name_of(as_module(jax.nn.relu)), int(as_module(jax.nn.relu)(-1))
    ('relu', 0)
    """
    named: Any = function
    while isinstance(named, partial):
        named = named.func
    name = getattr(named, "__name__", type(named).__name__)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # A class of its own: as an attribute, a function that is a pytree would be taken apart.
    module = {"__call__": call, "__module__": getattr(named, "__module__", "")}
    return type(name, (Function,), module)()


def as_side(side: Any) -> Any:
    """A side as a module: a JAX function becomes one, everything else is returned."""
    is_function = callable(side) and not isinstance(side, nnx.Module | type)
    return as_module(side) if is_function else side


class Function(nnx.Module):
    """A JAX function as a module."""


def plain_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a module; the default of `torch_call` and `flax_call`."""
    return module(*args, **kwargs)


@contextmanager
def errors_of(
    side: str,
    name: str,
    dtype: str,
    call: Callable[..., Any],
    wrong_dtype_buffers: Callable[[], Sequence[str]] = list,
) -> Iterator[None]:
    """Converts an exception of a module's call to a `ParityError` with advice.

    Args:
      side: "torch" or "Flax", or a description of a JAX side.
      name: name of the module's class.
      dtype: dtype of the run.
      call: function that calls the module.
      wrong_dtype_buffers: returns names of the module's arrays that do not follow its dtype.
    """
    try:
        yield
    except ParityError:
        raise
    except Exception as error:
        message = str(error).strip().rstrip(".")
        advice = _advice(side, dtype, message, call is plain_call, wrong_dtype_buffers)
        if side != "torch":
            advice = _dropout_advice(message) or advice
            advice = f"{user_line(error)}{advice}"
        gap = "\n" if "\n" in message else " "  # a multi-line message has the advice below it
        who = f"{name} of {side}" if side in ("torch", "Flax") else f"{name}, {side},"
        raise ParityError(
            f"{who} fails in {dtype}: {type(error).__name__}: {message}.{gap}{advice}"
        ) from error


def user_line(error: BaseException | None) -> str:
    """The innermost line of user code that raised, as "At path:line: `source`. "; "" if none."""
    frames = [x for x in extract_tb(error and error.__traceback__) if is_user_code(x.filename)]
    if not frames:
        return ""
    return f"At {frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`. "


def _dropout_advice(message: str) -> str:
    """What to do about a module that wants `deterministic=` or keys for its dropout, or ""."""
    if "no `rngs`" in message:
        return "Build its dropout with rngs=nnx.Rngs(0), whose masks torch reuses."
    if "deterministic" not in message:
        return ""
    return "Pass flax_call=lambda m, x: m(x, deterministic=True); False if it trains."


def _advice(
    side: str,
    dtype: str,
    message: str,
    is_plain: bool,
    wrong_dtype_buffers: Callable[[], Sequence[str]],
) -> str:
    """Returns what the user can do about an exception, derived from its message."""
    is_jax = side not in ("torch", "Flax")
    if is_jax and "ifferentiat" in message:
        return "grads=False compares outputs only."
    call = "torch_call= and flax_call=" if is_jax else f"{side.lower()}_call="
    if "not implemented for" in message:
        return f"Torch has no such operation in {dtype} here: leave it out of dtypes."
    # Torch reports a dtype mismatch by naming both dtypes; one of them must be the run's.
    named = {NAMES[word] for word in re.findall("|".join(NAMES), message.lower())}
    if len(named) > 1 and dtype in named:
        constants = wrong_dtype_buffers()
        what = f"{', '.join(constants[:3])} of it" if constants else "its constants"
        advice = f"Make {what} follow the dtype of its input"
    else:
        advice = "Call it with these inputs by itself"
    return f"{advice}, or pass {call}." if is_plain else f"{advice}, or change {call}."
