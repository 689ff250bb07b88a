"""Unsupported fields of recurrent and hybrid models are refused in one sentence."""

import pytest
from flax import nnx

from flax_attn import families


def other(name, **fields):
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    return {"model_type": name, **sizes, **fields}


WRONG = {
    "a layer without attention": (
        other("nemotron_h", layers_block_type=["mlp", "mamba"]),
        "Layer 0 of this nemotron_h has 'mlp' alone in place of self attention",
    ),
    "letters of layers": (
        other("nemotron_h", hybrid_override_pattern="M-X"),
        r"hybrid_override_pattern must be made of M, ., E, -; got 'M-X'",
    ),
    "a kind of layer of Nemotron": (
        other("nemotron_h", layers_block_type=["conv"]),
        "layers_block_type may have linear_attention, full_attention, moe, mlp; got 'conv'",
    ),
    "heads of a state space": (
        other("mamba2", num_attention_heads=None),
        r"num_heads . head_dim must be expand . hidden_size = 96; got 128 . 64",
    ),
    "limits of steps": (
        other("mamba2", expand=2, num_heads=8, head_dim=12, time_step_limit=[0.5]),
        r"time_step_limit must be two numbers, the lesser one first; got \[0.5\]",
    ),
    "groups of a state space": (
        other("mamba2", num_heads=12, head_dim=8),
        "n_groups must divide num_heads; got",
    ),
    "layers that the delta rule lacks": (
        other("kimi_linear", linear_attn_config={"kda_layers": [2], "full_attn_layers": [3]}),
        "kda_layers and full_attn_layers of linear_attn_config lack layer 1 of 27, counted from 1",
    ),
    "places of attention": (
        other("bamba", attn_layer_indices="all"),
        "attn_layer_indices must be a list; got 'all'",
    ),
    "kinds of blocks": (
        other("recurrent_gemma", block_types=[]),
        r"block_types must list kinds of layers; got \[\]",
    ),
    "a scaled rotary of Griffin": (
        other(
            "recurrent_gemma",
            block_types=["attention"],
            rope_scaling={"rope_type": "linear", "factor": 2.0},
        ),
        "rope_type must be 'default' in this model_type",
    ),
    "an offset": (
        other("jamba", attn_layer_period=2),
        "attn_layer_offset must be from 0 to attn_layer_period - 1 = 1; got 4",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_unsupported_options_of_hybrids_are_refused(name):
    given, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        families.attention(given, 0, rngs=nnx.Rngs(0))
