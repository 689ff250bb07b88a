"""Adapters as PEFT writes them, by hand: each is the weights to which `factor * B A` was added."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import LatentAttention, families
from flax_attn.parity.judge import allclose, same_function
from flax_attn.weights import CheckpointError, Rule, load, load_lora, save, save_lora
from flax_attn.weights.checkpoint import Checkpoint
from flax_attn.weights.known_layers import flax_state
from flax_attn.weights.safetensors import write_file

from .files import alike, same, values

SIZES = {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}
LLAMA, PHI3 = ({"model_type": name, **SIZES} for name in ("llama", "phi3"))
GPT2 = {"model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_layer": 2}
GPT2 |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0}
PREFIX = "model.layers.1.self_attn"
PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 5, "bias": "none", "megatron_core": "m"}


def filled(make, seed):
    """A module with values from numpy, so that none is drawn by a program."""
    with jax.enable_x64(True):
        module, draw = nnx.eval_shape(make), np.random.default_rng(seed).standard_normal
        for variable in flax_state(module).values():
            shape, dtype = variable.get_value().shape, variable.get_value().dtype
            variable.set_value(jax.device_put(draw(shape).astype(dtype)))
    return module


def layer_of(config, seed=0, dtype=jnp.float64):
    make = partial(families.attention, config, 1, param_dtype=dtype)
    return filled(lambda: make(rngs=nnx.Rngs(0)), seed)


def kernels(layer):
    """What each projection multiplies by, its adapter included."""
    each = {}
    for name, linear in vars(layer).items():
        base = linear.base_module if isinstance(linear, nnx.LoRA) else linear
        if isinstance(base, nnx.Linear):
            each[name] = np.asarray(base.kernel.get_value())
            if base is not linear:
                a, b = (np.asarray(x.get_value()) for x in (linear.lora_a, linear.lora_b))
                each[name] = each[name] + a @ b
    return each


def equal(layer, other):
    one, two = kernels(layer), kernels(other)
    assert one.keys() == two.keys() and len(one) == 4
    return all(same_function(one[name], two[name]).ok for name in one)


call = nnx.jit(lambda layer, x, **more: layer(x, **more))


def drawn(shapes, dtype=np.float64):
    """A and B of modules of these (rank, in, out), as PEFT names them below the prefix."""
    draw, tensors = np.random.default_rng(0).standard_normal, {}
    for name, (r, i, o) in shapes.items():
        tensors[f"{name}.lora_A.weight"] = draw((r, i)).astype(dtype)
        tensors[f"{name}.lora_B.weight"] = draw((o, r)).astype(dtype)
    return tensors


def written(folder, tensors, root=f"base_model.model.{PREFIX}.", **config):
    folder.mkdir(exist_ok=True)
    write_file(folder / "adapter_model.safetensors", {root + k: v for k, v in tensors.items()})
    (folder / "adapter_config.json").write_text(json.dumps({**PLAIN, **config}, indent=2))
    return folder


def merged(config, layer, tensors, factors, folder):
    """The layer with `factor * B A` in its weights, of torch's names, and no adapter."""
    rules = families.rules(config, 1)
    save(layer, folder / "base.safetensors", rules=rules)
    file = Checkpoint(folder / "base.safetensors", None, False)
    whole = {name: file.read(name) for name in file.entries}
    for name, factor in factors.items():
        delta = factor * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        whole[f"{name}.weight"] += delta.T if config is GPT2 else delta
    other = layer_of(config, 1)
    load(other, whole, rules=rules)
    return other


FILES = {  # the config, (rank, in, out) of modules, what the file's config says, their factors
    "llama": (LLAMA, {"q_proj": (2, 12, 12), "v_proj": (2, 12, 4)}, {}, (2.5, 2.5)),
    "stabilized": (LLAMA, {"o_proj": (2, 12, 12)}, {"use_rslora": True}, (5 / 2**0.5,)),
    "patterns": (
        LLAMA,
        {"q_proj": (3, 12, 12), "k_proj": (2, 12, 4)},
        {"rank_pattern": {r"layers.\d+.*q_proj": 3}, "alpha_pattern": {"^model.*k_proj": 7}},
        (5 / 3, 3.5),
    ),
    "fused": (PHI3, {"qkv_proj": (2, 12, 20), "o_proj": (2, 12, 12)}, {}, (2.5, 2.5)),
    "inputs first": (GPT2, {"c_attn": (2, 12, 36), "c_proj": (2, 12, 12)}, {}, (2.5, 2.5)),
}


@pytest.mark.parametrize("case", FILES)
def test_an_adapter_is_the_weights_with_its_product(case, tmp_path):
    config, shapes, changed, factors = FILES[case]
    tensors, layer, rules = drawn(shapes), layer_of(config), families.rules(config, 1)
    want = merged(config, layer, tensors, dict(zip(shapes, factors, strict=True)), tmp_path)
    load_lora(layer, written(tmp_path / "in", tensors, **changed), prefix=PREFIX, rules=rules)
    assert equal(layer, want)
    save_lora(layer, tmp_path / "out", prefix=PREFIX, rules=rules, task_type="CAUSAL_LM")
    saved = Checkpoint(tmp_path / "out/adapter_model.safetensors", None, False)
    for name, value in tensors.items():  # A as it was, and the factor is in B
        got = saved.read(f"base_model.model.{PREFIX}.{name}")
        assert same(got, value) if "lora_A" in name else got.shape == value.shape
    again = layer_of(config)
    load_lora(again, tmp_path / "out", prefix=PREFIX, rules=rules)
    assert alike(again, layer)
    said = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert said["fan_in_fan_out"] == (config is GPT2) and said["lora_alpha"] == said["r"]
    assert said["target_modules"] == sorted(f"{PREFIX}.{name}" for name in shapes)


def adapted(layer, **ranks):
    for name, rank in ranks.items():
        base = getattr(layer, name)
        sizes, dtype = (base.in_features, rank, base.out_features), base.kernel.get_value().dtype
        make = partial(nnx.LoRA, *sizes, param_dtype=dtype)
        lora = filled(lambda make=make: make(rngs=nnx.Rngs(0)), rank)
        lora.base_module = nnx.data(base)
        setattr(layer, name, lora)
    return layer


def test_adapters_of_one_fused_module_are_stacked(tmp_path):
    layer = adapted(layer_of(PHI3), q_proj=2, v_proj=3, o_proj=2)  # k_proj has none
    whole = nnx.Dict(model=nnx.Dict(layers=nnx.List([nnx.Dict(self_attn=layer)])))
    rules = families.rules({**PHI3, "num_hidden_layers": 1}, prefix="model")
    save_lora(whole, tmp_path, rules=rules, base_model_name_or_path="here")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    name = "model.layers.0.self_attn.o_proj"
    assert (config["r"], config["rank_pattern"], config["alpha_pattern"]) == (
        5,
        {name: 2},
        {name: 2},
    )
    b = Checkpoint(tmp_path / "adapter_model.safetensors", None, False).read(
        "base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"
    )
    assert b.shape == (20, 5) and not b[:12, 2:].any() and not b[12:16].any() and b[16:, 2:].all()
    other = layer_of(PHI3)
    load_lora(other, tmp_path, prefix="model.layers.0.self_attn", rules=families.rules(PHI3, 1))
    assert equal(other, layer)


def test_the_adapter_scale_is_rounded_once(tmp_path):
    tensors = drawn({"k_proj": (2, 12, 4)}, np.float32)
    layer = layer_of(LLAMA, dtype=jnp.bfloat16)
    load_lora(layer, written(tmp_path, tensors, lora_alpha=3), prefix=PREFIX)
    want = (tensors["k_proj.lora_B.weight"].T * np.float32(1.5)).astype(jnp.bfloat16)
    assert same(np.asarray(layer.k_proj.lora_b[...]), want)
    load_lora(layer, written(tmp_path, tensors), prefix=PREFIX)  # into the adapter that is there
    assert not same(np.asarray(layer.k_proj.lora_b[...]), want)
    assert isinstance(layer.k_proj.base_module, nnx.Linear)


Q = drawn({"q_proj": (2, 12, 12)})
WRONG = {  # tensors, changes of the config, a part of the sentence
    "dora": (Q, {"use_dora": True}, '"use_dora"|use_dora.*true'),
    "whole modules": (Q, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "biases": (Q, {"bias": "lora_only"}, "bias"),
    "bias of B": (Q, {"lora_bias": True}, "lora_bias"),
    "copied layers": (Q, {"layer_replication": [[0, 2]]}, "layer_replication"),
    "tokens": (Q, {"trainable_token_indices": [1]}, "trainable_token_indices"),
    "parameters": (Q, {"target_parameters": ["w"]}, "target_parameters"),
    "a new field": (Q, {"use_more": {"a": 1}}, "use_more"),
    "another type": (Q, {"peft_type": "IA3"}, "peft_type"),
    "other weights": (Q, {"init_lora_weights": "pissa"}, "init_lora_weights"),
    "no rank": (Q, {"r": None}, "r and the values of rank_pattern must be numbers"),
    "huge": (Q, {"lora_alpha": 1e300}, "lora_alpha and the values"),
    "slow": (Q, {"rank_pattern": {"(a*)*b": 2}}, "rank_pattern has"),
    "rank of config": (Q, {"r": 3}, "rank 3 for .*q_proj.*lora_A has rank 2"),
    "embedding": ({"embed.lora_embedding_A": Q["q_proj.lora_A.weight"]}, {}, "no lora_A.weight or"),
    "half": ({"q_proj.lora_A.weight": Q["q_proj.lora_A.weight"]}, {}, "has lora_A .r, in. and"),
    "widths": (drawn({"q_proj": (2, 9, 12)}), {}, "would fill q_proj.kernel as"),
    "names": (drawn({"p_proj": (2, 12, 12)}), {}, "p_proj"),
    "integers": ({k: v.astype(np.int32) for k, v in Q.items()}, {}, "no floats"),
    "overflow": ({k: v * 1e300 for k, v in Q.items()}, {}, "overflows float32"),
    "fewer": (drawn({"k_proj": (2, 12, 4)}), {}, "has an adapter at q_proj, and the file none"),
    "another rank": (drawn({"q_proj": (4, 12, 12)}), {"r": 4}, "rank 4, and the model's adapter 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_plain_adapter_of_the_model_is_refused(case, tmp_path):
    tensors, changed, message = WRONG[case]
    layer = layer_of(LLAMA, dtype=jnp.float32)
    if case in ("fewer", "another rank"):
        layer = adapted(layer, q_proj=2)
    before = values(layer)
    with pytest.raises(CheckpointError, match=message):
        load_lora(layer, written(tmp_path, tensors, **changed), prefix=PREFIX)
    after = values(layer)
    assert before.keys() == after.keys() and all(same(before[k], after[k]) for k in before)


def test_other_calls_are_refused(tmp_path):
    layer = layer_of(LLAMA)
    with pytest.raises(ValueError, match="the model has none"):
        save_lora(layer, tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match=r"adapter_model.bin: It is a pickle"):
        load_lora(layer, tmp_path)
    with pytest.raises(ValueError, match="must wrap a projection"):
        load_lora(filled(lambda: nnx.LoRA(3, 2, 3, rngs=nnx.Rngs(0)), 0), tmp_path)
    adapted(layer, q_proj=2, o_proj=2)
    with pytest.raises(ValueError, match="would trade places"):
        rules = [Rule("x.weight -> q_proj.kernel", "o i -> i o"), Rule("x -> o_proj")]
        save_lora(layer, tmp_path, rules=rules)
    heads = nnx.Dict(q=nnx.eval_shape(lambda: nnx.LinearGeneral(3, (2, 5), rngs=nnx.Rngs(0))))
    written(tmp_path, drawn({"q": (2, 3, 10)}), "base_model.model.")
    with pytest.raises(CheckpointError, match=r"is not that of an nnx.Linear"):
        load_lora(heads, tmp_path)


def test_layers_with_adapters_decode():
    """A cache has the dtype of the adapted keys, and the latent form multiplies by all of it."""
    sizes = {"kv_rank": 6, "nope_dim": 4, "rotary_dim": 2, "value_dim": 5}
    latent = filled(lambda: LatentAttention(12, 3, **sizes, rngs=nnx.Rngs(0)), 0)
    for layer in (
        adapted(latent, kv_b_proj=2),
        adapted(layer_of(LLAMA, dtype=jnp.float32), k_proj=2),
    ):
        x = np.random.default_rng(1).standard_normal((2, 5, 12)).astype(np.float32)
        y, cache = call(layer, x[:, :4], cache=layer.init_cache(2, 5))
        last, _ = call(layer, x[:, 4:], cache=cache)
        assert allclose(np.concatenate([y, last], 1), call(layer, x))
