"""Both forms of LatentAttention are one function, and what it may not be given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import CAUSAL, Dropout, LatentAttention, Rotary, Rules, Window
from flax_attn.layers import _self_attention
from flax_attn.parity import judge
from parity_tests.core.backends.refusal import refused
from parity_tests.core.drawing import float64 as float64

X = np.random.RandomState(0).standard_normal((2, 7, 11))
VALID = np.asarray([[True] * 7, [True] * 5 + [False] * 2])
SIZES = {
    **{"in_features": 11, "num_heads": 3, "kv_rank": 8, "q_rank": 10},
    **{"nope_dim": 6, "rotary_dim": 4, "value_dim": 5},
}


def build(**given):
    return LatentAttention(**{**SIZES, "rngs": nnx.Rngs(0), **given})


@nnx.jit
def gradients(layer, x, valid):
    def loss(layer, x):
        y = layer(x, valid=valid)
        return (y**2).sum(), y

    return nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)


@pytest.mark.nightly
def test_absorbed_is_expanded_in_values_and_gradients(float64):
    both = [
        build(rotary=Rotary(), mask=Window(3, 1), absorbed=x, param_dtype=jnp.float64)
        for x in (False, True)
    ]
    found = [jax.tree.leaves(gradients(layer, X, VALID)) for layer in both]
    assert len(found[0]) == 10  # a loss, an output, the gradients of seven weights and of x
    for got, want in zip(*found, strict=True):
        assert judge.same_function(got, want).ok and np.any(want)


@pytest.mark.parametrize("absorbed", [False, True])
def test_the_absorbed_form_has_one_key_a_token(absorbed, monkeypatch):
    shapes = []

    def spy(request, *how):
        arrays = request.q, request.k, request.v
        shapes.append((*(x.shape for x in arrays), request.rules.scale))
        return dispatch(request, *how)

    dispatch = _self_attention.dispatch
    monkeypatch.setattr(_self_attention, "dispatch", spy)
    nnx.eval_shape(lambda: build(absorbed=absorbed)(X.astype(np.float32)))
    expanded = ((2, 7, 3, 10), (2, 7, 3, 10), (2, 7, 3, 5), 10**-0.5)
    one_key = ((2, 7, 3, 12), (2, 7, 1, 12), (2, 7, 1, 8), 10**-0.5)
    assert shapes == [one_key if absorbed else expanded]


@pytest.mark.nightly
@pytest.mark.parametrize("absorbed", [False, True])
def test_padding_may_hold_nan(absorbed):
    layer = build(rotary=Rotary(), absorbed=absorbed)
    padded = jnp.asarray(np.where(VALID[..., None], X, np.nan), jnp.float32)
    (_, y), grads = gradients(layer, padded, VALID)
    alone = nnx.jit(lambda layer, x: layer(x))(layer, padded[1, :5])
    assert judge.allclose(np.asarray(y)[1, :5], alone) and not np.any(np.asarray(y)[1, 5:])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


@pytest.mark.nightly
def test_what_would_be_ignored_is_refused():
    layer = build()
    with refused(ValueError, "kv_rank must be a whole number of at least 1; got 0."):
        build(kv_rank=0)
    with refused(ValueError, "q_rank must be a whole number of at least 1; got 0."):
        build(q_rank=0)
    with refused(ValueError, "Rules with dropout"):
        build(rules=Rules(dropout=Dropout(0.5, jax.random.key(0))))
    with refused(ValueError, "empty must be one of 'zero', 'mean'; got 'nan'."):
        layer(X.astype(np.float32), empty="nan")
    without = nnx.eval_shape(lambda: build(q_rank=None))
    assert layer.mask == CAUSAL and not hasattr(without, "q_a_proj")
