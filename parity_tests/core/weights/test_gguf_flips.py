"""Flipped and missing bytes of GGUF files: a CheckpointError or the very block, nothing else.

Flips in the header or the padding give an error or the same tensors; flips in the data change
exactly the flipped element or block, or give an error. A truncated file gives an error, unless all
that it lost is padding. After an error the layer is what it was.
"""

import numpy as np
import pytest

from flax_attn.weights.checkpoint import Checkpoint
from flax_attn.weights.entry import Entry
from flax_attn.weights.gguf import TYPES

from .gguf_files import write
from .test_checkpoint_flips import fresh, loaded

pytest.importorskip("gguf", reason="writes the files and knows the values of blocks")
DRAW = np.random.default_rng(0)
PLAIN = {
    "a.weight": DRAW.standard_normal((3, 5)).astype(np.float32),
    "a.bias": DRAW.standard_normal(3).astype(np.float16),
    "b.seen": DRAW.integers(-9, 9, (2, 3, 7)).astype(np.int8),
    "b.wide": DRAW.standard_normal((4, 2)),
}
BLOCKS = {"c.q4": ("Q4_1", 5, 64), "c.q8": ("Q8_0", 2, 96)}
BYTES = {"d.q6": ("Q6_K", 1, 256), "d.q4": ("Q4_K", 2, 256)}  # which the package does not write
TYPE_OF = {name: kind for name, (kind, *_) in {**BLOCKS, **BYTES}.items()}
SIZE_OF = {kind.name: kind.elements for kind in TYPES.values()}
SHORT, LONG = 60, 1_000


def written_by_the_package(path):
    there = {name: DRAW.standard_normal(shape) for name, (_, *shape) in BLOCKS.items()}
    there = PLAIN | {name: x.astype(np.float32) for name, x in there.items()}
    for name, (kind, rows, _) in BYTES.items():
        size = next(type.size for type in TYPES.values() if type.name == kind)
        there[name] = DRAW.integers(1, 60, (rows, size), np.uint8)  # small scales
    keys = [("add_array", "tokens", ["a", "b", "c"]), ("add_array", "scores", [0.5, 1.5])]
    write(path, there, keys=[*keys, ("add_block_count", 3), ("add_name", "m")], types=TYPE_OF)
    return path.read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A file's bytes, its tensors, and where each lies."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    content, checkpoint = written_by_the_package(path), Checkpoint(path, None, False)
    entries = checkpoint.entries
    return content, {name: checkpoint.read(name) for name in entries}, entries


def changed(found, values):
    """The elements, or blocks, that differ, as (name, number)."""
    differ = []
    for name, value in values.items():
        count, both = SIZE_OF[TYPE_OF[name]] if name in TYPE_OF else 1, (found[name], value)
        one, two = (x.ravel().view(np.uint8).reshape(-1, count * x.itemsize) for x in both)
        differ += [(name, int(i)) for i in np.flatnonzero((one != two).any(1))]
    return differ


def element_of(entries: dict[str, Entry], at):
    """The element or block that a byte belongs to; None for a byte of the header or of padding."""
    for name, entry in entries.items():
        if entry.start <= at < entry.start + entry.size:
            kind = TYPE_OF.get(name)
            width = entry.size * (SIZE_OF[kind] if kind else 1) // int(np.prod(entry.shape))
            return name, (at - entry.start) // width
    return None


def flipped(model, folder, seed):
    """Whether a file of which a bit or a byte was changed is still loaded."""
    content, values, entries = model
    draw, path = np.random.default_rng(seed), folder / "m.gguf"
    first = min(entry.start for entry in entries.values())
    at = int(draw.integers(len(content) if seed % 3 else first))  # the header is short
    new = content[at] ^ int(draw.integers(1, 256) if seed % 2 else 1 << draw.integers(8))
    path.write_bytes(content[:at] + bytes([new]) + content[at + 1 :])
    found = loaded(path, values)
    if found is not None:
        element = element_of(entries, at)
        # A block may hold bits that change nothing, as where its scale is zero.
        must = element is not None and element[0] in PLAIN
        assert changed(found, values) in ([[element]] if must else [[], [element]]), f"byte {at}"
    return found is not None


def truncated(model, folder, seed):
    """Whether a file that ends early is still loaded."""
    content, values, entries = model
    path = folder / "m.gguf"
    count = int(np.random.default_rng(seed).integers(len(content)))
    path.write_bytes(content[:count])
    end = max(entry.start + entry.size for entry in entries.values())
    return loaded(path, values) is not None and count < end


@pytest.mark.nightly
def test_without_a_flip_everything_is_loaded(model, tmp_path):
    content, values, _ = model
    (tmp_path / "m.gguf").write_bytes(content)
    assert not changed(loaded(tmp_path / "m.gguf", values), values)
    assert {*values} == {*PLAIN, *TYPE_OF} and all(x.any() for x in values.values())


@pytest.mark.nightly
def test_flipped_bytes(model, tmp_path):
    passed = [flipped(model, fresh(tmp_path, seed), seed) for seed in range(SHORT)]
    assert any(passed) and not all(passed)


def test_truncated_files(model, tmp_path):
    assert not any(truncated(model, fresh(tmp_path, seed), seed) for seed in range(SHORT))


@pytest.mark.nightly
def test_a_thousand_flipped_and_truncated_files(model, tmp_path):
    for seed in range(1_000, 1_000 + LONG):
        if seed % 4:
            flipped(model, fresh(tmp_path, seed), seed)
        else:
            assert not truncated(model, fresh(tmp_path, seed), seed)
