"""One GGUF file: what the package writes is read as it reads it, and odd files are refused."""

import builtins
import os
import struct
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from flax_attn.weights import CheckpointError
from flax_attn.weights.checkpoint import Checkpoint
from flax_attn.weights.gguf import MAX_HEADER_BYTES, TYPES, read_gguf

from .files import DATA, same, written
from .gguf_files import info, key, raw, text, word, write
from .test_load import Counting

PADDED = DATA + bytes(8)
ONE = info()
PLAIN = raw([ONE], data=PADDED)
COUNT = struct.pack("<Q", 2)


def strings(*words, kind=8, count=None):
    count = len(words) if count is None else count
    return struct.pack("<IQ", kind, count) + b"".join(map(text, words))


def two(first=0, second=32):
    return [info("v", (3,), 0, first), info("w", (3,), 0, second)]


ODD = {
    "nothing at all": (b"", "It is empty"),
    "three bytes": (b"GGU", "asks for byte 4"),
    "another magic": (b"GGML" + PLAIN[4:], "letters GGUF"),
    "safetensors": ((2).to_bytes(8, "little") + b"{}", "letters GGUF"),
    "version 1": (raw([ONE], data=PADDED, version=1), "version is 1; 2 and 3"),
    "version 4": (raw([ONE], data=PADDED, version=4), "version is 4"),
    "the other byte order": (raw([ONE], data=PADDED, version=3 << 24), "big-endian"),
    "no counts": (PLAIN[:20], "asks for byte 24"),
    "too many tensors": (raw([ONE], data=PADDED, tensors=100_001), "100001 tensors"),
    "as many as 64 bits say": (raw([ONE], data=PADDED, tensors=2**64 - 1), "at most 100000"),
    "a tensor that is not there": (raw([ONE], data=PADDED, tensors=2), "printable"),
    "too many keys": (raw([ONE], data=PADDED, number=2**63), "at most 100000"),
    "a key that is not there": (raw([ONE], data=PADDED, number=1), "type 3|long|asks"),
    "a key less than there are": (raw([ONE], [word("a", 1)], PADDED, number=0), "shape"),
    "an empty key": (raw([ONE], [word("", 1)], PADDED), "printable"),
    "a long key": (raw([ONE], [word("k" * 513, 1)], PADDED), "513 bytes is too long"),
    "a line break in a key": (raw([ONE], [word("a\nb", 1)], PADDED), "printable"),
    "a key that is not UTF-8": (raw([ONE], [word(b"\xff", 1)], PADDED), "not UTF-8"),
    "a key twice": (raw([ONE], [word("a", 1), word("a", 1)], PADDED), "twice"),
    "a value of no type": (raw([ONE], [key("a", 13, b"")], PADDED), "type 13"),
    "a BOOL of 2": (raw([ONE], [key("a", 7, b"\2")], PADDED), "neither 0 nor 1"),
    "a string that never ends": (
        raw([ONE], [key("a", 8, struct.pack("<Q", 2**64 - 1))], PADDED),
        "too long",
    ),
    "a string beyond the file": (
        raw([ONE], [key("a", 8, struct.pack("<Q", 200))], PADDED),
        "too long|asks",
    ),
    "a string that is not UTF-8": (raw([ONE], [key("a", 8, text(b"\xc3"))], PADDED), "not UTF-8"),
    "an array of arrays": (raw([ONE], [key("a", 9, strings(kind=9))], PADDED), "type 9"),
    "an array of no type": (raw([ONE], [key("a", 9, strings(kind=99))], PADDED), "type 99"),
    "an array beyond the file": (
        raw([ONE], [key("a", 9, strings(kind=4, count=2**40))], PADDED),
        "asks for byte",
    ),
    "an array beyond all bounds": (
        raw([ONE], [key("a", 9, strings(kind=12, count=2**64 - 1))], PADDED),
        "asks for byte",
    ),
    "many strings that are not there": (
        raw([ONE], [key("a", 9, strings(count=2**62))], PADDED),
        "asks for byte",
    ),
    "an array of BOOL with a 2": (
        raw([ONE], [key("a", 9, struct.pack("<IQ", 7, 2) + b"\1\2")], PADDED),
        "neither 0 nor 1",
    ),
    "an alignment of 0": (raw([ONE], [word("general.alignment", 0)], PADDED), "power of two"),
    "an alignment of 4": (raw([ONE], [word("general.alignment", 4)], PADDED), "power of two"),
    "an alignment of 48": (raw([ONE], [word("general.alignment", 48)], PADDED), "power of two"),
    "a huge alignment": (raw([ONE], [word("general.alignment", 2**17)], PADDED), "power of two"),
    "an alignment in words": (
        raw([ONE], [key("general.alignment", 8, text("32"))], PADDED),
        "power of two",
    ),
    "an alignment that is true": (
        raw([ONE], [key("general.alignment", 7, b"\1")], PADDED),
        "power of two",
    ),
    "an empty name": (raw([info("")], data=PADDED), "printable"),
    "a name too long to be read": (raw([info("n" * 2049)], data=PADDED), "2049 bytes"),
    "a long name": (raw([info("n" * 513)], data=PADDED), "printable"),
    "NUL in a name": (raw([info("a\0b")], data=PADDED), "printable"),
    "a turn of direction in a name": (raw([info("a\u202eb")], data=PADDED), "printable"),
    "a name that is not UTF-8": (raw([info(b"\xff")], data=PADDED), "not UTF-8"),
    "a name that climbs": (raw([info("../../etc/x")], data=PADDED), "path"),
    "an absolute name": (raw([info("/etc/x")], data=PADDED), "path"),
    "a name twice": (raw([info("w", (3,)), info("w", (3,), 0, 32)], data=bytes(64)), "Two tensors"),
    "no axes": (raw([info(dims=())], data=PADDED), "0 axes"),
    "5 axes": (raw([info(dims=(1, 1, 1, 1, 6))], data=PADDED), "5 axes"),
    "a size beyond 2**40": (raw([info(dims=(0, 2**40 + 1))], data=b""), "shape"),
    "a product beyond 64 bits": (raw([info(dims=(2**40, 2**40))], data=PADDED), "64 bits"),
    "an unknown type": (raw([info(kind=4)], data=PADDED), "number 4; F32, F16"),
    "a type that is never stored": (raw([info(dims=(32,), kind=9)], data=bytes(64)), "number 9"),
    "rows that blocks do not divide": (raw([info(dims=(48, 2), kind=3)], data=PADDED), "48 elem"),
    "an offset that is not aligned": (raw(two(0, 16), data=bytes(64)), "overlaps"),
    "an offset beyond the file": (raw([info(offset=64)], data=PADDED), "gap"),
    "an offset beyond 64 bits": (raw([info(offset=2**64 - 32)], data=PADDED), "gap"),
    "a gap before the first": (raw([info(offset=32)], data=PADDED + bytes(32)), "gap"),
    "a gap between two": (raw(two(0, 64), data=bytes(96)), "gap"),
    "two in one place": (raw(two(0, 0), data=bytes(64)), "overlaps"),
    "data that end early": (raw([ONE], data=DATA[:-1]), "its tensors ask"),
    "no data": (raw([ONE]), "its tensors ask"),
    "more than the padding at the end": (raw([ONE], data=PADDED + b"\0"), "belong to no tensor"),
    "data and no tensor": (raw(data=b"\0"), "belong to no tensor"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_is_refused(name, tmp_path):
    content, told = ODD[name]
    path = written(tmp_path / "odd.gguf", content)
    with pytest.raises(CheckpointError, match=told) as caught:
        Checkpoint(path, None, False)
    assert caught.value.path == str(path)
    assert str(caught.value).isascii() and str(caught.value).isprintable()


LONG = struct.pack("<IQ", 4, 10_001) + bytes(40_004)
VALID = {
    "one tensor": (PLAIN, {"w": DATA}),
    "no padding at the end": (raw([ONE], data=DATA), {"w": DATA}),
    "version 2": (raw([ONE], data=PADDED, version=2), {"w": DATA}),
    "no tensor": (raw(), {}),
    "no tensor and no padding": (raw(alignment=1), {}),
    "another alignment": (
        raw([ONE], [word("general.alignment", 8)], DATA, alignment=8),
        {"w": DATA},
    ),
    "keys of all sorts": (
        raw(
            [ONE],
            [
                key("a", 9, strings("x", "")),
                key("b", 9, strings(*["y"] * 10_001)),
                key("c", 9, LONG),
                key("d", 7, b"\1"),
                key("e", 12, bytes(8)),
                key("f", 9, strings(kind=5)),
            ],
            PADDED,
        ),
        {"w": DATA},
    ),
    "out of order, one empty": (
        raw([*reversed(two()), info("e", (0, 6), 0, 32)], data=bytes(32) + DATA[:12]),
        {"v": bytes(12), "w": DATA[:12], "e": b""},
    ),
}


@pytest.mark.parametrize("name", VALID)
def test_a_valid_file_is_read(name, tmp_path):
    content, want = VALID[name]
    checkpoint = Checkpoint(written(tmp_path / "valid.gguf", content), None, False)
    assert {name: checkpoint.read(name).tobytes() for name in checkpoint.entries} == want


def test_the_values_of_keys(tmp_path):
    numbers = {0: ("B", 255), 1: ("b", -1), 2: ("H", 9), 3: ("h", -9), 5: ("i", -8), 6: ("f", 0.5)}
    numbers |= {10: ("Q", 2**63), 11: ("q", -(2**60)), 12: ("d", 0.1)}
    keys = [key(f"n{i}", i, struct.pack(f"<{code}", x)) for i, (code, x) in numbers.items()]
    keys += [key("t", 7, b"\1"), key("s", 8, text("é")), key("l", 9, strings("x", "y"))]
    keys += [key("z", 9, struct.pack("<IQ", 7, 2) + b"\0\1"), key("long", 9, LONG)]
    found = read_gguf(written(tmp_path / "m.gguf", raw(keys=keys))).keys
    want = {f"n{i}": x for i, (_, x) in numbers.items()}
    want |= {"t": True, "s": "é", "l": ("x", "y"), "z": (False, True), "long": None}
    assert found == want and all(type(found[name]) is type(x) for name, x in want.items())


def test_a_header_has_at_most_so_many_bytes(tmp_path, monkeypatch):
    path = written(tmp_path / "m.gguf", PLAIN)
    assert MAX_HEADER_BYTES == 100_000_000
    monkeypatch.setattr("flax_attn.weights.gguf.MAX_HEADER_BYTES", 60)
    with pytest.raises(CheckpointError, match=r"asks for byte .*; it has 60"):
        Checkpoint(path, None, False)


def blocks(rows=5):
    """Random blocks of every type that is read in them, by name."""
    draw, found = np.random.default_rng(0), {}
    for kind in TYPES.values():
        if kind.elements > 1:
            found[kind.name] = draw.integers(0, 256, (rows, 3 * kind.size), np.uint8)
    return found


@pytest.mark.parametrize("kind", [kind.name for kind in TYPES.values() if kind.elements > 1])
def test_blocks_are_what_the_package_says(kind, tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf", reason="knows the values of blocks")
    there, number = blocks()[kind], gguf.GGMLQuantizationType[kind]
    write(tmp_path / "m.gguf", {"w": there}, types={"w": kind})
    monkeypatch.setattr("flax_attn.weights.gguf.BLOCK_ELEMENTS", 512)  # several parts
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(there, number)
    assert gguf.GGML_QUANT_SIZES[number] == next(x[2:] for x in TYPES.values() if x.name == kind)
    assert same(Checkpoint(tmp_path / "m.gguf", None, True).read("w"), want)


def test_what_the_package_writes_is_read_bit_for_bit(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the witness of the format")
    draw = np.random.default_rng(0)
    values = {
        "a.weight": draw.standard_normal((3, 5)).astype(np.float32),
        "a.bias": draw.standard_normal(3).astype(np.float16),
        "b.wide": draw.standard_normal((2, 3, 7)),
        "c.index": draw.integers(-9, 9, (4, 2)),
        "c.small": draw.integers(-9, 9, (4, 2, 1, 3)).astype(np.int8),
    }
    keys = [("add_custom_alignment", 64), ("add_array", "x", [1, 2]), ("add_name", "n")]
    path = write(tmp_path / "m.gguf", values, keys=keys)
    checkpoint = Checkpoint(path, None, False)
    assert {*checkpoint.entries} == {*values}
    assert all(same(checkpoint.read(name), value) for name, value in values.items())
    narrow = draw.standard_normal((4, 32)).astype(ml_dtypes.bfloat16)
    types = {"w": "BF16"}
    write(path, {"w": narrow.astype(np.float32)}, types=types)
    assert same(Checkpoint(path, None, False).read("w"), narrow)
    assert {kind.name for kind in TYPES.values()} < {x.name for x in gguf.GGMLQuantizationType}


@pytest.mark.parametrize("at", [0, 33])
def test_a_block_that_is_not_finite_is_refused_unless_it_is_allowed(at, tmp_path):
    pytest.importorskip("gguf", reason="knows the values of blocks")
    there = np.zeros((1, 34 * 2), np.uint8)
    there[0, 2 + at : 36] = 1
    there[0, 34:36] = np.asarray([np.inf], np.float16).view(np.uint8)
    path = write(tmp_path / "m.gguf", {"w": there}, types={"w": "Q8_0"})
    with pytest.raises(CheckpointError, match=r"holds NaN or Inf.*allow_nonfinite"):
        Checkpoint(path, None, False).read("w")
    assert not np.isfinite(Checkpoint(path, None, True).read("w")[0, 32:]).any()


def test_quantized_blocks_need_the_gguf_package(tmp_path, monkeypatch):
    data = raw([info(dims=(32,), kind=3)], data=bytes(32))
    checkpoint = Checkpoint(written(tmp_path / "m.gguf", data), None, False)
    for name in ("gguf.constants", "gguf.quants"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CheckpointError, match=r"Q4_1, which needs .* gguf.*flax-attn\[gguf\]"):
        checkpoint.read("w")


@pytest.mark.parametrize("kind", [0, 3])
def test_a_file_truncated_after_opening_is_an_error(kind, tmp_path):
    pytest.importorskip("gguf", reason="knows the values of blocks")
    path = written(
        tmp_path / "m.gguf",
        raw([info(dims=(32,), kind=kind)], data=bytes(128)[: 20 if kind else 128]),
    )
    checkpoint = Checkpoint(path, None, False)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="ends within"):
        checkpoint.read("w")


def test_a_large_tensor_is_not_read_to_read_a_small_one(tmp_path, monkeypatch):
    pytest.importorskip("gguf", reason="knows the values of blocks")
    there = {"embed": np.zeros(1_000_000, np.float32), "w": np.ones((1, 40), np.uint8)}
    path, read, plain_open = write(tmp_path / "m.gguf", there, types={"w": "Q4_1"}), [], open

    def counted(file, mode="r", *args, **kwargs):
        opened = plain_open(file, mode, *args, **kwargs)
        return Counting(opened, read) if file == path else opened

    monkeypatch.setattr(builtins, "open", counted)
    Checkpoint(path, None, False).read("w")
    monkeypatch.undo()
    assert 40 < sum(read) < 400


def test_a_file_of_another_name_is_told_its_own(tmp_path):
    path = written(tmp_path / "m.safetensors", PLAIN)
    with pytest.raises(CheckpointError, match=r"GGUF file, whose name must end in \.gguf"):
        Checkpoint(Path(path), None, False)
