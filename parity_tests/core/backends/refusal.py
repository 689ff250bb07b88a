"""A refusal worth the name: of the right kind, with all its words, and before any arithmetic."""

import contextlib
from collections.abc import Iterator

import jax
import pytest

from flax_attn import taps


@contextlib.contextmanager
def told(kind: type[Exception], *words: str) -> Iterator[None]:
    """An error of this kind that says all these words."""
    with pytest.raises(kind) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """The same, before any dot product and any tap of what was computed."""

    def never(*args, **kwargs):
        raise AssertionError("arithmetic came before the check")

    def hear(name, value):
        if name not in ("query", "key", "value"):
            never()

    with pytest.MonkeyPatch.context() as patch, jax.disable_jit(), taps.listen(hear):
        patch.setattr(jax.lax.dot_general_p, "bind", never)
        with told(kind, *words):
            yield
