"""Every reader names the format of a file that is no checkpoint, and says what to do."""

import gzip
import io
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from flax_attn.weights import CheckpointError, gguf_config, load, read_torch
from flax_attn.weights.checkpoint import Checkpoint
from parity_tests.core.weights.files import entry, plain, raw, written
from parity_tests.core.weights.gguf_files import info
from parity_tests.core.weights.gguf_files import raw as gguf
from parity_tests.tables import each


def arrays():
    file = io.BytesIO()
    np.savez(file, w=np.zeros(3, np.float32))
    return file.getvalue()


def checkpoint(path):
    return Checkpoint(path, False, False)


def with_manifest(path):
    """The file stands in the place of a manifest."""
    whole = written(path.with_name("m.safetensors"), raw({}, b""))
    return Checkpoint(whole, True, False)


INDEX = json.dumps({"weight_map": {"w": "model.safetensors"}}).encode()
# The name of a file, who reads it, and what a whole one may hold.
READERS = {
    "safetensors": ("m.safetensors", checkpoint, raw({"w": entry()})),
    "a layer's": (
        "model.safetensors",
        lambda path: load(plain(), path.parent),
        raw({"w": entry()}),
    ),
    "no suffix": ("m", checkpoint, raw({"w": entry()})),
    "index": ("model.safetensors.index.json", checkpoint, INDEX),
    "manifest": ("m.safetensors.sha256.json", with_manifest, b"{}"),
    "gguf": ("m.gguf", checkpoint, gguf([info()], data=bytes(24))),
    "gguf's config": ("m.gguf", gguf_config, gguf([info()], data=bytes(24))),
    "npz": ("m.npz", checkpoint, arrays()),
    "torch": ("m.pt", read_torch, b""),
}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 4404\n" % (b"0a" * 32)
PAGE = "web page, .* where the page's link has /blob/, the file's has /resolve/"
FOREIGN = {
    "empty": (b"", r"It is empty\. Fetch or save it again"),
    "pointer": (LFS, "pointer of git-lfs, .* Run `git lfs pull`"),
    "page": (b"<!DOCTYPE html>\n<html><body>404</body></html>", PAGE),
    "page behind a space": (b"\n <html lang='en'>", PAGE),
    "gzip": (gzip.compress(bytes(999)), r"packed by gzip\. Unpack it first"),
    "a short note": (b"Not found", "."),
    "wrong magic": (b"\x89HDF\r\n\x1a\n" + bytes(999), "."),
    "a header's length": (b"\x1f\x8b\x08" + bytes(600_000), "packed by gzip"),
}


@each("reader, kind", [(reader, kind) for reader in READERS for kind in FOREIGN])
def test_the_error_for_a_foreign_file_names_its_format(reader, kind):
    name, read, _ = READERS[reader]
    content, words = FOREIGN[kind]
    refuse(name, read, content, words)


def refuse(name, read, content, words):
    """One sentence on what is wrong and one on what to do, and no other kind of error."""
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder) / name, content)
        if read is read_torch:
            pytest.importorskip("torch", reason="it reads the file")
        with pytest.raises(CheckpointError, match=f"{name}.*: .*{words}") as caught:
            read(path)
        assert "to 0" not in str(caught.value)


@pytest.mark.nightly
@each("reader", [reader for reader in READERS if reader != "torch"])
def test_a_file_that_was_cut_is_refused(reader):
    name, read, whole = READERS[reader]
    for length in range(len(whole)):
        refuse(name, read, whole[:length], ".")


@each("reader", READERS)
def test_a_folder_in_place_of_a_file_is_refused(reader):
    name, read, _ = READERS[reader]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.mkdir()
        with pytest.raises(CheckpointError, match=r"It is a folder, .* file in it|A folder must"):
            read(path)
