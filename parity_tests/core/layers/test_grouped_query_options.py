"""GroupedQueryAttention: masks and scores with arrays, valid tokens, sinks, and `nnx.tabulate`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import (
    CAUSAL,
    Alibi,
    GroupedQueryAttention,
    Lengths,
    Prefix,
    Rotary,
    Rules,
    Softcap,
    Window,
    alibi_slopes,
)
from flax_attn.parity import judge
from parity_tests.core.backends.refusal import refused

X = np.random.RandomState(0).standard_normal((2, 7, 11)).astype(np.float32)
VALID = np.asarray([[True] * 7, [True] * 5 + [False] * 2])


def build(**given):
    return GroupedQueryAttention(11, 6, 3, 4, **{"rngs": nnx.Rngs(0), **given})


@nnx.jit
def run(layer, x, **given):
    return layer(x, **given)


def same(got, want):
    return judge.exact(np.asarray(got), np.asarray(want)).ok


@pytest.mark.nightly
def test_layers_hold_masks_and_scores_with_arrays():
    mask, score = CAUSAL & Lengths(jnp.asarray([7, 5])), Alibi(alibi_slopes(6))
    layer, plain = build(mask=mask, rules=Rules(score=score)), build()
    graph, state = nnx.split(layer)
    merged = nnx.merge(graph, state)
    assert merged.mask == mask and same(run(merged, X), run(layer, X))
    assert same(run(layer, X, mask=CAUSAL), run(build(rules=Rules(score=score)), X))
    assert not same(run(layer, X, mask=CAUSAL), run(plain, X))
    assert nnx.to_flat_state(nnx.state(layer, nnx.Param)).paths == (
        *((name, "kernel") for name in ("k_proj", "o_proj", "q_proj", "v_proj")),
    )


def test_valid_and_empty_of_a_call_are_checked():
    layer = nnx.eval_shape(build)
    with refused(TypeError, "valid must be boolean", "got int32"):
        layer(X, valid=VALID.astype(np.int32))
    with refused(ValueError, "valid must broadcast to *B T = (2, 7); got shape (3, 7)."):
        layer(X, valid=np.ones((3, 7), bool))
    with refused(ValueError, "empty must be one of 'zero', 'mean'; got 'nan'."):
        layer(X, empty="nan")


@pytest.mark.nightly
def test_padding_with_nan_changes_no_output_and_no_gradient():
    """Outputs and gradients equal those of the rows alone, with NaN in the padding."""
    layer = build(rotary=Rotary(), sinks=True, qkv_bias=True, out_bias=True, mask=Window(9, 9))
    layer.sinks[...] = jnp.linspace(-1.0, 1.0, 6)
    padded = np.where(VALID[..., None], X, np.nan)

    @nnx.jit
    def padded_loss(layer, x):
        y = layer(x, valid=VALID)
        return (y**2).sum(), y

    @nnx.jit
    def loss_alone(layer, whole, short):
        one, two = layer(whole), layer(short)
        return (one**2).sum() + (two**2).sum(), (one, two)

    (_, y), got = nnx.value_and_grad(padded_loss, has_aux=True)(layer, padded)
    alone = nnx.value_and_grad(loss_alone, has_aux=True)
    (_, (one, two)), want = alone(layer, X[0], X[1, :5])
    assert not np.any(y[1, 5:]) and judge.allclose(y[0], one) and judge.allclose(y[1, :5], two)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert judge.allclose(a, b) and np.any(b)


def test_sinks_start_at_zero_in_the_dtype_of_the_parameters():
    layer = nnx.jit(lambda: build(sinks=True, param_dtype=jnp.bfloat16))()
    assert isinstance(layer.sinks, nnx.Param) and layer.sinks.dtype == jnp.bfloat16
    assert layer.sinks.shape == (6,) and not np.any(layer.sinks[...])


@pytest.mark.nightly
def test_tabulate_shows_the_mask_of_a_layer():
    layer = build(rotary=Rotary(), sinks=True, rules=Rules(score=Softcap(3.0)))
    table = nnx.tabulate(layer, jnp.ones((2, 5, 11)), mask=CAUSAL & Window(3, 0) | Prefix(2))
    assert "q_proj" in table and "Prefix" in table
