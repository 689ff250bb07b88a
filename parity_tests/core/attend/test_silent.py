"""Arrays whose shapes suggest a mistake warn once; correct ones never warn."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_attn as fa
from flax_attn._internal.caller import warn_once

LENGTHS = np.array([5, 3, 5, 2, 4])
PADDING = np.arange(5) < LENGTHS[:, None]  # B T, of as many rows as tokens
X = jnp.ones((5, 5, 12))
KINDS = {
    "grouped": lambda: fa.GroupedQueryAttention(12, 3, 3, 4, rngs=nnx.Rngs(0)),
    "torch's": lambda: fa.TransformerMultiHeadAttention(12, 3, rngs=nnx.Rngs(0)),
    "cross": lambda: fa.CrossAttention(12, 3, rngs=nnx.Rngs(0)),
    "entmax": lambda: fa.EntmaxAttention(12, 3, 3, 4, rngs=nnx.Rngs(0)),
    "talking": lambda: fa.TalkingHeadsAttention(12, 3, rngs=nnx.Rngs(0)),
}


@pytest.fixture(autouse=True)
def forgotten():
    """Warnings of earlier tests may come again."""
    warn_once.cache_clear()


def warned(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [(str(x.message), x.filename) for x in caught]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_that_may_be_padding_warns(kind):
    layer = KINDS[kind]()
    ((message, filename),) = warned(lambda: layer(X, mask=jnp.asarray(PADDING)))
    assert "of shape (5, 5) is read as (queries, keys)" in message and filename == __file__
    assert warned(lambda: layer(X, mask=jnp.asarray(PADDING))) == []  # once


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "mask",
    [fa.Dense(PADDING), np.tri(5) > 0, PADDING[:, None, None], fa.Lengths(LENGTHS), fa.CAUSAL],
    ids=["dense", "tril", "four axes", "lengths", "causal"],
)
def test_other_masks_do_not_warn(kind, mask):
    layer = KINDS[kind]()
    mask = jnp.asarray(mask) if isinstance(mask, np.ndarray) else mask
    assert warned(lambda: layer(X, mask=mask)) == []
    assert warned(lambda: layer(X[:4], mask=jnp.asarray(PADDING))) == []  # four rows


def test_traced_masks_warn_too():
    layer = KINDS["grouped"]()
    call = jax.jit(lambda mask: layer(X, mask=mask))
    assert len(warned(lambda: call(jnp.asarray(PADDING)))) == 1


def heads_first(tokens, heads, width=8):
    return np.ones((2, heads, tokens, width), np.float32)


@pytest.mark.nightly(but=["64-8"])
@pytest.mark.parametrize(("tokens", "heads"), [(64, 8), (32, 8), (512, 12), (4, 1)])
def test_heads_before_tokens_warns_where_shapes_show_it(tokens, heads):
    q = jnp.asarray(heads_first(tokens, heads))
    messages = warned(lambda: fa.attend(q, q, q))
    assert len(messages) == (1 < heads <= 64 and tokens >= 4 * heads)
    assert all("swap the axes" in text and name == __file__ for text, name in messages)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(2, 64, 8, 16), (2, 1, 32, 16), (9, 12, 4), (1, 8, 31, 4)])
def test_tokens_before_heads_do_not_warn(shape):
    q = jnp.ones(shape)
    assert warned(lambda: fa.attend(q, q, q)) == []


@pytest.mark.nightly
def test_cached_steps_and_layers_do_not_warn():
    q, kv = jnp.ones((2, 3, 32, 4)), jnp.ones((2, 50, 8, 4))
    assert warned(lambda: fa.attend(q, kv, kv)) == []
    layer = fa.GroupedQueryAttention(12, 32, 8, 4, rngs=nnx.Rngs(0))
    assert warned(lambda: layer(jnp.ones((2, 3, 12)))) == []
    assert warned(lambda: jax.jit(layer)(jnp.ones((2, 3, 12)))) == []
