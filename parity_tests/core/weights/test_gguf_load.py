"""Layers from GGUF files: rules and configs against transformers, and keys that are refused."""

import jax
import numpy as np
import pytest
from flax import nnx

from flax_attn import families
from flax_attn.weights import CheckpointError, Rule, gguf_config, load, load_stacked, save

from .files import alike, plain, refused, same, values, written
from .gguf_files import key, raw, text, word, write

D, N, K, H, F, V, LAYERS = 96, 6, 3, 32, 64, 35, 2  # rows that blocks of 32 divide
NORM = "attention.layer_norm_rms_epsilon"


def keys_of(architecture, **changed):
    """A model's keys; None leaves one out."""
    counts = {
        "block_count": LAYERS,
        "embedding_length": D,
        "feed_forward_length": F,
        "context_length": 128,
        "attention.head_count": N,
        "attention.head_count_kv": K,
        "attention.key_length": H,
        "attention.value_length": H,
    }
    counts |= {"attention.sliding_window": 9} if architecture == "gemma3" else {}
    found = {name: ("add_uint32", count) for name, count in counts.items()}
    found |= {NORM: ("add_float32", 1e-5), "rope.freq_base": ("add_float32", 500.0)} | changed
    there = {name: given for name, given in found.items() if given is not None}
    return [(method, f"{architecture}.{name}", x) for name, (method, x) in there.items()]


def tensors(architecture):
    """Random tensors by llama.cpp's names."""
    draw = np.random.default_rng(0)
    norms = {"attn_norm": (D,), "ffn_norm": (D,)}
    if architecture == "gemma3":
        norms |= {"attn_q_norm": (H,), "attn_k_norm": (H,)}
        norms |= {"post_attention_norm": (D,), "post_ffw_norm": (D,)}
    shapes = {"attn_q": (N * H, D), "attn_k": (K * H, D), "attn_v": (K * H, D)}
    shapes |= {"attn_output": (D, N * H), "ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
    shapes = {f"blk.{i}.{name}": s for i in range(LAYERS) for name, s in (shapes | norms).items()}
    shapes |= {"token_embd": (V, D), "output_norm": (D,)}
    return {f"{n}.weight": draw.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def model(path, architecture, types=(), more=(), **changed):
    """A whole small model, its projections in blocks."""
    there = tensors(architecture) | dict(more)
    parts = ("attn_q", "attn_k", "attn_v", "attn_output")
    blocks = {f"blk.{i}.{part}.weight": "Q8_0" for i in range(LAYERS) for part in parts}
    return write(path, there, architecture, keys_of(architecture, **changed), blocks | dict(types))


@pytest.mark.nightly(but=["gemma3"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_layer_is_what_transformers_reads(architecture, tmp_path):
    pytest.importorskip("gguf", reason="writes the file")
    reader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils", reason="the witness")
    from transformers import AutoConfig, AutoModelForCausalLM

    path = model(tmp_path / "m.gguf", architecture)
    config = gguf_config(path)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    there = reader.load_gguf_checkpoint(path, return_tensors=True, model_to_load=theirs)["tensors"]
    rules = families.rules(config, 1, source="gguf")
    layer = families.attention(config, 1, rngs=nnx.Rngs(0))
    load(layer, path, prefix="blk.1", rules=rules)
    for name, value in values(layer).items():
        module = name.rpartition(".")[0]
        want = there[f"model.layers.1.self_attn.{module}.weight"].numpy()
        assert same(value, np.ascontiguousarray(want.T)), name
    assert len(values(layer)) == (6 if architecture == "gemma3" else 4)
    make = nnx.vmap(lambda key: families.attention(config, 1, rngs=nnx.Rngs(key)))
    layers = make(jax.random.split(jax.random.key(0), LAYERS))
    load_stacked(layers, path, "blk.{}", rules=rules)
    one = values(layer)
    assert all(same(value[1], one[name]) for name, value in values(layers).items())


def test_biases_of_query_and_key_lie_in_pairs_too(tmp_path):
    pytest.importorskip("gguf", reason="writes the file")
    draw = np.random.default_rng(1)
    sizes = {"q": N * H, "k": K * H, "v": K * H, "output": D}
    biases = {
        f"attn_{n}.bias": draw.standard_normal(s).astype(np.float32) for n, s in sizes.items()
    }
    more = {f"blk.{i}.{name}": x for i in range(LAYERS) for name, x in biases.items()}
    path = model(tmp_path / "m.gguf", "llama", more=more)
    config = gguf_config(path)
    assert config["attention_bias"] is True
    layer = families.attention(config, 0, rngs=nnx.Rngs(0))
    load(layer, path, prefix="blk.0", rules=families.rules(config, 0, source="gguf"))
    for n, heads in (("q", N), ("k", K)):
        pairs = biases[f"attn_{n}.bias"].reshape(heads, H // 2, 2)
        want = np.concatenate([pairs[..., 0], pairs[..., 1]], -1).ravel()
        assert same(values(layer)[f"{n}_proj.bias"], want)
    assert same(values(layer)["v_proj.bias"], biases["attn_v.bias"])


def test_the_config_is_what_was_converted(tmp_path):
    pytest.importorskip("gguf", reason="writes the file")
    want = {
        "hidden_size": D,
        "num_hidden_layers": LAYERS,
        "intermediate_size": F,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "head_dim": H,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "vocab_size": V,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }
    llama = gguf_config(model(tmp_path / "llama.gguf", "llama"))
    assert llama == {"model_type": "llama", **want}
    more = {"sliding_window": 9, "sliding_window_pattern": 6, "query_pre_attn_scalar": H}
    more |= {"rope_local_base_freq": 10_000.0, "model_type": "gemma3_text"}
    gemma = gguf_config(model(tmp_path / "gemma.gguf", "gemma3"))
    assert gemma == {**want, **more}


def config_of(tmp_path, architecture="llama", more=(), **changed):
    return gguf_config(model(tmp_path / "m.gguf", architecture, more=more, **changed))


def test_optional_keys_have_defaults(tmp_path):
    pytest.importorskip("gguf", reason="writes the file")
    gone = {"attention.key_length": None, "attention.value_length": None}
    gone |= {"attention.head_count_kv": None, "rope.freq_base": None}
    found = config_of(tmp_path, **gone, vocab_size=("add_uint32", 40))
    assert found["head_dim"] == D // N and found["num_key_value_heads"] == N
    assert (found["rope_theta"], found["vocab_size"]) == (10_000.0, 40)
    turned = config_of(tmp_path, **gone, **{"rope.dimension_count": ("add_uint32", 8)})
    assert turned["head_dim"] == 8
    head = {"output.weight": np.zeros((V, D), np.float32)}
    assert config_of(tmp_path, more=head)["tie_word_embeddings"] is False
    largest = config_of(tmp_path, "gemma3", block_count=("add_uint32", 62))
    assert largest["query_pre_attn_scalar"] == D // N


SCALINGS = {
    "none": {},
    "linear": {"rope.scaling.factor": ("add_float32", 8.0)},
    "yarn": {
        "rope.scaling.factor": ("add_float32", 4.0),
        "rope.scaling.original_context_length": ("add_uint32", 32),
        "rope.scaling.finetuned": ("add_bool", True),
    },
}
SCALED = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 8.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_the_scaling_of_rotary_positions(kind, tmp_path):
    pytest.importorskip("gguf", reason="writes the file")
    keys = {"rope.scaling.type": ("add_string", kind), **SCALINGS[kind]}
    found = config_of(tmp_path, **keys)
    assert found.get("rope_scaling") == SCALED[kind]
    families.attention(found, 0, rngs=nnx.Rngs(0))


def divisors(factor, head_dim=H, base=500_000.0):
    """What llama.cpp's converter writes for Llama 3.1: by what each frequency is divided."""
    found = []
    for i in range(0, head_dim, 2):
        wave = 2 * np.pi * base ** (i / head_dim)
        smooth = (8192 / wave - 1) / 3
        middle = 1 / ((1 - smooth) / factor + smooth)
        found.append(1 if wave < 8192 / 4 else factor if wave > 8192 else middle)
    return np.asarray(found, np.float32)


def test_the_scaling_of_llama_3_is_seen_in_its_frequencies(tmp_path):
    pytest.importorskip("gguf", reason="writes the file")
    base = {"rope.freq_base": ("add_float32", 500_000.0)}
    found = config_of(tmp_path, more={"rope_freqs.weight": divisors(32.0)}, **base)
    want = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 32.0}
    want |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    assert found["rope_scaling"] == want
    families.attention(found, 0, rngs=nnx.Rngs(0))
    odd = divisors(32.0)
    odd[odd.argmax() - 1] *= 1.001
    for other in (odd, divisors(8.0, 2 * H), np.zeros(H // 2, np.float32), divisors(0.5)):
        with pytest.raises(CheckpointError, match="not those that Llama 3 has"):
            config_of(tmp_path, more={"rope_freqs.weight": other}, **base)
    keys = {"rope.scaling.type": ("add_string", "linear"), **SCALINGS["linear"], **base}
    with pytest.raises(CheckpointError, match="of which a config has one"):
        config_of(tmp_path, more={"rope_freqs.weight": divisors(32.0)}, **keys)


REFUSED = {
    "key heads that do not divide": (
        {"attention.head_count_kv": ("add_uint32", 4)},
        "llama.attention.head_count_kv, 4, must divide llama.attention.head_count, ",
    ),
    "heads that do not divide the width": (
        {"attention.head_count": ("add_uint32", 7), "attention.head_count_kv": ("add_uint32", 7)}
        | dict.fromkeys(("attention.key_length", "attention.value_length")),
        "llama.attention.head_count, 7, must divide llama.embedding_length, ",
    ),
    "a key is missing": ({"context_length": None}, "llama.context_length must be a whole number"),
    "a count is zero": ({"block_count": ("add_uint32", 0)}, "block_count must be a whole number"),
    "a count is below zero": ({"block_count": ("add_int32", -3)}, "block_count must be a whole"),
    "a count is true": ({"block_count": ("add_bool", True)}, "block_count must be a whole number"),
    "a count for each layer": (
        {"attention.head_count_kv": ("add_array", [3, 3, 3])},
        "head_count_kv must be a whole number",
    ),
    "an epsilon of words": ({NORM: ("add_string", "1e-5")}, "must be a number with a fraction"),
    "an epsilon that is NaN": ({NORM: ("add_float32", np.nan)}, "must be a number"),
    "an epsilon that is Inf": ({NORM: ("add_float64", np.inf)}, "must be a number"),
    "a key that is not known": ({"expert_count": ("add_uint32", 8)}, "'llama.expert_count'"),
    "values of another size": ({"attention.value_length": ("add_uint32", 8)}, "must be equal"),
    "half of a head is rotated": ({"rope.dimension_count": ("add_uint32", 16)}, "must be equal"),
    "an unknown scaling": (
        {"rope.scaling.type": ("add_string", "longrope")},
        "rope.scaling.type is 'longrope'; none, linear, yarn are read",
    ),
    "a scaling without a factor": ({"rope.scaling.type": ("add_string", "linear")}, "scaling.fact"),
    "another layout": ({"tensor_data_layout": ("add_string", "x")}, "tensor_data_layout"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_no_config_says_are_refused(name, tmp_path):
    pytest.importorskip("gguf", reason="writes the file")
    changed, told = REFUSED[name]
    with pytest.raises(CheckpointError, match=told):
        config_of(tmp_path, **changed)


def test_an_architecture_that_is_not_read(tmp_path):
    there = {
        "'qwen2'; gemma3, llama": [key("general.architecture", 8, text("qwen2"))],
        "int; gemma3": [word("general.architecture", 2)],
        "has no general.architecture; gemma3": [],
    }
    for told, keys in there.items():
        with pytest.raises(CheckpointError, match=told):
            gguf_config(written(tmp_path / "m.gguf", raw(keys=keys)))
    config = {"model_type": "qwen2", "hidden_size": 12, "num_attention_heads": 3}
    with pytest.raises(ValueError, match="known for gemma3_text, llama; got a config of qwen2"):
        families.rules(config, 0, source="gguf")


def test_what_the_file_of_another_model_holds_changes_nothing(tmp_path):
    pytest.importorskip("gguf", reason="writes the file")
    path = model(tmp_path / "m.gguf", "gemma3")
    config = gguf_config(model(tmp_path / "llama.gguf", "llama"))
    layer, rules = (
        f(config, 1, **more)
        for f, more in (
            (families.attention, {"rngs": nnx.Rngs(0)}),
            (families.rules, {"source": "gguf"}),
        )
    )
    error = refused(layer, path, "do not fit", prefix="blk.1", rules=rules)
    assert "attn_q_norm.weight" in error.reason and "post_ffw_norm.weight" in error.reason
    error = refused(plain(), path, "do not fit", prefix="blk.1")
    assert "attn_q.weight" in error.reason
    size = sum(x.nbytes for x in values(layer).values())
    right = tmp_path / "llama.gguf"
    told = f"{size} bytes, more than max_bytes"
    refused(layer, right, told, prefix="blk.1", rules=rules, max_bytes=size - 1)
    load(layer, right, prefix="blk.1", rules=rules, max_bytes=size)


def test_a_rule_that_shifts(tmp_path):
    rule = Rule.shifted("a.weight -> scale", by=-1.0)
    assert str(rule) == 'Rule.shifted("a.weight -> scale", by=-1.0)' and rule != Rule(rule.names)
    norms = [nnx.RMSNorm(4, rngs=nnx.Rngs(0)) for _ in range(2)]
    norms[0].scale[...] = norms[0].scale[...] * 1.5
    save(norms[0], tmp_path / "m.safetensors", prefix="a")
    load(norms[1], tmp_path / "m.safetensors", rules=[rule])
    assert norms[1].scale[...].tolist() == [0.5] * 4
    with pytest.raises(ValueError, match=r"without a shift: leave Rule\.shifted"):
        save(norms[1], tmp_path / "n.safetensors", rules=[rule])
    load(norms[1], tmp_path / "m.safetensors", prefix="a")
    assert alike(*norms)
    for by in (True, "1", float("nan")):
        with pytest.raises(AssertionError, match="adds a finite number"):
            Rule.shifted("a -> b", by=by)
