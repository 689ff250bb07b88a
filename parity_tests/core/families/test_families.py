"""Each family against its attention in transformers, and what a config may not say."""

import jax
import numpy as np
import pytest
from flax import nnx

from flax_attn import families
from flax_attn.families._choose import FAMILIES
from flax_attn.parity import assert_parity

from . import witness
from .configs import BOTH, CONFIGS, NAMES, titled

X = np.random.RandomState(0).standard_normal((2, 7, 48))


def built(given, index=0, **house):
    return families.attention(given, index, rngs=nnx.Rngs(0), **house)


@pytest.mark.parametrize(("small", "spelling"), BOTH, ids=titled)
def test_outputs_and_gradients_are_transformers(small, spelling):
    name, index, given = small.name, small.index, small.spelt(spelling)
    config = witness.config_of(given, name)
    given = config.to_dict() if spelling == "new" else given
    assert_parity(
        witness.attention(config, name, index),
        built(given, index),
        X[..., : given["hidden_size"]],
        rules=families.rules(given, index),
        torch_call=witness.call(config, name, index),
        dtypes=("float64",),
        eager=False,
        taps=False,
    )


@pytest.mark.parametrize("small", CONFIGS, ids=titled)
def test_both_spellings_are_one_layer(small):
    new, old = (described(built(small.spelt(x), small.index)) for x in ("new", "old"))
    assert new == old


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_the_class(name):
    whole = witness.found(name, "Config")().to_dict()
    for index in (0, 1, 3, whole["num_hidden_layers"] - 1):
        layers = [
            nnx.eval_shape(lambda given=given, index=index: built(given, index))
            for given in ({"model_type": name}, whole)
        ]
        assert described(layers[0]) == described(layers[1])


def described(layer):
    """All that a config decides: shapes, the rotary, the mask, the rules, norms and dropout."""
    params, _ = jax.tree.flatten_with_path(nnx.state(layer, nnx.Param))
    shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in params}
    norms = [
        {k: v for k, v in vars(norm).items() if isinstance(v, bool | int | float | str)}
        for norm in (layer.q_norm, layer.k_norm)
        if norm is not None
    ]
    dropout = layer.dropout and layer.dropout.rate
    return shapes, layer.rotary, layer.mask, layer.rules, layer.norm_after_rotary, norms, dropout


@pytest.mark.parametrize("name", NAMES)
def test_attention_dropout_is_the_layers(name):
    small = next(x for x in CONFIGS if x.name == name)
    given = {**small.spelt("new"), "attention_dropout": 0.125}
    assert built(given).dropout.rate == 0.125
    assert built({**given, "attention_dropout": 0.0}).dropout is None


def test_dropout_in_training_is_transformers():
    small = next(x for x in CONFIGS if "attention_dropout" in x.fields)
    config = witness.config_of(small.spelt("new"), small.name)
    layer, call = witness.attention(config, small.name, 0), witness.call(config, small.name, 0)
    x = X[..., : config.hidden_size]
    ours = built(config.to_dict())
    options = {"dtypes": ("float64",), "eager": False, "taps": False, "train": True}
    assert_parity(layer, ours, x, torch_call=call, **options)


def test_every_family_is_proven():
    assert {*NAMES} == {*FAMILIES} == {*witness.FOLDERS}


LLAMA = {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 6, "rope_theta": 500.0}
SCALED = {"rope_type": "linear", "factor": 2.0}
FULL = ["full_attention"] * 26
RAMP = {"rope_type": "yarn", "factor": 2.0, "truncate": False}


def llama(**fields):
    return {**LLAMA, **fields}


def other(name, **fields):
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    return {"model_type": name, **sizes, **fields}


WRONG = {
    "a typing error": (llama(model_type="llma"), "Did you mean 'llama'?"),
    "no model_type": ({"hidden_size": 8}, "model_type must be one of cohere, .*; got None"),
    "several parts": (llama(text_config={}), 'hand in config."text_config". itself'),
    "quantised": (llama(quantization_config={"bits": 4}), "has a quantization_config"),
    "no decoder": (llama(is_causal=False), "is_causal=False is not served"),
    "no count": (llama(hidden_size=None), "hidden_size must be a whole number .* got None"),
    "heads": (llama(num_attention_heads=7), "num_attention_heads must divide hidden_size; got"),
    "key heads": (llama(num_key_value_heads=4), "num_key_value_heads must divide num_attention_"),
    "odd heads": (llama(head_dim=5), "need an even head_dim; got head_dim=5"),
    "dropout": (llama(attention_dropout=2.0), "attention_dropout is the share"),
    "no dropout": (llama(attention_dropout=None), "attention_dropout is the share .* got None"),
    "a bias": (llama(attention_bias="yes"), "attention_bias must be one of True, False, None"),
    "a base": (llama(rope_theta=-1.0), "rope_theta must be a number above zero; got -1.0"),
    "a kind": (llama(rope_scaling={"type": "su"}), "rope_type must be one of default, .*'su'"),
    "no factor": (llama(rope_scaling={"type": "linear"}), "rope_type='linear' needs factor"),
    "a field": (llama(rope_scaling={**SCALED, "mrope_section": [1]}), "rope_scaling has mrope_sec"),
    "two kinds": (llama(rope_scaling={**SCALED, "type": "yarn"}), "type='yarn' and rope_type='lin"),
    "two bases": (
        llama(rope_parameters={**SCALED, "rope_theta": 400.0}),
        "rope_theta=500.0 and rope_theta=400.0 in its rotary",
    ),
    "two spellings": (
        llama(rope_parameters=SCALED, rope_scaling={"type": "linear", "factor": 3.0}),
        "rope_parameters and rope_scaling, and they differ",
    ),
    "more in one spelling": (
        llama(rope_parameters={**SCALED, "attention_factor": 2.0}, rope_scaling=SCALED),
        "rope_parameters and rope_scaling, and they differ",
    ),
    "two lengths": (
        llama(
            original_max_position_embeddings=8,
            rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
        ),
        "original_max_position_embeddings=8 and, in its rotary parameters, 16",
    ),
    "a partial rotary": (llama(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not serv"),
    "a share": (other("phi3", partial_rotary_factor=1.5), "is a share, from 0 to 1; got 1.5"),
    "a window of nothing": (other("mistral", sliding_window=0), "sliding_window must be a whole"),
    "a window that is off": (
        other("qwen2", layer_types=["sliding_attention"] * 32),
        "needs use_sliding_window=True and a sliding_window; got sliding_window=4096",
    ),
    "layers too few": (other("gemma2", layer_types=["full_attention"]), "got 1 entries and"),
    "a kind of layer": (
        other("gpt_oss", num_hidden_layers=1, layer_types=["chunked_attention"]),
        r"layer_types.0. must be one of 'full_attention', 'sliding_attention'; got 'chunked",
    ),
    "both directions": (other("gemma2", use_bidirectional_attention=True), "use_bidirectional_att"),
    "rotaries by kind": (
        other("gemma3_text", rope_parameters=SCALED),
        "have a dict for each of full_attention, sliding_attention; got rope_type, factor",
    ),
    "a kind that is ignored": (
        other("gemma3_text", rope_scaling={"type": "linear", "factor": 2.0}, layer_types=FULL),
        "type='linear', which transformers ignores in Gemma 3; call it rope_type",
    ),
    "no truncation": (
        other("gemma3_text", rope_scaling=RAMP, layer_types=FULL),
        "truncate=False is not served: transformers ignores it in Gemma 3",
    ),
    "no dict": (llama(rope_scaling="linear"), "rope_scaling must be a dict .* got 'linear'"),
    "two patterns": (
        other("gemma3_text", sliding_window_pattern=2, layer_types=FULL),
        "layer_types and sliding_window_pattern=2 differ on layer 0",
    ),
    "no chunks": (other("llama4_text", attention_chunk_size=None), "attention_chunk_size must be"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_served_is_named(name):
    given, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        built(given)


def test_what_is_asked_for_is_checked():
    with pytest.raises(TypeError, match=r"config must be a dict, .* got str"):
        built("llama")
    with pytest.raises(ValueError, match="from 0 to 31, since num_hidden_layers=32; got 32"):
        built(LLAMA, 32)
    with pytest.raises(ValueError, match=r"part must be None for llama, .* got 'cross'"):
        built(LLAMA, part="cross")
    with pytest.raises(ValueError, match="source must be one of 'transformers'; got 'gguf'"):
        families.rules(LLAMA, 0, source="gguf")


def test_equal_spellings_may_stand_side_by_side():
    both = llama(rope_parameters={**SCALED, "rope_theta": 500.0}, rope_scaling=SCALED)
    assert described(built(both)) == described(built(llama(rope_scaling=SCALED)))
