"""Validation of the arguments of layers."""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar, Unpack, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .arguments import Signature, misfit

P = ParamSpec("P")
R = TypeVar("R")
BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def check_input(name: str, x: Any, width: int | None = None) -> jax.Array:
    """Converts x to an array, and checks that it is floating with axes (*batch, length, width).

    Raises:
      TypeError: if `x` is not floating.
      ValueError: if it has fewer than two axes, or another last axis than `width`.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{name} must be floating; got {x.dtype}. Embed tokens first, or cast them."
        )
    if x.ndim < 2 or (width is not None and x.shape[-1] != width):
        wanted = "width" if width is None else width
        raise ValueError(f"{name} must have shape (*batch, length, {wanted}); got {x.shape}.")
    return x


def check_image(name: str, x: Any, width: int) -> jax.Array:
    """Converts x to an array, and checks its axes (*batch, height, width, channels).

    Raises:
      TypeError: if `x` is not floating.
      ValueError: if it has fewer than three axes, or another last axis than `width`.
    """
    if jnp.ndim(x) == 2 or (jnp.ndim(x) > 2 and jnp.shape(x)[-1] != width):
        shape = f"(*batch, height, width, {width})"
        raise ValueError(f"{name} must have shape {shape}; got {jnp.shape(x)}.")
    return check_input(name, x, width)


def check_context(length: int, context_length: int) -> None:
    """Raises ValueError if a sequence is longer than the layer's context."""
    try:
        is_longer = length > context_length
    except jax.errors.InconclusiveDimensionOperation:  # a symbolic length of `jax.export`
        raise ValueError(
            f"The layer was built for at most context_length={context_length} tokens; got the open "
            f"length {length}: declare that it fits with "
            f'jax.export.symbolic_shape(..., constraints=["{length} <= {context_length}"]).'
        ) from None
    if is_longer:
        raise ValueError(
            f"The layer was built for at most context_length={context_length} tokens; got {length}."
        )


def check_divides(part: str, by: int, whole: str, of: int) -> int:
    """Returns `of // by`; raises ValueError unless `by` divides `of`."""
    if by < 1 or of < 1 or of % by:
        raise ValueError(f"{part} must divide {whole}; got {whole}={of}, {part}={by}.")
    return of // by


def check_positive(**counts: int) -> None:
    """Raises ValueError unless every count is an int of at least 1."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number of at least 1; got {count!r}.")


def check_rate(name: str, rate: Any) -> float:
    """Returns `rate`; raises ValueError unless it lies in [0, 1]."""
    if isinstance(rate, Tracer):
        raise ValueError(f"{name} must be known while jax traces: make it static; got {rate!r}.")
    rate = rate.item() if getattr(rate, "shape", None) == () else rate
    if isinstance(rate, bool) or not (isinstance(rate, int | float) and 0 <= rate <= 1):
        raise ValueError(f"{name} is the share dropped, from 0 to 1; got {rate!r}.")
    return rate


def check_takes(who: str, fn: Any, names: str) -> None:
    """Raises TypeError unless `fn` can be called with arguments of these names, "b, n, q, k"."""
    if not callable(fn):
        raise TypeError(f"{who} needs a function fn({names}); got {type(fn).__name__}.")
    try:
        takes = signature(fn)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        takes.bind(*names.split(", "))
    except TypeError:
        raise TypeError(
            f"{who} calls its function as fn({names}), with the indices of a batch entry, a head, "
            f"a query and a key; got one that takes {takes}."
        ) from None


@contextmanager
def traced_indices(who: str) -> Generator[None]:
    """Says what a function of indices must not do, where JAX would say it of a tracer."""
    try:
        yield
    except (jax.errors.TracerArrayConversionError, jax.errors.TracerBoolConversionError) as error:
        raise TypeError(
            f"{who}'s function gets traced indices: read arrays as jnp.asarray(array)[q], and "
            "write &, | and jnp.where in place of and, or and if."
        ) from error


def check_choice(name: str, value: Any, *choices: Any) -> None:
    """Raises ValueError unless `value` is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")


def valid_tokens(name: str, valid: Any, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts a padding mask, an array or `Lengths`, to `*B T`; None is that all are real.

    Raises:
      TypeError: if `valid` is not boolean.
      ValueError: if it does not broadcast to that shape.

    >>> valid_tokens("valid", None, (2, 3)).tolist()
    [[True, True, True], [True, True, True]]
    """
    if hasattr(valid, "real_tokens"):  # a mask
        valid = valid.real_tokens(shape)
    is_valid = jnp.asarray(True if valid is None else valid)
    if is_valid.dtype != jnp.bool_:
        hint = f"Ones and zeros become booleans by {name} == 1."
        if is_valid.ndim and is_valid.shape == shape[:-1]:
            hint = f"Numbers of real tokens are {name}=Lengths(numbers)."
        raise TypeError(
            f"{name} must be boolean, True for non-padding tokens; got {is_valid.dtype}. {hint}"
        )
    # A mask that is known stays so while a program is traced: its gaps decide what is compiled.
    with jax.ensure_compile_time_eval() if is_known(valid) else nullcontext():
        return per_token(name, is_valid, shape)


def is_known(x: Any) -> bool:
    """Whether an array's values are concrete and readable during tracing."""
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)


def per_token(name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts x to `*B T`; raises ValueError if it does not fit."""
    sizes = zip(x.shape[::-1], shape[::-1], strict=False)
    if x.ndim > len(shape) or any(n not in (1, of) for n, of in sizes):
        raise ValueError(f"{name} must broadcast to *B T = {shape}; got shape {x.shape}.")
    return jnp.broadcast_to(x.reshape((1,) * (len(shape) - x.ndim) + x.shape), shape)


def checked_arguments(
    function: Callable[P, R], look: Callable[..., None] | None = None
) -> Callable[P, R]:
    """Decorator: unknown, missing and superfluous arguments raise a TypeError that says what works.

    Methods are named after the class of their object, constructors after the class that is built.
    A `look` gets the arguments of calls with an array as mask.

    >>> @checked_arguments
    ... def f(x, *, mask=None): ...
    >>> f(1, attn_bias=2)
    Traceback (most recent call last):
    TypeError: f takes no attn_bias=; it takes x, mask.
    """
    method = function.__name__ in ("__init__", "__call__", "init_cache")

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        takes = signature_of(function)
        owner, rest = (args[0], args[1:]) if method else (None, args)
        if takes is not None:
            passed = {*takes.positional[: len(rest)], *kwargs}
            known = passed.issubset(takes.names) and len(rest) <= len(takes.positional)
            if not (known and passed.issuperset(takes.required)):
                built = signature_of(type(owner).__init__) if method else None
                raise TypeError(misfit(function.__name__, owner, takes, len(rest), kwargs, built))
        if look is not None and isinstance(kwargs.get("mask"), jax.Array | np.ndarray):
            look(*args, **kwargs)
        return function(*args, **kwargs)

    return checked


@cache
def signature_of(function: Callable[..., Any]) -> Signature | None:
    """What `function` takes; None if it takes any keyword or any number of arguments."""
    parts = list(signature(function).parameters.values())
    if parts and parts[0].name == "self":
        parts = parts[1:]
    more: tuple[str, ...] = ()
    if parts and get_origin(parts[-1].annotation) is Unpack:  # of a TypedDict
        more = tuple(get_args(parts.pop().annotation)[0].__annotations__)
    if any(part.kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL) for part in parts):
        return None
    return Signature(
        (*(part.name for part in parts), *more),
        tuple(part.name for part in parts if part.kind in BY_POSITION),
        tuple(part.name for part in parts if part.default is Parameter.empty),
    )
