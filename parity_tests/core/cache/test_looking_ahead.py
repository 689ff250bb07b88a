"""A layer whose mask shows later tokens refuses a cache, since they are not stored yet."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import CAUSAL, FULL, CrossAttention, GroupedQueryAttention, Window, families
from parity_tests.tables import each

SIZES = {"hidden_size": 24, "num_attention_heads": 4, "d_model": 24, "num_layers": 2}
ENCODERS = {
    "vit": {},
    "bert": {},
    "clip_vision_model": {},
    "modernbert": {},
    "bart": {"part": "encoder"},
    "whisper": {"part": "encoder"},
}
X = np.ones((2, 3, 24), np.float32)


def refused(make):
    """A layer with a mask that is known is refused while it is traced."""

    def call():
        layer = make()
        return layer(X, cache=layer.init_cache(2, 8))

    with pytest.raises(ValueError, match="shows a token those that come after it, as in an encod"):
        nnx.eval_shape(call)


@pytest.mark.nightly
@each("name", ENCODERS)
def test_an_encoder_refuses_a_cache(name):
    config = {"model_type": name, **SIZES, "encoder_attention_heads": 4}
    refused(lambda: families.attention(config, 1, **ENCODERS[name], rngs=nnx.Rngs(0)))


@each("mask", [FULL, Window(3, 1), FULL & Window(2, 2)])
def test_any_layer_whose_mask_shows_later_tokens_refuses_a_cache(mask):
    refused(lambda: GroupedQueryAttention(24, 4, 2, 6, mask=mask, rngs=nnx.Rngs(0)))
    refused(lambda: CrossAttention(24, 4, mask=mask, rngs=nnx.Rngs(0)))


@pytest.mark.nightly
@each("mask", [CAUSAL, Window(3, 0), CAUSAL & Window(2, 2), CAUSAL | Window(1, 0)])
def test_layers_with_causal_masks_take_a_cache(mask):
    layer = GroupedQueryAttention(24, 4, 2, 6, mask=mask, rngs=nnx.Rngs(0))
    layer(X, cache=layer.init_cache(2, 8))


@pytest.mark.nightly
def test_the_mask_of_the_call_replaces_that_of_the_layer():
    layer = GroupedQueryAttention(24, 4, 2, 6, mask=FULL, rngs=nnx.Rngs(0))
    y, _ = layer(X, cache=layer.init_cache(2, 8), mask=CAUSAL)
    assert bool(jnp.array_equal(y, layer(X, mask=CAUSAL)))
