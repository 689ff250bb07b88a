"""The short convolution: what its backward pass keeps, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.recurrence import causal_convolution


def test_the_backward_pass_keeps_one_copy_of_the_tokens():
    x, weight = jnp.ones((2, 50, 3)), jnp.ones((3, 4))
    _, pull = jax.vjp(jax.jit(causal_convolution), x, weight)
    floats = [a.shape for a in jax.tree.leaves(pull) if a.size >= x.size]
    assert floats == [(2, 53, 3)]


def test_bad_input_is_refused_in_a_sentence():
    x = np.ones((2, 5, 3))
    with pytest.raises(ValueError, match="weight must be D W with D=3"):
        causal_convolution(x, np.ones((4, 3)))
    with pytest.raises(ValueError, match="bias must be"):
        causal_convolution(x, np.ones((3, 4)), np.ones(4))
    with pytest.raises(ValueError, match="state must hold W - 1 tokens"):
        causal_convolution(x, np.ones((3, 4)), state=np.ones((2, 4, 3)))
