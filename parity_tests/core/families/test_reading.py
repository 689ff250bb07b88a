"""Configs as published: paths, whole models, missing or unknown model types."""

import json
import warnings

import pytest
from flax import nnx

from flax_attn import families
from flax_attn._internal.caller import warn_once
from parity_tests.core.backends.refusal import told
from parity_tests.tables import each

TEXT = {
    **{"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "num_hidden_layers": 2,
}
TWO = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
TWO |= {"num_hidden_layers": 2, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
SECTIONS = {"mrope_section": [2, 1, 1], "rope_type": "default", "rope_theta": 1e4}
THREE = {**TEXT, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}}
IMAGES = {"depth": 3, "hidden_size": 32, "num_heads": 4, "patch_size": 2}
OLD = {"depth": 3, "embed_dim": 32, "hidden_size": 24, "num_heads": 4, "patch_size": 2}
SIGLIP = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 5, "patch_size": 2}
# Whole models by their parts: each part as it is written, and the type that it is of.
WHOLES = {
    "qwen2_vl": {"text": (TWO, "qwen2_vl_text"), "vision": (OLD, "qwen2_vl_vision")},
    "qwen2_5_vl": {
        "text": (TWO, "qwen2_5_vl_text"),
        "vision": (IMAGES, "qwen2_5_vl_vision"),
    },
    "qwen3_vl": {"text": (THREE, "qwen3_vl_text"), "vision": (IMAGES, "qwen3_vl_vision")},
    "qwen3_vl_moe": {
        "text": (THREE, "qwen3_vl_moe_text"),
        "vision": (IMAGES, "qwen3_vl_moe_vision"),
    },
    "qwen3_5": {"text": (TEXT, "qwen3_5_text"), "vision": (IMAGES, "qwen3_5_vision")},
    "qwen3_5_moe": {"text": (TEXT, "qwen3_5_moe_text"), "vision": (IMAGES, "qwen3_5_moe_vision")},
    "gemma3": {"text": (TEXT, "gemma3_text"), "vision": (SIGLIP, "siglip_vision_model")},
    "llava": {"text": (TEXT, "mistral"), "vision": (SIGLIP, "clip_vision_model")},
}
NAMED_APART = ("gemma3", "llava")  # whose parts have types of their own in the file


def layer_of(config, index=0, **options):
    """The structure and the shapes of the layer that a config builds."""
    built = nnx.eval_shape(lambda: families.attention(config, index, rngs=nnx.Rngs(0), **options))
    graph, state = nnx.split(built)
    return graph, [(path, x.shape) for path, x in nnx.to_flat_state(state)]


def written(name, *, text=True, types="whole"):
    """A whole model's file: with a text_config or flat, its parts' types named, missing or not."""
    fields = {"model_type": name, "architectures": ["SomethingForConditionalGeneration"]}
    for part, (config, kind) in WHOLES[name].items():
        named = {"own": kind, "whole": kind if name in NAMED_APART else name}.get(types)
        config = config if named is None else {**config, "model_type": named}
        flat = part == "text" and not text
        fields |= {**config, "model_type": name} if flat else {f"{part}_config": config}
    return fields


WAYS = [{"types": "own"}, {"types": "whole"}, {"types": "missing"}]
WAYS += [{"types": "whole", "text": False}]


@pytest.mark.nightly
@each("name", WHOLES)
def test_parts_of_a_whole_config_build_the_same_layers_as_alone(name):
    for way in WAYS:
        if name in NAMED_APART and (way["types"] == "missing" or not way.get("text", True)):
            continue
        config = written(name, **way)
        parts = families.parts(config)
        assert [*parts] == ["text", "vision"], (way, parts)
        for part, (fields, kind) in WHOLES[name].items():
            alone = {**fields, "model_type": kind}
            assert layer_of(config, part=part) == layer_of(alone), (part, way)
            assert parts[part] == fields.get("num_hidden_layers", fields.get("depth"))
            assert families.rules(config, 0, part=part) == families.rules(alone, 0)


@pytest.mark.nightly
@each("name", [name for name in WHOLES if name not in NAMED_APART])
def test_a_part_by_itself_may_have_the_name_of_the_whole(name):
    for fields, kind in WHOLES[name].values():
        right = layer_of({**fields, "model_type": kind})
        assert layer_of({**fields, "model_type": name}) == right


def test_a_config_of_several_parts_needs_part():
    config = written("qwen3_vl")
    for part in (None, "sound"):
        with told(ValueError, "say part='text' or 'vision'", f"got part={part!r}"):
            layer_of(config, part=part)


def test_a_quantization_config_of_a_whole_model_holds_for_its_parts():
    config = {**written("qwen3_vl"), "quantization_config": {"quant_method": "gptq"}}
    with told(ValueError, "quantization_config of gptq", "layers.0.self_attn"):
        layer_of(config, part="text")
    config["quantization_config"]["modules_to_not_convert"] = ["visual"]
    assert layer_of(config, part="vision")
    with told(ValueError, "quantization_config of gptq"):
        layer_of(config, part="text")


LLAMA = {**TEXT, "model_type": "llama"}


def test_a_file_or_its_folder_is_read(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    for path in (file, str(file), tmp_path, str(tmp_path)):
        assert layer_of(path) == layer_of(LLAMA)
        assert families.rules(path, 0) == () and families.parts(path) == {}
    with told(ValueError, "nowhere", "cannot be read: No such file"):
        layer_of(tmp_path / "nowhere")
    file.write_text("{")
    with told(ValueError, "is not JSON"):
        layer_of(file)
    file.write_text("[1]")
    with told(ValueError, "holds list in place of a config's fields"):
        layer_of(tmp_path)
    with told(TypeError, "must be a dict", "path of such a file"):
        layer_of(3)


MAMBA2 = {
    **{"model_type": "mamba2", "hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 6},
    **{"n_groups": 2, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("text", ['{"__float__": "Infinity"}', "Infinity"])
def test_an_infinite_number_is_read_as_either_library_writes_it(text, tmp_path):
    file = tmp_path / "config.json"
    fields = json.dumps({**MAMBA2, "time_step_limit": [0.0, "X"]}).replace('"X"', text)
    file.write_text(fields)
    assert layer_of(file) == layer_of(MAMBA2)


def test_architectures_replace_a_missing_or_unknown_model_type():
    warn_once.cache_clear()
    missing = {**TEXT, "architectures": ["LlamaForCausalLM"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert layer_of(missing) == layer_of(LLAMA)
    newer = {**missing, "model_type": "llama_of_tomorrow"}
    with pytest.warns(UserWarning, match="is not known here; its architectures say Llama"):
        assert layer_of(newer) == layer_of(LLAMA)
    for name in ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"):
        config = {"architectures": [name], "num_hidden_layers": 1}
        assert layer_of(config)


@pytest.mark.parametrize("name", [None, "my_own"])
def test_architectures_replace_the_model_type_of_a_whole_model(name):
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 2}
    classes = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    of = classes if name is None else {**classes, "model_type": name}
    known = {"model_type": "qwen2_5_vl", "vision_config": vision}
    for config in ({**TEXT, **of}, {"text_config": TEXT, **of}):
        config = {**config, "vision_config": vision}
        assert families.parts(config) == {"text": TEXT["num_hidden_layers"], "vision": 2}
        assert layer_of(config, part="vision") == layer_of({**known, **TEXT}, part="vision")
