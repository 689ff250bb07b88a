"""Rates and factors of the rotary that a config describes, number by number as transformers has."""

import warnings

import numpy as np
import pytest

from flax_attn._internal.caller import warn_once
from flax_attn.families._config import Config
from flax_attn.families._published import facts_of
from flax_attn.families._rope import parameters, rotary_of
from flax_attn.parity import judge
from parity_tests.tables import with_nightly

HEADS = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
LENGTH = "original_max_position_embeddings"


def drawn(seed: int) -> dict:
    """Rotary parameters as files have them: what is None, 0, missing, alone or twice included."""
    random = np.random.default_rng(seed)

    def some(**fields):
        """Each of these, or None, or not at all."""
        kept = {k: v for k, v in fields.items() if random.random() < 0.6}
        return {k: None if random.random() < 0.15 else v for k, v in kept.items()}

    base = float(random.choice([500.0, 1e4, 1e6]))
    factor = float(random.choice([1.0, 2.0, 8.0, 40.0]))
    rope = {"rope_theta": base, "factor": factor}
    match random.choice(["yarn", "yarn", "yarn", "llama3", "llama3", "linear"]):
        case "yarn":
            more = some(
                beta_fast=float(random.choice([4.0, 32.0])),
                beta_slow=1.0,
                mscale=float(random.choice([0.0, 0.7, 1.0])),
                mscale_all_dim=float(random.choice([0.0, 1.0, 1.3])),
                attention_factor=float(random.choice([0.5, 1.25])),
                attn_factor=0.88,
                truncate=bool(random.random() < 0.5),
            )
            more = {k: v for k, v in more.items() if k != "truncate" or v is not None}
            return {**rope, **more, "rope_type": "yarn", LENGTH: 64}
        case "llama3":
            low = float(random.choice([1.0, 2.0]))
            high = float(random.choice([low, low, 4.0]))
            ends = {"low_freq_factor": low, "high_freq_factor": high}
            return {**rope, **ends, "rope_type": "llama3", LENGTH: int(random.choice([64, 100]))}
        case kind:
            return {**rope, "rope_type": str(kind)}


def ours(rope: dict) -> tuple[np.ndarray, float]:
    config = Config({"model_type": "llama", **HEADS}, facts_of("llama").defaults)
    rotary = rotary_of(config, parameters(config, rope, None))
    assert rotary.scaling is not None
    return np.asarray(rotary.scaling.rates(rotary.base, 16, None)), rotary.scaling.magnitude


@pytest.mark.parametrize("seed", with_nightly(range(200), commit=40))
def test_they_are_those_of_transformers(seed, transformers):
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = drawn(seed)
    config = transformers.LlamaConfig(**HEADS, rope_parameters=dict(rope))
    rates, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine, magnitude = ours(rope)
    assert judge.same_precision(mine, rates.numpy(), mine, "float32").ok, rope
    assert judge.error(np.asarray([magnitude]), np.asarray([factor])) < judge.SAME_FUNCTION, rope


def test_what_transformers_does_not_read_is_told():
    warn_once.cache_clear()
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, LENGTH: 64, "attn_factor": 0.87}
    with pytest.warns(UserWarning, match="attn_factor=0.87, which transformers does not read"):
        ours(rope)
