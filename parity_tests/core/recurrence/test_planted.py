"""Faults planted in the recurrences and their layers: the comparisons of this room find each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.layers import gated_delta
from flax_attn.recurrence import chunks, convolution, linear
from parity_tests import test_gated_delta
from parity_tests.core.recurrence import test_causal_convolution as short
from parity_tests.core.recurrence import test_linear_recurrence as law
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

T = 37
IDS = np.broadcast_to(law.ids_of(5, 1, 20, 11), (law.B, T))


def compile_anew():
    """Forgets all programs, which hold a fault or the lack of one."""
    jax.clear_caches()
    law.compiled.cache_clear()


@pytest.fixture(autouse=True)
def _of_this_test_alone():
    compile_anew()
    yield
    compile_anew()


def compared(delta=True, ids=IDS, strong=False):
    """The recurrence in chunks of 16, by the comparison with numpy."""
    x = law.drawn(T, "head", delta)
    if strong:
        some = np.random.RandomState(1).rand(*x[3].shape)
        x = (*x[:3], np.where(some < 0.5, -800.0, x[3]), *x[4:])
    law.agree(law.got("head", delta, 16, x, ids), law.wanted(delta, x, ids))


def leaking(first, there=None):
    """No token begins a document, so that the state is never emptied."""
    return jnp.zeros(first.shape, bool)


def of_running_products(k, g):
    """The decay from j to i as a quotient of running products, where log decays are not summed."""
    total = jnp.cumprod(jnp.exp(g), axis=-2)
    decay = jnp.tril(total / total.mT)
    return lambda a: (a @ k.mT) * decay


def with_its_own(n):
    """Decays until the border that count the token's own, which its write does not undergo."""
    return np.tri(n).T


def held(tokens, state, chunk, by_chunks=chunks.by_chunks):
    """The first state without its gradient."""
    return by_chunks(tokens, jax.lax.stop_gradient(state), chunk)


@pytest.mark.parametrize("delta", with_nightly([True, False], commit=[True]))
@pytest.mark.parametrize(
    ("module", "name", "fault", "given"),
    [
        (linear, "begins", leaking, {}),
        (chunks, "_pairs", of_running_products, {"strong": True}),
        (chunks, "_ones_after", with_its_own, {"ids": None}),
        (linear, "by_chunks", held, {}),
    ],
    ids=["state leaks", "decay outside logarithms", "decay off by one", "state's gradient dropped"],
)
def test_a_fault_of_the_recurrence_is_found(monkeypatch, module, name, fault, given, delta):
    compared(delta, **given)
    monkeypatch.setattr(module, name, fault)
    compile_anew()
    with pytest.raises(AssertionError):
        compared(delta, **given)


def test_only_the_gradient_of_the_first_state_misses_where_it_is_dropped(monkeypatch):
    monkeypatch.setattr(linear, "by_chunks", held)
    x = law.drawn(T, "head", True)
    found, want = law.got("head", True, 16, x), law.wanted(True, x)
    with pytest.raises(AssertionError, match="dstate"):
        law.agree(found, want)


def test_a_state_of_the_convolution_that_is_one_token_short_is_found(monkeypatch):
    whole = convolution._last

    def one_short(*given):
        return whole(*given).at[..., 0, :].set(0)

    short.test_pieces_with_the_state_passed_on_are_the_whole()
    monkeypatch.setattr(convolution, "_last", one_short)
    compile_anew()
    with pytest.raises(AssertionError):
        short.test_pieces_with_the_state_passed_on_are_the_whole()


def test_an_eps_outside_the_root_of_the_l2_norm_is_found(monkeypatch):
    def outside(x, *, eps):
        return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + eps)

    monkeypatch.setattr(gated_delta, "l2_norm", outside)
    assert not test_gated_delta.CASES[2].report(eager=False).ok
