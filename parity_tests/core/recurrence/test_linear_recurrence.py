"""The linear recurrence: what the backward pass keeps, batch axes, dtypes and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.parity import judge
from flax_attn.recurrence import linear_recurrence

B, N, H, h = 2, 3, 5, 4


def drawn(T):
    """q, k, v, log decay and beta."""
    draw = np.random.RandomState(0)
    q, k, v = (draw.standard_normal((B, T, N, width)) for width in (H, H, h))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    return q, k, v, -draw.gamma(0.5, 2.0, (B, T, N)), draw.rand(B, T, N)


def kept(x, **more):
    """Shapes and dtypes of what the backward pass keeps."""
    _, pull = jax.vjp(lambda q, k, v, g: linear_recurrence(q, k, v, log_decay=g, **more), *x)
    return sorted((a.shape, str(a.dtype)) for a in jax.tree.leaves(pull))


@pytest.mark.nightly
@pytest.mark.parametrize("delta", [False, True])
def test_the_backward_pass_keeps_its_inputs_and_the_states_at_borders_alone(delta):
    q = jnp.ones((2, 48, 3, 5), jnp.bfloat16)
    v, g = jnp.ones((2, 48, 3, 4), jnp.bfloat16), jnp.zeros((2, 48, 3))
    shapes = [(q.shape, "bfloat16")] * 2 + [(v.shape, "bfloat16"), ((*g.shape, 1), "float32")]
    shapes += [((2, 48, 3, 1), "bfloat16")] if delta else []  # beta
    borders = ((3, 2, 3, 5, 4), "float32")
    assert kept((q, q, v, g), delta=delta, chunk=16) == sorted([*shapes, borders])
    assert kept((q, q, v, g), delta=delta, chunk=8)[-1] != borders


@pytest.mark.nightly
def test_any_batch_axes_and_vmap_give_the_same_output():
    @jax.jit
    def call(q, k, v, g, b):
        return linear_recurrence(q, k, v, log_decay=g, beta=b, delta=True, chunk=8)

    with jax.enable_x64(True):
        x = [jnp.asarray(a) for a in drawn(9)]
        want, state = call(*x)
        alone, _ = call(*(a[0] for a in x))
        more, _ = call(*(a[:, None] for a in x))
        mapped, states = jax.vmap(call)(*x)
    assert more.shape == (B, 1, 9, N, h)
    for found, right in (
        (alone, want[0]),
        (more[:, 0], want),
        (mapped, want),
        (states, state),
    ):
        assert judge.same_function(found, right).ok


@pytest.mark.nightly
def test_the_step_form_has_forward_mode_derivatives():
    q, k, v = (jnp.asarray(a, jnp.float32) for a in drawn(5)[:3])
    _, tangent = jax.jvp(lambda v: linear_recurrence(q, k, v, delta=True, chunk=None), (v,), (v,))
    assert jnp.isfinite(tangent[0]).all()


@pytest.mark.nightly
def test_outputs_have_the_dtype_of_v_and_states_are_float32_or_wider():
    for dtype in (jnp.bfloat16, jnp.float32):
        x = jnp.ones((5, 3, 4), dtype)
        o, state = linear_recurrence(x, x, x)
        assert (o.dtype, state.dtype) == (dtype, jnp.float32)
    with jax.enable_x64(True):
        x = jnp.ones((5, 3, 4), jnp.float64)
        assert {a.dtype for a in linear_recurrence(x, x, x)} == {x.dtype}


X = jnp.ones((2, 5, 3, 4))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"v": X[:, 1:]}, "q and k must have one shape"),
        ({"log_decay": X[..., :2]}, "log_decay must be"),
        ({"beta": X}, r"beta must be \*B T N = \(2, 5, 3\)"),
        ({"state": X}, r"state must be \*B N H h = \(2, 3, 4, 4\)"),
        ({"segments": X[..., 0, 0]}, "segments must hold integers"),
        ({"segments": jnp.zeros(4, int)}, r"segments must broadcast to \*B T = \(2, 5\)"),
        ({"valid": jnp.zeros(5)}, "valid must be boolean"),
        ({"valid": jnp.zeros((3, 5), bool)}, r"valid must broadcast to \*B T = \(2, 5\)"),
        ({"chunk": 0}, "chunk must be a whole number of at least 1"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(given, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        linear_recurrence(**{"q": X, "k": X, "v": X, **given})
