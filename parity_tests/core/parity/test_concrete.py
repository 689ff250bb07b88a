"""Ports called on concrete arrays, state ported by name, and comparisons that prove nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, Rule, compare

torch = pytest.importorskip("torch", reason="originals are torch's")
X = np.random.RandomState(0).standard_normal((3, 7))
ONCE = {"dtypes": ("float64",)}


class Tanh(torch.nn.Module):
    def forward(self, x, unread=None):
        return torch.tanh(x)


def forked(x):
    """tanh where JAX traces it, and another function of arrays."""
    return jnp.tanh(x) if isinstance(x, jax.core.Tracer) else jnp.sin(x)


def narrow(x):
    """tanh, which rounds to float32 whatever it is given."""
    return jnp.tanh(x.astype(jnp.float32))


SIDES = {
    "a torch module": ((Tanh(), forked), {}),
    "without jit": ((Tanh(), forked), {"jit": False}),
    "two JAX functions": ((jnp.tanh, forked), {}),
    "without gradients": ((jnp.tanh, forked), {"grads": False, "jit": False}),
    "the first of two": ((forked, jnp.tanh), {}),
}


@pytest.mark.parametrize("name", SIDES)
def test_a_wrong_function_of_arrays_is_found(name):
    sides, how = SIDES[name]
    report = compare(*sides, X, **how, **ONCE)
    assert not report.ok and {row.name for row in report.failed} <= {"output"}, report


def test_a_rounded_function_of_arrays_is_equal():
    assert compare(jnp.tanh, narrow, X, **ONCE).ok


def test_a_comparison_that_proves_nothing_says_so():
    assert "both sides are one object" in str(compare(jnp.tanh, jnp.tanh, X, **ONCE))
    unread = compare(Tanh(), lambda x, y: jnp.tanh(x), X, X + 1, **ONCE)
    assert "neither side reads input 1" in str(unread) and unread.ok


class Codes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("code", torch.randn(4, 7))

    def forward(self, x):
        return x @ self.code.T


class Port(nnx.Module):
    def __init__(self, kind, name):
        self.name = name
        setattr(self, name, kind(jnp.zeros((4, 7))))

    def __call__(self, x):
        return x @ getattr(self, self.name)[...].T


@pytest.mark.parametrize("kind", [nnx.Variable, nnx.BatchStat])
def test_a_buffer_is_carried_to_a_variable_of_its_name_or_by_the_proposed_rule(kind):
    assert compare(Codes(), Port(kind, "code"), X, **ONCE).ok
    try:
        told = str(compare(Codes(), Port(kind, "book"), X, **ONCE))
    except ParityError as refused:
        told = str(refused)
    assert 'Rule("code -> book")' in told and "times torch's" not in told
    assert compare(Codes(), Port(kind, "book"), X, rules=[Rule("code -> book")], **ONCE).ok
