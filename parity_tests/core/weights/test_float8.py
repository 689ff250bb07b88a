"""Float8 files: equal in every bit to DeepSeek's formula in torch, or refused and nothing changed.

The formula is `weight_dequant` of DeepSeek's kernel.py: float32 values times the scale of their
block, stored in the dtype of the weights.
"""

import json
import tracemalloc
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from flax_attn import families
from flax_attn._internal.caller import warn_once
from flax_attn.weights import Rule, load, load_stacked, save
from flax_attn.weights.checkpoint import Checkpoint
from flax_attn.weights.float8 import dequantized
from flax_attn.weights.known_layers import flax_state
from flax_attn.weights.manifest import write_manifest
from flax_attn.weights.safetensors import read_header, write_file
from parity_tests.tables import with_nightly

from .files import alike, holder, plain, refused, same, values

FORMATS = ("tensor", "channel", "block")
SHAPES = [(576, 130), (128, 256), (300, 7), (1, 129), (131, 5), (257, 3000)]
E4M3 = ml_dtypes.float8_e4m3fn


def drawn(torch, draw, shape, form):
    """A float8 tensor, a scale, and their product in float32."""
    blocks = [-(-n // 128) for n in shape]
    sizes = {"tensor": [(), (1,)], "channel": [shape[:1], (shape[0], 1)], "block": [blocks]}[form]
    size = tuple(sizes[draw.integers(len(sizes))])
    weight = torch.from_numpy(draw.standard_normal(shape) * 60).to(torch.float8_e4m3fn)
    scale = torch.from_numpy(draw.uniform(1e-3, 1e-1, size))
    scale = scale.to((torch.float32, torch.bfloat16)[draw.integers(2)])
    spread = scale.float()
    if form == "channel":
        spread = spread.reshape(-1, 1)
    if form == "block":
        spread = spread.repeat_interleave(128, 0).repeat_interleave(128, 1)
        spread = spread[: shape[0], : shape[1]]
    return weight, scale, weight.float() * spread


def published(folder, shapes, dtype, form, seed=0):
    """Writes two shards, as torch does; returns what must be read."""
    torch = pytest.importorskip("torch", reason="it is the oracle")
    files = pytest.importorskip("safetensors.torch", reason="it writes the files")
    draw, shards, want = np.random.default_rng(seed), ({}, {}), {}
    name_of = ("weight_scale", "weight_scale_inv")[draw.integers(2)]
    for i, (name, shape) in enumerate(shapes.items()):
        if len(shape) == 2:
            weight, scale, product = drawn(torch, draw, shape, form)
            shards[i % 2 - 1][name.removesuffix("weight") + name_of] = scale  # in the other shard
        else:
            weight = product = torch.from_numpy(draw.standard_normal(shape)).to(dtype)
        shards[i % 2][name] = weight
        want[name] = product.to(dtype).float().numpy().astype(dtype_of(dtype))
    listed = {}
    for i, shard in enumerate(shards):
        files.save_file(shard, folder / f"{i}.safetensors")
        listed |= dict.fromkeys(shard, f"{i}.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": listed})
    (folder / "model.safetensors.index.json").write_text(index)
    return want


def dtype_of(dtype):
    return jnp.dtype(str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("seed", with_nightly(range(24), commit=range(6)))
def test_files_equal_torchs_product(seed, tmp_path):
    torch = pytest.importorskip("torch", reason="it is the oracle")
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    shapes = {f"w.w{i}.weight": shape for i, shape in enumerate(SHAPES)}
    want = published(tmp_path, shapes, dtype, FORMATS[seed // 2 % 3], seed)
    rules = [Rule(f"w{i}.weight -> a.w{i}") for i in range(len(SHAPES))]
    layer = holder({f"a.w{i}": want[name] for i, name in enumerate(shapes)})
    load(layer, tmp_path, prefix="w", rules=rules)
    assert all(same(got, x) for got, x in zip(values(layer).values(), want.values(), strict=True))


SIZES = {"hidden_size": 140, "num_attention_heads": 6, "num_hidden_layers": 3}
V3 = {"q_lora_rank": 132, "kv_lora_rank": 129, "qk_nope_head_dim": 26, "qk_rope_head_dim": 4}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
CONFIGS = {
    "deepseek_v3": {**V3, "v_head_dim": 23, "num_key_value_heads": 6},
    "phi3": {"hidden_size": 144, "num_key_value_heads": 3},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 26},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("form", FORMATS)
def test_layers_of_published_configs(name, form, tmp_path):
    torch = pytest.importorskip("torch", reason="it is the oracle")
    config = {"model_type": name, **SIZES, **CONFIGS[name], "quantization_config": FP8}
    rules, prefix = families.rules(config, 1), "model.layers.1.self_attn"
    make = partial(families.attention, config, 1, param_dtype=jnp.bfloat16)
    layer, other = (nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))) for _ in range(2))
    for param in flax_state(layer).values():
        param.set_value(np.zeros(param.shape, param.dtype))
    save(layer, tmp_path / "plain.safetensors", prefix=prefix, rules=rules)
    shapes = {k: x.shape for k, x in read_header(tmp_path / "plain.safetensors").items()}
    assert max(max(shape) for shape in shapes.values()) > 128
    want = published(tmp_path, shapes, torch.bfloat16, form)
    load(layer, want, prefix=prefix, rules=rules)
    load(other, tmp_path, prefix=prefix, rules=rules)
    assert alike(layer, other)


def test_stacked_layers(tmp_path):
    torch = pytest.importorskip("torch", reason="it is the oracle")
    linear = partial(nnx.Linear, 130, 131, use_bias=False)
    make = nnx.vmap(lambda key: linear(rngs=nnx.Rngs(key)))
    layers = nnx.eval_shape(make, jax.random.split(jax.random.key(0)))
    want = published(
        tmp_path, {f"h.{i}.q.weight": (131, 130) for i in (0, 1)}, torch.float32, "block"
    )
    load_stacked(layers, tmp_path, "h.{}.q")
    assert same(np.asarray(layers.kernel[...]).mT.copy(), np.stack([*want.values()]))


def file(**changed):
    """A float8 file of `plain`, as arrays; None takes a tensor out."""
    shapes = {"q": (24, 12), "k": (12, 12), "v": (12, 12), "o": (12, 24)}
    tensors = {f"{x}_proj.weight": np.full(shape, 3, E4M3) for x, shape in shapes.items()}
    tensors |= {f"{x}_proj.weight_scale_inv": np.float32([[0.5]]) for x in shapes}
    tensors |= {name.replace("__", "."): x for name, x in changed.items()}
    return {name: x for name, x in tensors.items() if x is not None}


SCALE = "k_proj__weight_scale_inv"
REFUSED = {
    "another shape": ({SCALE: np.ones((2, 1), np.float32)}, r"\[2, 1\].*\[12, 12\]; .*\[1, 1\]"),
    "three axes": ({SCALE: np.ones((1, 1, 1), np.float32)}, r"\[12\], \[12, 1\] and.* fit"),
    "another dtype": ({SCALE: np.ones((1, 1))}, "F32, BF16 or F16; it is F64"),
    "a NaN": ({SCALE: np.float32([[np.nan]])}, "NaN"),
    "below zero": ({SCALE: np.float32([[-1]])}, "finite and not negative"),
    "zero": ({SCALE: np.float32([[0]])}, "zero for a part of the weight that is not"),
    "two": ({"k_proj__weight_scale": np.float32([1])}, "a weight of float8_e4m3fn.*with one scale"),
    "overflow": ({SCALE: np.float32([[2e38]])}, "times its scale overflows float32"),
    "none": ({SCALE: None}, 'k_proj.weight is float8_e4m3fn.*cast="widen"'),
    "no weight": ({"k_proj__weight": None}, "k_proj.weight_scale_inv"),
    "int8": ({"k_proj__weight": np.ones((12, 12), np.int8)}, "scales a weight of int8"),
    "e5m2": ({"k_proj__weight": np.ones((12, 12), ml_dtypes.float8_e5m2)}, "of float8_e5m2"),
    "packed": ({"k_proj__weight_packed": np.ones((12, 2), np.int32)}, "packed weights"),
    "gptq": ({"k_proj__qweight": np.ones((12, 2), np.int32)}, "GPTQ or AWQ"),
    "bitsandbytes": ({"k_proj__SCB": np.ones(12, np.float32)}, "bitsandbytes"),
    "mxfp4": ({"gate_up_proj_blocks": np.ones((2, 2), np.uint8)}, "MXFP4"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_other_scales_and_formats_are_refused(fault):
    changed, told = REFUSED[fault]
    refused(plain(), file(**changed), told)


def test_a_scale_of_zero_is_that_of_zeros_alone():
    zeros = {"k_proj__weight": np.zeros((12, 12), E4M3), SCALE: np.zeros((1, 1), np.float32)}
    layer = plain()
    load(layer, file(**zeros))
    assert not layer.k_proj.kernel[...].any() and (layer.q_proj.kernel[...] == 1.5).all()


def test_a_product_beyond_float16_is_refused():
    refused(plain(param_dtype=jnp.float16), file(**{SCALE: np.float32([[4e4]])}), "float16")


def test_scales_of_activations_are_named_once(tmp_path):
    warn_once.cache_clear()
    scales = dict.fromkeys(("q_proj__activation_scale", "k_proj__input_scale"), np.ones(1))
    with pytest.warns(UserWarning, match=r"not used: q_proj.activation_scale, 2 in all") as caught:
        load(plain(), file(**scales))
        load(plain(), file(**scales), max_bytes=4 * (2 * 24 + 2 * 12) * 12)
    assert len(caught) == 1
    refused(plain(), file(), "3456 bytes", max_bytes=4 * (2 * 24 + 2 * 12) * 12 - 1)


def test_a_layer_that_holds_scales_itself_is_filled_as_it_is():
    tensors = {"a.weight": np.full((3, 5), 2, E4M3), "a.weight_scale": np.float32([0.5])}
    layer = holder(tensors)
    load(layer, tensors)
    assert all(same(values(layer)[name], x) for name, x in tensors.items())


@pytest.mark.parametrize("name", ["q_proj.weight", "q_proj.weight_scale_inv"])
def test_a_manifest_is_of_the_files_bytes(name, tmp_path):
    path, tensors = tmp_path / "m.safetensors", file()
    write_file(path, tensors)
    write_manifest(path, tensors)
    load(plain(), path, manifest=True)
    raw = bytearray(path.read_bytes())
    raw[read_header(path)[name].start] ^= 1
    path.write_bytes(raw)
    assert refused(plain(), path, "Its data are not those").tensor == name


def test_the_memory_is_that_of_the_result(tmp_path):
    scale = np.ones((32, 32), np.float32)
    tensors = {"weight": np.ones((4096, 4096), E4M3), "weight_scale": scale}
    write_file(tmp_path / "m.safetensors", tensors)
    checkpoint = Checkpoint(tmp_path / "m.safetensors", None, False)
    tracemalloc.start()
    result = dequantized(checkpoint, "weight", "weight_scale", jnp.dtype(jnp.bfloat16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < result.nbytes + result.nbytes // 5 and (result == 1).all()
