"""A quantization_config is refused, unless it is of float8 or leaves the attention alone."""

import pytest
from flax import nnx

from flax_attn import families
from parity_tests.core.backends.refusal import told
from parity_tests.families.configs import CONFIGS
from parity_tests.families.parts import PARTS
from parity_tests.tables import with_nightly

TEXT = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TEXT |= {"num_hidden_layers": 2}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def of(model_type="gpt_oss", index=0, **quantized):
    config = {**TEXT, "model_type": model_type, "quantization_config": quantized}
    if model_type == "phi3":
        del config["head_dim"]
    families.rules(config, index)
    return nnx.eval_shape(lambda: families.attention(config, index, rngs=nnx.Rngs(0)))


# As publishers write it: gpt-oss, compressed-tensors in full and by expression, bitsandbytes, ...
LEFT_ALONE = {
    "by stars": {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    "by an expression": {"ignore": ["lm_head", "re:.*self_attn.*"]},
    "one by one": {
        "ignore": [f"model.layers.{i}.self_attn.{x}" for i in (0, 1) for x in PROJECTIONS]
    },
    "by their ends": {"llm_int8_skip_modules": [*PROJECTIONS]},
    "of a whole model": {"modules_to_not_convert": ["language_model.model.layers"]},
    "all of the model": {"exclude_modules": ["model"]},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", LEFT_ALONE)
@pytest.mark.parametrize("index", [0, 1])
def test_a_config_that_quantizes_no_attention_is_built(name, index):
    assert of(index=index, **LEFT_ALONE[name])


def test_fused_projections_are_excluded_by_their_own_names():
    assert of("phi3", ignore=["qkv_proj", "o_proj"])
    with told(ValueError, "layers.0.self_attn.qkv_proj"):
        of("phi3", ignore=[*PROJECTIONS])


QUANTIZED = {
    "nothing is left out": {"quant_method": "gptq", "bits": 4},
    "others are": {"modules_to_not_convert": ["lm_head", "model.layers.*.mlp.router"]},
    "one projection is": {"ignore": ["re:.*q_proj"]},
    "another layer is": {"ignore": ["model.layers.1.self_attn"]},
    "no expression": {"ignore": ["re:(", "lm_head"]},
    "no list": {"modules_to_not_convert": None, "ignore": "lm_head"},
    "a name that begins alike": {"modules_to_not_convert": ["model.layers.0.self_attn.q"]},
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_config_that_quantizes_attention_is_refused_and_names_a_module(name):
    with told(ValueError, "has a quantization_config", "layers.0.self_attn", "Dequantise"):
        of(**QUANTIZED[name])


def compressed(name="float-quantized", group=(), **weights):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, **dict(group)}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}


DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
READ = {
    "DeepSeek-V3": DEEPSEEK
    | {"activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]},
    "Devstral 2": {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
    "by channel": compressed(),
    "by tensor": compressed(strategy="tensor", block_structure=None),
    "by block": compressed(strategy="block", block_structure=[128, 128]),
    "in its groups": compressed(None, {"format": "float-quantized"}),
}


@pytest.mark.parametrize("name", READ)
def test_float8_is_built_whatever_it_leaves_out(name):
    assert of("llama", **READ[name])


UNREAD = {
    "gptq of 4 bits": {"quant_method": "gptq", "bits": 4},
    "mxfp4": {"quant_method": "mxfp4"},
    "fp8 with fmt e5m2": DEEPSEEK | {"fmt": "e5m2"},
    "fp8 with weight_block_size [64, 128]": DEEPSEEK | {"weight_block_size": [64, 128]},
    "compressed-tensors in the format pack-quantized": compressed("pack-quantized", num_bits=4),
    "float-quantized with num_bits 4 and strategy group": compressed(num_bits=4, strategy="group"),
    "with block_structure [64, 64]": compressed(strategy="block", block_structure=[64, 64]),
    "in the format int-quantized": compressed(group={"format": "int-quantized"}),
    "compressed-tensors without config_groups": {"quant_method": "compressed-tensors"},
}


@pytest.mark.parametrize("name", UNREAD)
def test_another_format_is_refused_by_its_name(name):
    with told(ValueError, "has a quantization_config of ", name, "layers.0.self_attn"):
        of("llama", **UNREAD[name])


SMALL = [*CONFIGS, *PARTS]


@pytest.mark.nightly(but=["320", "40"])
@pytest.mark.parametrize("at", with_nightly(range(len(SMALL)), commit=40))
def test_no_type_is_built_of_quantised_weights(at):
    small = SMALL[at]
    part = getattr(small, "part", None)
    config = {**small.spelt("new"), "quantization_config": {"quant_method": "gptq", "bits": 4}}
    with told(ValueError, "has a quantization_config"):
        nnx.eval_shape(lambda: families.attention(config, small.index, part=part, rngs=nnx.Rngs(0)))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["vision_tower", "model.vision_tower", "re:vision_tower.*", "re:.*vision.*", "visual"]
)
def test_a_tower_is_left_alone_by_its_name_and_the_text_is_not(name):
    quantized = {"quant_method": "compressed-tensors", "ignore": [name]}
    vision = {"model_type": "clip_vision_model", "hidden_size": 24, "num_attention_heads": 4}
    whole = {"model_type": "llava", "text_config": {**TEXT, "model_type": "llama"}}
    whole |= {"vision_config": vision, "quantization_config": quantized}
    nnx.eval_shape(lambda: families.attention(whole, 0, part="vision", rngs=nnx.Rngs(0)))
    with told(ValueError, "layers.0.self_attn"):
        families.attention(whole, 0, part="text", rngs=nnx.Rngs(0))


def test_an_empty_quantization_config_is_ignored():
    nnx.eval_shape(
        lambda: families.attention(
            {**TEXT, "model_type": "llama", "quantization_config": {}}, 0, rngs=nnx.Rngs(0)
        )
    )


def test_the_rules_of_a_whole_model_ask_every_layer():
    config = {**TEXT, "model_type": "llama"}
    config["quantization_config"] = {"ignore": ["model.layers.0.self_attn"]}
    with told(ValueError, "layers.1.self_attn"):
        families.rules(config)
    config["quantization_config"]["ignore"].append("model.layers.1.self_attn")
    assert families.rules(config) == ()
