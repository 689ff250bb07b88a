"""Caches against those of transformers: both sides step by step, by the same five cuts.

Each step is held against transformers' own, and against the full forward pass. Whatever a class
computes in float32 is lifted to float64, so that its eager attention is a witness too.
"""

import numpy as np
import pytest

from parity_tests.tables import with_nightly

pytest.importorskip("transformers", reason="its caches are the witness")

from flax import nnx

from flax_attn import families
from flax_attn.parity import Decode, assert_parity
from parity_tests.families import parts, steps, witness
from parity_tests.families.configs import CONFIGS, Small
from parity_tests.families.parts import Part

pytestmark = pytest.mark.nightly

T = 31


def small(name, index, **fields):
    """The first config of a family in which a layer is looked at, with other fields."""
    of = next(x for x in CONFIGS if x.name == name and x.index == index)
    return Small(name, {**of.fields, **fields}, of.rope, index, of.local)


WINDOW = {"sliding_window": 4}
FAMILIES = [
    small("llama", 0),
    small("mistral", 0, **WINDOW),
    small("qwen3", 0),
    small("gemma2", 0, **WINDOW),
    small("gemma2", 1),
    small("gpt_oss", 0, **WINDOW),
    small("deepseek_v3", 0),
    small("diffllama", 0),
    small("deepseek_v32", 0),
    small("glm_moe_dsa", 0),
]
PARTS = [
    Part("t5", "decoder"),
    Part("t5", "cross", index=2),
    Part("whisper", "decoder", {"max_target_positions": T}, index=2),
    Part("whisper", "cross", {"max_target_positions": T}, index=1),
]


def drawn(length, config):
    return np.random.RandomState(length).standard_normal((2, length, config.hidden_size))


def ring(layer, x, cache):
    """A cache of no more slots than the layer's window."""
    cache = layer.init_cache(len(x), T, window="mask") if cache is None else cache
    return layer(x, cache=cache)


def cache_memory(layer, x, memory, cache):
    """Keys and values of the memory, made once."""
    return layer(x, cache=layer.remember(memory) if cache is None else cache)


ONCE = {"dtypes": ("float64",), "eager": False, "grads": False, "taps": False}
SLIDING = [small for small in FAMILIES if "sliding_window" in small.fields and not small.index]
COMMIT = ("llama", "deepseek_v32")
BOTH = [(small, None) for small in FAMILIES] + [(small, ring) for small in SLIDING]


@pytest.mark.parametrize(
    ("small", "flax"),
    with_nightly(BOTH, commit=lambda x: x[0].name in COMMIT),
    ids=[f"{x.name}-{x.index}" + "-ring" * (y is ring) for x, y in BOTH],
)
def test_steps_equal_those_of_a_decoder(small, flax):
    config = witness.config_of(small.spelt("new"), small.name)
    given, index = config.to_dict(), small.index
    theirs = witness.attention(config, small.name, index)
    mine = families.attention(given, index, rngs=nnx.Rngs(0))
    assert_parity(
        theirs,
        mine,
        drawn(T, config),
        rules=families.rules(given, index),
        torch_call=witness.call(config, small.name, index),
        decode=Decode(flax=flax, torch=steps.step(config, small, T)),
        **ONCE,
    )


@pytest.mark.parametrize("small", PARTS, ids=lambda x: f"{x.name}-{x.part}")
def test_steps_equal_those_of_an_encoder_with_a_decoder(small):
    config = parts.config_of(small.given, small.name)
    given, index, crossed = config.to_dict(), small.index, small.part == "cross"
    theirs = parts.attention(parts.model_of(config, small.name), small)
    mine = families.attention(given, index, part=small.part, rngs=nnx.Rngs(0))
    flax = cache_memory if crossed else None
    assert_parity(
        theirs,
        mine,
        *(drawn(length, config) for length in ((T, 9) if crossed else (T,))),
        rules=families.rules(given, index, part=small.part),
        torch_call=parts.call(config, small),
        decode=Decode(flax=flax, torch=steps.step(config, small, T)),
        **ONCE,
    )
