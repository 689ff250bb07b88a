"""One safetensors file: what the package writes is read bit for bit, and odd files are refused."""

import copy
import json
import os
import pickle

import numpy as np
import pytest

from flax_attn._internal.replacing import replacing
from flax_attn.weights import CheckpointError
from flax_attn.weights.checkpoint import Checkpoint
from flax_attn.weights.safetensors import MAX_HEADER_BYTES, read_header, write_file

from .files import DATA, ENTRY, entry, raw, same, tensors, written

MANY = {f"t{i}": entry(shape=[0], data_offsets=[0, 0]) for i in range(100_001)}
TWICE = f'{{"w": {json.dumps(ENTRY)}, "w": {json.dumps(ENTRY)}}}'
TWO = {"w": entry(shape=[3], data_offsets=[0, 12])}
WORDS = json.dumps({"w": ENTRY})
ODD = {
    "nothing at all": (b"", "It is empty"),
    "seven bytes": (b"\x02" + bytes(6), "length"),
    "no header": (bytes(8), "length"),
    "a header of one byte": (raw("{", b"", 1), "length"),
    "a header longer than the file": (raw(WORDS, length=10_000), "length"),
    "a header longer than is allowed": (raw(WORDS, length=MAX_HEADER_BYTES + 1), "length"),
    "a length with its top bit set": (raw(WORDS, length=2**63 + 9), "length"),
    "a pickle": (b"\x80\x02}q\x00.", "It is a pickle"),
    "a zip archive": (b"PK\x03\x04" + bytes(40), "It is a zip archive"),
    "a leading space": (raw(" " + WORDS), "begin"),
    "a byte order mark": (raw(b"\xef\xbb\xbf" + WORDS.encode()), "begin"),
    "a list": (raw("[]", b""), "end in"),
    "a line break at the end": (raw(WORDS + "\n"), "end in"),
    "zeros at the end": (raw(WORDS + "\0\0"), "end in"),
    "two objects": (raw(WORDS + "{}"), "JSON"),
    "no UTF-8": (raw(b'{"\xff": 1}', b""), "UTF-8"),
    "half an object": (raw(WORDS[:-1] + ",}"), "JSON"),
    "a comment": (raw("{/* */}", b""), "JSON"),
    "NaN": (raw('{"w": NaN}', b""), "JSON"),
    "Infinity": (raw('{"w": -Infinity}', b""), "JSON"),
    "a number of 5,000 digits": (raw('{"w": ' + "9" * 5_000 + "}", b""), "JSON"),
    "lists in lists": (raw('{"w": ' + "[" * 200_000 + "}", b""), "nested|JSON"),
    "a name twice": (raw(TWICE), "twice"),
    "a key twice": (raw(WORDS.replace('"dtype"', '"shape": [6], "dtype"')), "twice"),
    "metadata that are no strings": (raw({"__metadata__": {"n": 1}, "w": ENTRY}), "metadata"),
    "metadata that are no object": (raw({"__metadata__": [], "w": ENTRY}), "metadata"),
    "too many tensors": (raw(MANY, b""), "100001 tensors"),
    "an empty name": (raw({"": ENTRY}), "printable"),
    "a long name": (raw({"n" * 513: ENTRY}), "printable"),
    "NUL in a name": (raw({"a\0b": ENTRY}), "printable"),
    "a line break in a name": (raw({"a\nb": ENTRY}), "printable"),
    "a turn of direction in a name": (raw({"a\u202eb": ENTRY}), "printable"),
    "half a character in a name": (raw('{"\\ud800": ' + json.dumps(ENTRY) + "}"), "printable"),
    "a name that climbs": (raw({"../../etc/x": ENTRY}), "path"),
    "an absolute name": (raw({"/etc/x": ENTRY}), "path"),
    "a backslash in a name": (raw({"..\\x": ENTRY}), "path"),
    "an entry that is no object": (raw({"w": [1]}), "nothing else"),
    "an extra key": (raw({"w": entry(extra=1)}), "nothing else"),
    "a key too few": (raw({"w": {"dtype": "F32", "shape": [6]}}), "nothing else"),
    "an unknown dtype": (raw({"w": entry(dtype="F31")}), "dtype"),
    "a dtype in small letters": (raw({"w": entry(dtype="f32")}), "dtype"),
    "a dtype that is no string": (raw({"w": entry(dtype=[["F32"]])}), "dtype"),
    "a shape that is no list": (raw({"w": entry(shape=6)}), "shape"),
    "a negative size": (raw({"w": entry(shape=[-2, -3])}), "shape"),
    "a size that is a fraction": (raw({"w": entry(shape=[2.0, 3])}), "shape"),
    "a size that is true": (raw({"w": entry(shape=[True, 6])}), "shape"),
    "a size beyond 2**40": (raw({"w": entry(shape=[0, 2**40 + 1])}), "shape"),
    "17 axes": (raw({"w": entry(shape=[1] * 16 + [6])}), "shape"),
    "a product beyond 64 bits": (raw({"w": entry(shape=[2**40, 2**40])}), "64 bits"),
    "zero of too many": (
        raw({"w": entry(shape=[0, 2**40, 2**40], data_offsets=[0, 0])}, b""),
        "64 bits",
    ),
    "offsets that are no list": (raw({"w": entry(data_offsets="024")}), "data_offsets"),
    "one offset": (raw({"w": entry(data_offsets=[24])}), "data_offsets"),
    "offsets in the wrong order": (raw({"w": entry(data_offsets=[24, 0])}), "data_offsets"),
    "an offset that is a fraction": (raw({"w": entry(data_offsets=[0.0, 24])}), "data_offsets"),
    "an offset beyond the file": (raw({"w": entry(data_offsets=[0, 25])}), "data_offsets"),
    "a negative offset": (raw({"w": entry(data_offsets=[-24, 0])}), "data_offsets"),
    "another shape than bytes": (raw({"w": entry(shape=[2, 2])}), "its shape and dtype ask 16"),
    "a gap before the first": (raw({"w": entry(data_offsets=[4, 28])}, DATA + bytes(4)), "gap"),
    "a gap between two": (
        raw({**TWO, "v": entry(shape=[2], data_offsets=[16, 24])}),
        "gap",
    ),
    "two that overlap": (raw({**TWO, "v": entry(shape=[4], data_offsets=[8, 24])}), "overlaps"),
    "two in one place": (raw({**TWO, "v": TWO["w"]}, DATA[:12]), "overlaps"),
    "bytes at the end": (raw({"w": ENTRY}, DATA + b"\0"), "belong to no tensor"),
    "bytes and no tensor": (raw("{}", b"\0"), "belong to no tensor"),
}


@pytest.mark.nightly(
    but=[
        "NaN",
        "a byte order mark",
        "a dtype in small letters",
        "a gap between two",
        "an entry that is no object",
        "an offset beyond the file",
        "another shape than bytes",
        "bytes at the end",
        "lists in lists",
        "metadata that are no strings",
        "offsets that are no list",
    ]
)
@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_is_refused(name, tmp_path):
    content, told = ODD[name]
    path = written(tmp_path / "odd.safetensors", content)
    with pytest.raises(CheckpointError, match=told) as caught:
        read_header(path)
    assert caught.value.path == str(path)
    assert str(caught.value).isascii() and str(caught.value).isprintable()


HALVES = {
    "v": entry(shape=[3], data_offsets=[12, 24]),
    "e": entry(shape=[0], data_offsets=[12, 12]),
    **TWO,
}
VALID = {
    "one tensor": (raw({"w": ENTRY}), {"w": DATA}),
    "spaces at the end": (raw(WORDS + "     "), {"w": DATA}),
    "data that are not aligned": (raw(WORDS + " "), {"w": DATA}),
    "metadata": (raw({"__metadata__": {"format": "pt"}, "w": ENTRY}), {"w": DATA}),
    "no tensor": (raw("{}", b""), {}),
    "out of order, one empty": (raw(HALVES), {"v": DATA[12:], "e": b"", "w": DATA[:12]}),
}


@pytest.mark.parametrize("name", VALID)
def test_a_valid_file_is_read(name, tmp_path):
    content, want = VALID[name]
    checkpoint = Checkpoint(written(tmp_path / "valid.safetensors", content), None, False)
    assert {name: checkpoint.read(name).tobytes() for name in checkpoint.entries} == want


def test_what_the_package_writes_is_read_bit_for_bit(tmp_path):
    theirs = pytest.importorskip("safetensors.numpy", reason="the witness of the format")
    values = {name: x for name, x in tensors().items() if name != "b.weight"}
    theirs.save_file(values, tmp_path / "m.safetensors", {"format": "np"})
    checkpoint = Checkpoint(tmp_path / "m.safetensors", None, False)
    assert checkpoint.entries.keys() == values.keys()
    assert all(same(checkpoint.read(name), value) for name, value in values.items())


def test_what_is_written_here_is_read_by_the_package(tmp_path):
    theirs = pytest.importorskip("safetensors", reason="the witness of the format")
    write_file(tmp_path / "m.safetensors", tensors())
    with theirs.safe_open(tmp_path / "m.safetensors", "numpy") as file:
        assert {*file.keys()} == tensors().keys()
        for name, value in tensors().items():
            assert name == "b.weight" or same(file.get_tensor(name), value)
    checkpoint = Checkpoint(tmp_path / "m.safetensors", None, False)
    assert all(same(checkpoint.read(name), value) for name, value in tensors().items())
    starts = [x.start % checkpoint.read(n).dtype.itemsize for n, x in checkpoint.entries.items()]
    assert not any(starts)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["a.weight", "a.bias", "b.weight", "c.scalar"])
def test_what_is_not_finite_is_refused_unless_it_is_allowed(name, value, tmp_path):
    values = tensors()
    values[name].reshape(-1)[-1] = value
    write_file(tmp_path / "m.safetensors", values)
    with pytest.raises(CheckpointError, match=r"holds NaN or Inf.*allow_nonfinite") as caught:
        Checkpoint(tmp_path / "m.safetensors", None, False).read(name)
    assert caught.value.tensor == name
    assert same(Checkpoint(tmp_path / "m.safetensors", None, True).read(name), values[name])


def test_a_nan_in_the_second_million_is_found(tmp_path):
    value = np.zeros(2**20 + 3, np.float32)
    value[-1] = np.nan
    write_file(tmp_path / "m.safetensors", {"w": value})
    with pytest.raises(CheckpointError, match="NaN"):
        Checkpoint(tmp_path / "m.safetensors", None, False).read("w")


def test_a_bool_is_0_or_1(tmp_path):
    path = written(
        tmp_path / "m.safetensors",
        raw({"w": entry(dtype="BOOL", shape=[3], data_offsets=[0, 3])}, b"\0\1\2"),
    )
    with pytest.raises(CheckpointError, match="neither 0 nor 1"):
        Checkpoint(path, None, False).read("w")


def test_a_file_truncated_after_opening_is_an_error(tmp_path):
    path = written(tmp_path / "m.safetensors", raw({"w": ENTRY}))
    checkpoint = Checkpoint(path, None, False)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="ends within"):
        checkpoint.read("w")


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name, told in (("pipe", "regular"), ("folder", "neither"), ("none", "cannot be opened")):
        with pytest.raises(CheckpointError, match=told):
            Checkpoint(tmp_path / f"{name}.safetensors", None, False)


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = written(tmp_path / "m.safetensors", b"before")
    with pytest.raises(RuntimeError, match="broken"), replacing(path) as file:
        file.write(b"after")
        raise RuntimeError("broken")
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["m.safetensors"]


def test_checkpoint_errors_can_be_pickled():
    error = CheckpointError("m.safetensors", "w", "It is odd.", "Fetch it again.")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(other) == str(error) == "m.safetensors, tensor 'w': It is odd. Fetch it again."
        assert (other.path, other.tensor, other.reason, other.hint) == error.args
