"""Shards and their index: each tensor in the one that is named, and none outside the folder."""

import json
import os

import pytest

from flax_attn.weights import CheckpointError
from flax_attn.weights.checkpoint import Checkpoint
from flax_attn.weights.safetensors import write_file
from flax_attn.weights.shards import INDEX, SINGLE

from .files import same, tensors, written

ONE, TWO = "model-1-of-2.safetensors", "model-2-of-2.safetensors"
VALUES = tensors()
NAMES = sorted(VALUES)
PARTS = {ONE: NAMES[:3], TWO: NAMES[3:]}
WHERE = {name: shard for shard, names in PARTS.items() for name in names}


def sharded(folder, index=None, **changed):
    """A checkpoint of two shards; `index` replaces the index, `changed` entries of its map."""
    folder.mkdir(exist_ok=True)
    for shard, names in PARTS.items():
        write_file(folder / shard, {name: VALUES[name] for name in names})
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": WHERE | changed})
    written(folder / INDEX, (text if index is None else index).encode())
    return folder


def text(weight_map, **more):
    return json.dumps({"weight_map": weight_map, **more})


INDICES = {
    "a list": ("[]", "begin"),
    "no map": ('{"metadata": {}}', "weight_map"),
    "a map that is none": ('{"weight_map": []}', "weight_map"),
    "an extra key": (text(WHERE, extra=1), "nothing else"),
    "metadata that are none": (text(WHERE, metadata=[]), "metadata"),
    "a name twice": ('{"weight_map": {"a": "x", "a": "y"}}', "twice"),
    "a shard that is no string": (text({"a": 1}), "plain name"),
    "a shard above": (text(WHERE | {"a.bias": "../outside/x.safetensors"}), "plain name"),
    "a shard by its absolute path": (text(WHERE | {"a.bias": "/etc/x.safetensors"}), "plain name"),
    "a shard in a folder": (text(WHERE | {"a.bias": "in/x.safetensors"}), "plain name"),
    "a shard of another kind": (text(WHERE | {"a.bias": "pytorch_model.bin"}), "plain name"),
    "a shard with a line break": (text(WHERE | {"a.bias": "x.safetensors\n"}), "plain name"),
    "a shard that is not there": (
        text(WHERE | dict.fromkeys(PARTS[ONE], "x.safetensors")),
        "cannot be opened",
    ),
    "a tensor in the other shard": (text(WHERE | {"a.bias": TWO}), "says that it is in model-2"),
    "a tensor in none": (text(WHERE | {"d": TWO}), "lacks it"),
    "a tensor that is not listed": (
        text({name: shard for name, shard in WHERE.items() if name != "a.bias"}),
        "nowhere",
    ),
    "a name that climbs": (text(WHERE | {"../x": ONE}), "path"),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_odd_index_is_refused(name, tmp_path):
    index, told = INDICES[name]
    folder = sharded(tmp_path / "model", index)
    with pytest.raises(CheckpointError, match=told):
        Checkpoint(folder, None, False)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = sharded(tmp_path / "model")
    write_file(folder / TWO, {name: VALUES[name] for name in [*PARTS[TWO], "a.bias"]})
    with pytest.raises(CheckpointError, match="holds it, but the index says that it is in model-1"):
        Checkpoint(folder, None, False)


@pytest.mark.parametrize("path", ["", INDEX])
def test_a_folder_and_its_index_are_read(path, tmp_path):
    checkpoint = Checkpoint(sharded(tmp_path / "model") / path, None, False)
    assert checkpoint.entries.keys() == VALUES.keys()
    assert all(same(checkpoint.read(name), VALUES[name]) for name in NAMES)


def test_a_folder_of_one_file_is_read(tmp_path):
    write_file(tmp_path / SINGLE, VALUES)
    assert Checkpoint(tmp_path, None, False).entries.keys() == VALUES.keys()


def test_a_folder_of_neither_or_both_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint(tmp_path, None, False)
    write_file(sharded(tmp_path) / SINGLE, VALUES)
    with pytest.raises(CheckpointError, match="both"):
        Checkpoint(tmp_path, None, False)


def moved(file, to):
    os.rename(file, to)
    os.symlink(to, file)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    folder = sharded(tmp_path / "model")
    moved(folder / ONE, tmp_path / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        Checkpoint(folder, None, False)


def test_a_link_within_the_folder_and_a_linked_folder_are_read(tmp_path):
    folder = sharded(tmp_path / "model")
    moved(folder / ONE, folder / "real.safetensors")
    os.symlink(folder, tmp_path / "link")
    assert Checkpoint(tmp_path / "link", None, False).entries.keys() == VALUES.keys()


@pytest.mark.parametrize(
    "blobs, blob, known",
    [("blobs", "0" * 64, True), ("blobs", "x" * 64, False), ("blob", "0" * 64, False)],
)
def test_the_hub_cache_keeps_its_files_beside_its_snapshots(blobs, blob, known, tmp_path):
    (tmp_path / "snapshots").mkdir()
    (tmp_path / blobs).mkdir()
    folder = sharded(tmp_path / "snapshots" / "revision")
    moved(folder / ONE, tmp_path / blobs / blob)
    moved(folder / INDEX, tmp_path / blobs / f"{blob[:-1]}1")
    if known:
        assert Checkpoint(folder, None, False).entries.keys() == VALUES.keys()
        return
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        Checkpoint(folder, None, False)


def test_a_huge_index_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("flax_attn.weights.shards.MAX_HEADER_BYTES", 30)
    with pytest.raises(CheckpointError, match="at most 30 bytes"):
        Checkpoint(sharded(tmp_path / "model"), None, False)


@pytest.mark.nightly
def test_too_many_tensors_are_refused(tmp_path):
    listed = {f"t{i}": ONE for i in range(100_001)}
    with pytest.raises(CheckpointError, match="100001 tensors"):
        Checkpoint(sharded(tmp_path / "model", text(listed)), None, False)
