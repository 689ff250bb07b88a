"""The elementwise recurrence: what its backward pass keeps, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.recurrence import elementwise_recurrence


@pytest.mark.nightly
def test_the_backward_pass_keeps_outputs_decays_and_the_first_state():
    x = jnp.zeros((2, 64, 3))
    _, pull = jax.vjp(jax.jit(elementwise_recurrence), x, x)
    assert sorted(a.shape for a in jax.tree.leaves(pull)) == [(2, 3), x.shape, x.shape]


def test_bad_input_is_refused_in_a_sentence():
    x = np.ones((2, 5, 3))
    with pytest.raises(ValueError, match="x and log_decay must have one shape"):
        elementwise_recurrence(x, x[:, 1:])
    with pytest.raises(ValueError, match=r"state must be \*B D = \(2, 3\)"):
        elementwise_recurrence(x, x, state=x)
