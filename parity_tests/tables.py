"""Tables of tests: which rows run at each commit, and which run nightly."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import pytest

from flax_attn.parity import Case


def with_nightly(
    every: Iterable[Any], *, commit: int | Collection[Any] | Callable[[Any], Any]
) -> list[Any]:
    """All rows of a table, those marked `nightly` that do not run at each commit.

    Args:
      every: the rows; a tuple is one row of several arguments.
      commit: the rows that run at each commit, what is true of them, or a number n: the first of
        each n rows, where any will do.

    Raises:
      ValueError: if a row of `commit` is not in the table, or if none is.

    >>> [row.values for row in with_nightly(["a", "b"], commit=["b"]) if not row.marks]
    [('b',)]
    """
    every = list(every)
    if isinstance(commit, int):
        chosen = [i % commit == 0 for i in range(len(every))]
    elif callable(commit):
        chosen = [bool(commit(row)) for row in every]
    else:
        strange = [row for row in commit if row not in every]
        if strange:
            raise ValueError(f"commit= names rows that are not in the table: {strange}.")
        chosen = [row in commit for row in every]
    if not any(chosen):
        raise ValueError(f"None of {len(every)} rows runs at each commit; mark the test nightly.")
    return [
        pytest.param(*_values(row), marks=() if now else pytest.mark.nightly)
        for row, now in zip(every, chosen, strict=True)
    ]


def eagerly(function: Callable) -> Callable:
    """The function as it is, in the place of `jax.jit`."""
    return function


def each(argument: str, values: Iterable[Any]) -> Callable[[Callable], Callable]:
    """A test of many values as one item, which names all values that fail.

    Args:
      argument: the argument that gets them, or several, as in "package, name".
      values: a tuple for each row where there are several arguments.

    Raises:
      ValueError: if there is no value, since such a test would prove nothing.

    >>> @each("n", [1, 2, 3])
    ... def small(n):
    ...     assert n < 2, "too large"
    >>> try:
    ...     small()
    ... except AssertionError as error:
    ...     print(error)
    2 of 3 fail:
    n = 2: AssertionError: too large
    n = 3: AssertionError: too large
    """
    values = list(values)
    if not values:
        raise ValueError(f"There is no {argument} to try.")

    def decorated(test: Callable) -> Callable:
        def test_each() -> None:
            faults = [said for value in values if (said := _fault(test, argument, value))]
            if faults:
                text = "\n".join(faults)
                raise AssertionError(f"{len(faults)} of {len(values)} fail:\n{text}")

        # No functools.wraps, by which pytest would see the argument and ask for a fixture.
        test_each.__name__, test_each.__doc__ = test.__name__, test.__doc__
        test_each.__module__ = test.__module__
        return test_each

    return decorated


def case_of(item: pytest.Item) -> Case | None:
    """The case of a test that proves one."""
    spec = getattr(item, "callspec", None)
    case = None if spec is None else spec.params.get("case")
    return case if isinstance(case, Case) else None


def _values(row: Any) -> tuple[Any, ...]:
    return row if isinstance(row, tuple) else (row,)


def _fault(test: Callable, argument: str, value: Any) -> str:
    """What is wrong with one value; nothing if its test passes."""
    names = argument.split(", ")
    row = _values(value) if len(names) > 1 else (value,)
    try:
        test(**dict(zip(names, row, strict=True)))
    except (Exception, pytest.fail.Exception) as error:
        return f"{argument} = {value}: {type(error).__name__}: {error}"
    return ""


# The `mode` is put around what a test calls: one program at a commit, single operations nightly.
of_both_modes = pytest.mark.parametrize(
    "mode", with_nightly([jax.jit, eagerly], commit=[jax.jit]), ids=["compiled", "eager"]
)
