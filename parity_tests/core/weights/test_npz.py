"""`.npz`, `.pt` and arrays in memory: what numpy and torch write is read, odd files are refused."""

import io
import os
import struct
import sys
import zipfile
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from flax_attn.weights import CheckpointError, load, read_torch
from flax_attn.weights.checkpoint import Checkpoint

from .files import alike, fresh, loaded, plain, refused, same, tensors, torch_values, written

SHORT, LONG = 60, 1_000
VALUES = {name: value for name, value in tensors().items() if name != "b.weight"}  # bfloat16
HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"


def array(header=HEADER, data=bytes(24), version=b"\1\0", magic=b"\x93NUMPY", length=None):
    """A member: a header that may be odd, and its data."""
    text = header.encode("latin-1") + b"\n"
    size = (len(text) if length is None else length).to_bytes(
        2 if version == b"\1\0" else 4, "little"
    )
    return magic + version + size + text + data


def archive(members, method=zipfile.ZIP_STORED):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as file:
        for name, content in members:
            file.writestr(name, content)
    return made.getvalue()


def one(**changed):
    return archive([("w.npy", array(**changed))])


def header(**changed):
    text = HEADER
    for old, new in changed.items():
        was = {"descr": "'<f4'", "order": "False", "shape": "(2, 3)"}[old]
        text = text.replace(was, new)
    return one(header=text)


TWICE = bytearray(archive([("a.npy", array()), ("b.npy", array())]).replace(b"b.npy", b"a.npy"))
LOCKED = bytearray(one())
LOCKED[LOCKED.rindex(b"PK\1\2") + 8] |= 1
LZMA = archive([("w.npy", array())], zipfile.ZIP_LZMA)
ODD = {
    "nothing at all": (b"", "It is empty"),
    "no archive": (b"\x93NUMPY" + bytes(90), "zip"),
    "half an archive": (one()[:90], "zip"),
    "a pickle": (b"\x80\x02}q\x00.", "It is a pickle"),
    "a member of another name": (archive([("w.txt", b"")]), "must end in"),
    "a pickle of torch": (archive([("m/data.pkl", b"\x80\x02}q\x00.")]), "must end in"),
    "an empty name": (archive([(".npy", array())]), "printable"),
    "a name that climbs": (archive([("../../x.npy", array())]), "path"),
    "an absolute name": (archive([("/etc/x.npy", array())]), "path"),
    "a name twice": (bytes(TWICE), "twice"),
    "an encrypted member": (bytes(LOCKED), "encrypted"),
    "another packing": (LZMA, "encrypted, or packed"),
    "another magic": (one(magic=b"\x93NUMPX"), "no array"),
    "version 4": (one(version=b"\4\0"), "no array"),
    "an empty member": (archive([("w.npy", b"")]), "no array"),
    "a long header": (one(header=HEADER + " " * 10_000), "at most 10000"),
    "a header longer than the member": (one(length=900), "not as numpy"),
    "a header that goes on": (one(header=HEADER + "x"), "not as numpy"),
    "a header that calls": (one(header="__import__('os').system('true')"), "not as numpy"),
    "an extra key": (one(header=HEADER.replace(", }", ", 'x': 1, }")), "not as numpy"),
    "an order that is none": (header(order="1"), "not as numpy"),
    "a negative size": (header(shape="(-2, -3)"), "not as numpy"),
    "a size that is a fraction": (header(shape="(2.0, 3)"), "not as numpy"),
    "a size that is true": (header(shape="(True, 3)"), "not as numpy"),
    "pickled objects": (header(descr="'|O'"), r"'\|O'; \|b1"),
    "fields": (header(descr="[('a', '<f4')]"), "not as numpy"),
    "text": (header(descr="'<U1'"), "dtype is '<U1'"),
    "the other byte order": (header(descr="'>f4'"), "dtype is '>f4'"),
    "bytes without a name": (header(descr="'|V2'"), "save it as safetensors"),
    "a size beyond 2**40": (header(shape="(0, 1099511627777)"), "shape"),
    "17 axes": (header(shape=f"({', '.join('1' * 17)})"), "shape"),
    "a product beyond 64 bits": (header(shape=f"({2**39}, {2**39})"), "64 bits"),
    "more than the directory says": (header(shape="(2, 4)"), "says that it has .* its header"),
    "less than the directory says": (header(shape="(2, 2)"), "says that it has .* its header"),
    "a bomb": (archive([("w.npy", array(data=bytes(10**7)))], zipfile.ZIP_DEFLATED), "says that"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_is_refused(name, tmp_path):
    content, told = ODD[name]
    path = written(tmp_path / "odd.npz", content)
    with pytest.raises(CheckpointError, match=told) as caught:
        Checkpoint(path, None, False)
    assert caught.value.path == str(path)
    assert str(caught.value).isascii() and str(caught.value).isprintable()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_writes_is_read_bit_for_bit(save, tmp_path):
    values = VALUES | {"d.turned": np.asfortranarray(np.arange(6.0).reshape(2, 3))}
    values |= {"d.long": np.zeros((1,) * 16, np.complex64)}
    save(tmp_path / "m.npz", **values)
    checkpoint = Checkpoint(tmp_path / "m.npz", None, False)
    assert checkpoint.entries.keys() == values.keys()
    assert all(same(checkpoint.read(name), value) for name, value in values.items())
    for version in (b"\2\0", b"\3\0"):
        path = written(tmp_path / "one.npz", one(version=version))
        assert same(Checkpoint(path, None, False).read("w"), np.zeros((2, 3), np.float32))


def test_a_layer_is_filled_from_an_archive_within_its_budget(tmp_path):
    there = torch_values()
    rest = np.zeros(10**6, np.float32)
    np.savez_compressed(tmp_path / "m.npz", rest=rest, **{f"a.{n}": x for n, x in there.items()})
    one, other, size = plain(0), plain(1), sum(x.nbytes for x in there.values())
    load(one, tmp_path / "m.npz", prefix="a", max_bytes=size)
    load(other, there)
    assert alike(one, other)
    refused(other, tmp_path / "m.npz", "max_bytes", prefix="a", max_bytes=size - 1)
    np.savez(tmp_path / "n.npz", **there | {"q_proj.weight": np.full((24, 12), np.nan, np.float32)})
    refused(other, tmp_path / "n.npz", "NaN")


def test_a_flipped_byte_is_detected_by_its_checksum(tmp_path):
    np.savez(tmp_path / "m.npz", w=np.zeros(9, np.float32))
    content = bytearray((tmp_path / "m.npz").read_bytes())
    checkpoint = Checkpoint(tmp_path / "m.npz", None, False)
    content[content.index(b"\n") + 20] ^= 4
    (tmp_path / "m.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match="CRC"):
        checkpoint.read("w")


def test_a_file_replaced_after_opening_is_an_error(tmp_path):
    np.savez(tmp_path / "m.npz", w=np.zeros(9, np.float32))
    checkpoint = Checkpoint(tmp_path / "m.npz", None, False)
    np.savez(tmp_path / "m.npz", w=np.zeros(8, np.float32))
    with pytest.raises(CheckpointError, match="ends within"):
        checkpoint.read("w")
    os.truncate(tmp_path / "m.npz", 99)
    with pytest.raises(CheckpointError, match="zip"):
        checkpoint.read("w")


def broken(folder, seed):
    """Whether an archive with a changed byte, or without its end, is still loaded: unchanged."""
    draw, path = np.random.default_rng(seed), folder / "m.npz"
    (np.savez if seed % 2 else np.savez_compressed)(path, **VALUES)
    before = path.read_bytes()
    at = int(draw.integers(len(before)))
    new = bytes([before[at] ^ int(draw.integers(1, 256))])
    path.write_bytes(before[:at] + (new + before[at + 1 :] if seed % 4 else b""))
    found = loaded(path, VALUES)
    assert found is None or all(same(found[name], value) for name, value in VALUES.items())
    return found is not None


@pytest.mark.nightly
def test_flipped_and_missing_bytes(tmp_path):
    passed = [broken(fresh(tmp_path, seed), seed) for seed in range(SHORT)]
    assert any(passed) and not all(passed) and not any(passed[::4])


@pytest.mark.nightly
def test_a_thousand_flipped_and_truncated_files(tmp_path):
    for seed in range(1_000, 1_000 + LONG):
        broken(fresh(tmp_path, seed), seed)


ARRAYS = {
    "a list": ({"w": [1.0]}, "it is list"),
    "another dtype": ({"w": np.zeros(2, "U1")}, "it is an array of <U1"),
    "a name that is a number": ({3: np.zeros(2)}, "printable"),
    "an empty name": ({"": np.zeros(2)}, "printable"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_no_checkpoint_holds(name):
    arrays, told = ARRAYS[name]
    with pytest.raises(CheckpointError, match=told):
        Checkpoint(arrays, None, False)


def test_arrays_have_no_manifest_and_no_nan():
    refused(plain(), torch_values(), "no manifest", manifest=True)
    there = torch_values()
    there["k_proj.weight"][3, 1] = np.inf
    refused(plain(), there, "NaN or Inf")
    turned = {name: np.asfortranarray(value) for name, value in torch_values().items()}
    one, other = plain(0), plain(1)
    load(one, turned)
    load(other, torch_values())
    assert alike(one, other)


def test_what_torch_writes_is_read_bit_for_bit(tmp_path):
    torch = pytest.importorskip("torch", reason="writes the file")
    there = {name: torch.from_numpy(value) for name, value in VALUES.items()}
    narrow = torch.arange(6.0).reshape(2, 3).T
    there |= {
        "n.half": narrow.to(torch.bfloat16),
        "n.turned": narrow,
        "n.8": narrow.to(torch.float8_e5m2),
    }
    for zipped in (True, False):
        torch.save(there, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
        found = read_torch(tmp_path / "m.pt")
        assert all(same(found[name], value) for name, value in VALUES.items())
        there.pop("n.8", None)  # which torch itself does not read from the older kind of file
        assert same(found["n.turned"], np.ascontiguousarray(narrow.numpy()))
        for name, dtype in (("n.half", ml_dtypes.bfloat16), ("n.8", ml_dtypes.float8_e5m2)):
            want = np.ascontiguousarray(narrow.numpy()).astype(dtype)
            assert name not in found or same(found[name], want)
        assert len(found) == len(VALUES) + 2 + zipped


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_what_is_no_state_dict_is_refused(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="writes the files")
    monkeypatch.chdir(tmp_path)
    odd = {
        "refuses it": Evil(),
        "but 'list'|but list": [torch.zeros(2)],
        "no tensors by name": {1: torch.zeros(2)},
        "but 'dict'": {"state_dict": {"w": torch.zeros(2)}},
        "but 'float'": {"w": 1.5},
        "but 'Tensor'": {"w": torch.eye(2).to_sparse()},
        "torch.complex128": {"w": torch.zeros(2, dtype=torch.complex128)},
        "path": {"../w": torch.zeros(2)},
    }
    for told, what in odd.items():
        torch.save(what, "m.pt")
        with pytest.raises(CheckpointError, match=told):
            read_torch("m.pt")
    assert not os.path.exists("evil")
    for content in (b"", b"PK\3\4", b"\x80\x02}q\x00.", struct.pack("<Q", 9)):
        with pytest.raises(CheckpointError, match=r"refuses it|no tensors by name|is empty"):
            print(read_torch(written(tmp_path / "m.pt", content)))
    with pytest.raises(CheckpointError, match="opened"):
        read_torch("none.pt")


def test_read_torch_needs_a_version_with_safe_weights_only(tmp_path, monkeypatch):
    path = written(tmp_path / "m.pt", b"")
    for version, told in (("2.9.1+cpu", r"'2\.9\.1\+cpu' is installed"), (None, "not installed")):
        module = None if version is None else SimpleNamespace(__version__=version)
        monkeypatch.setitem(sys.modules, "torch", module)
        with pytest.raises(CheckpointError, match=told):
            read_torch(path)
