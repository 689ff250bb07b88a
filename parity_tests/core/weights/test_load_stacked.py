"""`load_stacked`, and arrays on several devices."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from flax_attn.weights import CheckpointError, load_stacked, save
from flax_attn.weights.safetensors import write_file

from .files import plain, same, torch_values, values

STACK = {
    "a layer of another shape": ({"layers.1.k_proj.weight": np.zeros((3, 2), np.float32)}, "alike"),
    "a layer of another dtype": ({"layers.1.k_proj.weight": np.zeros((12, 12))}, "alike"),
    "a tensor more": ({"layers.2.extra": np.zeros(3, np.float32)}, "alike"),
    "a layer more": ({"layers.3.q_proj.weight": np.zeros((24, 12), np.float32)}, "has a layer 3"),
}


def stack(count=3):
    return nnx.vmap(plain)(jax.random.split(jax.random.key(0), count))


@pytest.mark.nightly(but=["a layer more"])
@pytest.mark.parametrize("fault", STACK)
def test_stacked_layers_must_be_alike(fault, tmp_path):
    change, told = STACK[fault]
    there = {f"layers.{i}.{n}": v for i in range(3) for n, v in torch_values(i).items()}
    write_file(tmp_path / "m.safetensors", there | change)
    layers = stack()
    before = values(layers)
    with pytest.raises(CheckpointError, match=told):
        load_stacked(layers, tmp_path / "m.safetensors", "layers.{}")
    assert all(same(before[name], value) for name, value in values(layers).items())


@pytest.mark.nightly
def test_some_of_the_layers_are_stacked(tmp_path):
    there = {f"layers.{i}.{n}": v for i in range(7) for n, v in torch_values(i).items()}
    write_file(tmp_path / "m.safetensors", there)
    layers = stack()
    load_stacked(layers, tmp_path / "m.safetensors", "layers.{}", indices=range(1, 7, 2))
    for at, number in enumerate((1, 3, 5)):
        for name, value in torch_values(number).items():
            held = getattr(layers, name.removesuffix(".weight")).kernel
            assert same(np.asarray(held[at]), np.ascontiguousarray(value.T))


def test_bad_arguments(tmp_path):
    path = tmp_path / "m.safetensors"
    save(plain(), path)
    for prefix, indices in (("layers", None), ("{}.{}", None), ("layers.{}", [1, 2])):
        with pytest.raises(ValueError, match=r"takes 3 indices and a prefix with one \{\}"):
            load_stacked(stack(), path, prefix, indices=indices)
    with pytest.raises(ValueError, match="one first axis"):
        load_stacked(plain(), path, "layers.{}")


SHARDED = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from flax_attn import GroupedQueryAttention
from flax_attn.weights import load, load_stacked, save
def make(key):
    return GroupedQueryAttention(12, 6, 3, 4, rngs=nnx.Rngs(key))
mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
rows = NamedSharding(mesh, PartitionSpec("a", "b"))
one, other = make(0), make(1)
save(one, sys.argv[1], prefix="layers.0")
load(other, sys.argv[1], prefix="layers.0", sharding={"q_proj.kernel": rows})
kernel = other.q_proj.kernel[...]
assert kernel.sharding == rows and len(other.k_proj.kernel[...].devices()) == 1
assert {x.data.shape for x in kernel.addressable_shards} == {(6, 12)}
assert (np.asarray(kernel) == np.asarray(one.q_proj.kernel[...])).all()
load(other, sys.argv[1], prefix="layers.0")  # stays where it is
assert other.q_proj.kernel[...].sharding == rows
layers = nnx.vmap(make)(jax.random.split(jax.random.key(0), 1))
columns = NamedSharding(mesh, PartitionSpec(None, "a"))
load_stacked(layers, sys.argv[1], "layers.{}", sharding=columns)
assert {x.data.shape for x in layers.q_proj.kernel[...].addressable_shards} == {(1, 6, 24)}
before = np.asarray(other.k_proj.kernel[...])
try:
    cube = NamedSharding(mesh, PartitionSpec("a", None, "b"))
    load(other, sys.argv[1], prefix="layers.0", sharding=cube)
except ValueError:
    assert (np.asarray(other.k_proj.kernel[...]) == before).all()
else:
    raise SystemExit("a sharding of three axes was taken for a matrix")
print("imported:", *sorted({"torch", "safetensors", "jax"} & {*sys.modules}))
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """One process with four devices for both tests."""
    path = tmp_path_factory.mktemp("sharded") / "m.safetensors"
    line = [sys.executable, "-c", SHARDED, str(path)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_each_device_gets_its_own_slice(sharded):
    assert sharded.returncode == 0, sharded.stderr


@pytest.mark.nightly
def test_neither_torch_nor_safetensors_is_imported(sharded):
    """By who loads and saves."""
    assert sharded.stdout.splitlines() == ["imported: jax"], sharded.stderr
