"""Flipped and missing bytes: a CheckpointError or the very element, never another exception.

Flips in a header or an index give an error or the same tensors; flips in the data change exactly
the flipped element, or give an error, with a manifest always. A truncated file gives an error.
After an error the layer is what it was.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.weights import CheckpointError, load
from flax_attn.weights.checkpoint import Checkpoint
from flax_attn.weights.known_layers import flax_state
from flax_attn.weights.manifest import write_manifest
from flax_attn.weights.safetensors import write_file

from .files import same, tensors
from .test_shards import INDEX, ONE, TWO, sharded

FORMATS = ("file", "shards", "manifest")
SHORT, LONG = 40, 1_000
VALUES = tensors()


class Holder(nnx.Module):
    """Params by name, all zeros."""


def holder(values):
    whole = Holder()
    with jax.enable_x64(True):
        for name, value in values.items():
            part, leaf = name.split(".")
            if not hasattr(whole, part):
                setattr(whole, part, Holder())
            setattr(getattr(whole, part), leaf, nnx.Param(jnp.zeros(value.shape, value.dtype)))
    return whole


def model(kind, folder):
    """A checkpoint of a kind: its path and its files."""
    if kind == "shards":
        folder = sharded(folder)
        return folder, [folder / name for name in (ONE, TWO, INDEX)]
    path = folder / "m.safetensors"
    write_file(path, VALUES)
    if kind == "manifest":
        write_manifest(path, VALUES)
    return path, sorted(folder.iterdir())


def loaded(path, values=VALUES):
    """All tensors by name, or None where a CheckpointError was raised."""
    layer = holder(values)
    try:
        load(layer, path)
    except CheckpointError as error:
        assert str(error).replace("\n", "").isprintable()
        assert not any(np.asarray(x.get_value()).any() for x in flax_state(layer).values())
        return None
    return {name: np.asarray(x.get_value()) for name, x in flax_state(layer).items()}


def changed(found):
    """The elements that differ, as (name, number)."""
    return [
        (name, i)
        for name, value in VALUES.items()
        for i, (one, two) in enumerate(zip(found[name].ravel(), value.ravel(), strict=True))
        if one.tobytes() != two.tobytes()
    ]


def element_of(path, file, at):
    """The element that a byte of a file belongs to; None for a byte of a header or index."""
    for name, entry in Checkpoint(path, None, False).entries.items():
        if entry.file == file and entry.start <= at < entry.start + entry.size:
            return name, (at - entry.start) // VALUES[name].dtype.itemsize
    return None


def flipped(kind, folder, seed):
    """Whether a checkpoint of which a bit or a byte was changed is still loaded."""
    draw = np.random.default_rng(seed)
    path, files = model(kind, folder)
    file = files[draw.integers(len(files))]
    before = file.read_bytes()
    at = int(draw.integers(len(before)))
    element = element_of(path, file, at)
    new = before[at] ^ int(draw.integers(1, 256) if seed % 2 else 1 << draw.integers(8))
    file.write_bytes(before[:at] + bytes([new]) + before[at + 1 :])
    found = loaded(path)
    if found is not None:
        assert kind != "manifest" or element is None, f"The manifest let byte {at} pass."
        assert changed(found) == ([] if element is None else [element]), f"byte {at} of {file}"
    return found is not None


def truncated(kind, folder, seed):
    """Whether a checkpoint of which a file ends early is still loaded."""
    draw = np.random.default_rng(seed)
    path, files = model(kind, folder)
    file = files[draw.integers(len(files))]
    before = file.read_bytes()
    file.write_bytes(before[: draw.integers(len(before))])
    return loaded(path) is not None


def fresh(tmp_path, name):
    folder = tmp_path / str(name)
    folder.mkdir()
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FORMATS)
def test_without_a_flip_everything_is_loaded(kind, tmp_path):
    found = loaded(model(kind, tmp_path)[0])
    assert all(same(found[name], value) for name, value in VALUES.items())


@pytest.mark.nightly(but=["manifest"])
@pytest.mark.parametrize("kind", FORMATS)
def test_flipped_bytes(kind, tmp_path):
    passed = [flipped(kind, fresh(tmp_path, seed), seed) for seed in range(SHORT)]
    assert not all(passed) and (any(passed) or kind == "manifest")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FORMATS)
def test_truncated_files(kind, tmp_path):
    assert not any(truncated(kind, fresh(tmp_path, seed), seed) for seed in range(SHORT))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FORMATS)
def test_a_thousand_flipped_and_truncated_files(kind, tmp_path):
    for seed in range(1_000, 1_000 + LONG):
        if seed % 4:
            flipped(kind, fresh(tmp_path, seed), seed)
        else:
            assert not truncated(kind, fresh(tmp_path, seed), seed)
