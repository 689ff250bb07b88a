"""`save`: what `load` reads back bit for bit, under torch's names, with a manifest if asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.weights import CheckpointError, Rule, load, save
from flax_attn.weights.checkpoint import Checkpoint
from flax_attn.weights.manifest import manifest_path
from flax_attn.weights.safetensors import write_file

from .files import alike, gqa, plain, refused, same, torch_values

PREFIX = "model.layers.3.self_attn"


def read_names(path):
    return Checkpoint(path, None, True).entries.keys()


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64])
@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_layer_that_was_saved_is_loaded_bit_for_bit(form, dtype, tmp_path):
    with jax.enable_x64(True):
        one, other = gqa(0, param_dtype=dtype), gqa(1, param_dtype=dtype)
        one.sinks.set_value(one.sinks[...] + 2)
    shards = {"max_shard_bytes": 700} if form == "folder" else {}
    save(one, tmp_path / "m.safetensors", prefix=PREFIX, manifest=True, **shards)
    assert not alike(one, other)
    load(other, tmp_path / "m.safetensors", prefix=PREFIX, manifest=True)
    assert alike(one, other)
    names = {name.removeprefix(f"{PREFIX}.") for name in read_names(tmp_path / "m.safetensors")}
    assert names == {
        *(f"{n}_proj.{leaf}" for n in "qkv" for leaf in ("weight", "bias")),
        *("o_proj.weight", "q_norm.weight", "sinks"),
    }


def test_rules_of_a_fused_file_work_both_ways(tmp_path):
    fused = Rule("qkv.weight -> {q,k,v}_proj.kernel", "(n o) i -> n i o", o=(24, 12, 12))
    rules = [fused, Rule("dense -> o_proj")]
    one, other = plain(0), plain(1)
    save(one, tmp_path / "m.safetensors", rules=rules)
    assert {*read_names(tmp_path / "m.safetensors")} == {"qkv.weight", "dense.weight"}
    load(other, tmp_path / "m.safetensors", rules=rules)
    assert alike(one, other)
    joined = np.concatenate([getattr(one, f"{n}_proj").kernel[...] for n in "qkv"], 1).T
    found = Checkpoint(tmp_path / "m.safetensors", None, False).read("qkv.weight")
    assert same(found, np.ascontiguousarray(joined))


def test_a_matrix_that_lies_as_in_gpt2_is_loaded_by_a_rule(tmp_path):
    there = torch_values()
    there["o_proj.weight"] = np.ascontiguousarray(there["o_proj.weight"].T)
    write_file(tmp_path / "m.safetensors", there)
    layer, rule = plain(), Rule("o_proj.weight -> o_proj.kernel", "i o -> i o")
    refused(layer, tmp_path / "m.safetensors", "would fill o_proj.kernel")
    load(layer, tmp_path / "m.safetensors", rules=[rule])
    assert same(np.asarray(layer.o_proj.kernel[...]), there["o_proj.weight"])
    save(layer, tmp_path / "again.safetensors", rules=[rule])
    again = Checkpoint(tmp_path / "again.safetensors", None, False)
    assert same(again.read("o_proj.weight"), there["o_proj.weight"])


def test_a_manifest_detects_a_flipped_byte_in_the_data(tmp_path):
    path, layer = tmp_path / "m.safetensors", plain()
    save(layer, path, manifest=True)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    refused(plain(1), path, "Its data are not those")
    load(plain(1), path, manifest=False)
    save(layer, path)  # replaces the file, and takes its manifest away
    assert not manifest_path(path).exists()
    load(plain(1), path)
    refused(plain(1), path, "cannot be opened", manifest=True)
    manifest_path(path).write_text('{"q_proj.weight": "F32 [1] x"}')
    refused(plain(1), path, "but not the manifest")


def test_bad_arguments_of_save_are_refused(tmp_path):
    with pytest.raises(ValueError, match="max_shard_bytes must be 1 or more; got 0"):
        save(plain(), tmp_path / "m", max_shard_bytes=0)
    save(plain(), tmp_path / "m", max_shard_bytes=500)
    with pytest.raises(ValueError, match="holds a checkpoint"):
        save(plain(), tmp_path / "m", max_shard_bytes=500)
    swapped = [Rule("a.weight -> q_proj.kernel", "i o -> o i"), Rule("a.weight -> o_proj.kernel")]
    with pytest.raises(ValueError, match=r"could not be loaded back"):
        save(plain(), tmp_path / "n.safetensors", rules=swapped)
    with pytest.raises(CheckpointError, match="printable"):
        save(plain(), tmp_path / "n.safetensors", prefix="a\n")
    assert not (tmp_path / "n.safetensors").exists()
    layer = plain(sinks=True)
    layer.sinks.set_value(jnp.zeros(6, jnp.int4))
    with pytest.raises(ValueError, match="no such dtype: sinks"):
        save(layer, tmp_path / "n.safetensors")
