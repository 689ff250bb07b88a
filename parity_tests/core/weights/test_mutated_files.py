"""Files changed at random are refused by a sentence, or read as their format's own library reads.

A few of each kind at a commit, 2,000 of each at night. Whatever a file says of its sizes, reading
takes at most four times the memory of what it has and is allowed.
"""

import io
import json
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from flax_attn import families
from flax_attn.parity import ParityError, Recording, compare
from flax_attn.parity.cases import golden
from flax_attn.parity.cases.collect import collect
from flax_attn.parity.recording.store import KEY, opened
from flax_attn.weights import CheckpointError
from flax_attn.weights.safetensors import read_described, write_file
from flax_attn.weights.strict_json import MAX_VALUES
from parity_tests.tables import with_nightly

from .files import VALUES, loaded, same
from .mutated import changed_bytes, changed_json

FEW, MANY = 60, 2_000
SLACK = 2**22  # bytes that Python itself takes
PARTS = [range(FEW), *(range(first, first + 500) for first in range(FEW, MANY, 500))]
SEEDS = with_nightly(PARTS, commit=PARTS[:1])
NARROW = {k: v for k, v in VALUES.items() if v.dtype.isbuiltin == 1}  # numpy names no bfloat16


def within(most: int, read: Callable[[], Any]) -> Any:
    """What `read` returns; fails if it took more memory than four times `most`."""
    tracemalloc.start()
    try:
        result = read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 4 * most + SLACK, f"{peak} bytes for {most}"
    return result


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory):
    """What the first load imports is no memory of the load."""
    path = tmp_path_factory.mktemp("warm") / "whole.safetensors"
    write_file(path, VALUES)
    assert loaded(path) is not None


def is_sentence(error: Exception) -> None:
    text = str(error)
    assert text.strip() and len(text) < 2_000 and text[-1:] in '.!?":)', text


def check(
    path: Path, content: bytes, values: dict[str, np.ndarray], theirs: Callable[[Path], Any]
) -> bool:
    """Whether the file is loaded; if it is, then every array is what the format's library reads."""
    path.write_bytes(content)
    most = len(content) + sum(value.nbytes for value in values.values())
    found = within(most, lambda: loaded(path, values))
    if found is not None:
        expected = theirs(path)
        assert found.keys() == expected.keys()
        assert all(same(found[name], expected[name]) for name in found)
    return found is not None


def by_safetensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors import deserialize

    dtypes = {name: value.dtype for name, value in VALUES.items()}
    return {
        name: np.frombuffer(fields["data"], dtypes[name]).reshape(fields["shape"])
        for name, fields in deserialize(path.read_bytes())
    }


def by_numpy(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def by_gguf(path: Path) -> dict[str, np.ndarray]:
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    return {x.name: x.data.reshape(tuple(map(int, x.shape[::-1]))) for x in tensors}


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_safetensors(seeds, tmp_path):
    pytest.importorskip("safetensors", reason="reads what is not refused")
    write_file(tmp_path / "whole.safetensors", VALUES)
    content = (tmp_path / "whole.safetensors").read_bytes()
    path = tmp_path / "m.safetensors"
    passed = [check(path, changed_bytes(content, n), VALUES, by_safetensors) for n in seeds]
    assert any(passed) and not all(passed)


@pytest.mark.nightly
@pytest.mark.parametrize("packed", [False, True], ids=["stored", "deflated"])
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_npz(seeds, packed, tmp_path):
    file = io.BytesIO()
    (np.savez_compressed if packed else np.savez)(file, **NARROW)
    path = tmp_path / "m.npz"
    passed = [check(path, changed_bytes(file.getvalue(), n), NARROW, by_numpy) for n in seeds]
    assert not all(passed)  # a zip has checksums: next to nothing passes


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_gguf(seeds, tmp_path):
    pytest.importorskip("gguf", reason="writes the files")
    from .gguf_files import write

    kinds = (np.float32, np.float16, np.int8, np.float64)
    draw = np.random.default_rng(0)
    shapes = ((3, 5), (3,), (2, 3, 7), (4, 2))
    names = ("a.weight", "a.bias", "b.seen", "b.wide")
    values = {
        name: (9 * draw.standard_normal(shape)).astype(kind)
        for name, shape, kind in zip(names, shapes, kinds, strict=True)
    }
    keys = [("add_array", "tokens", ["a", "b", "c"]), ("add_array", "scores", [0.5, 1.5])]
    write(tmp_path / "whole.gguf", values, keys=[*keys, ("add_block_count", 3), ("add_name", "m")])
    content, path = (tmp_path / "whole.gguf").read_bytes(), tmp_path / "m.gguf"
    passed = [check(path, changed_bytes(content, n), values, by_gguf) for n in seeds]
    assert any(passed) and not all(passed)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """A recording's bytes, and the module that it proves."""
    torch = pytest.importorskip("torch", reason="torch records")
    from flax_attn.parity import record

    file = tmp_path_factory.mktemp("recording") / "linear.safetensors"
    record(torch.nn.Linear(3, 2), (np.ones((4, 3)),), file, dtypes=("float64",), noise=False)
    return file.read_bytes(), nnx.Linear(3, 2, rngs=nnx.Rngs(0))


def proves(path: Path, module: nnx.Module) -> bool:
    """Whether the recording is read and the module is judged by it."""
    try:
        report = compare(within(path.stat().st_size, lambda: Recording(path)), module)
    except ParityError as error:
        is_sentence(error)
        return False
    return report is not None


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_recordings(seeds, recording, tmp_path):
    """A changed byte of a recording is damage, wherever it is."""
    (content, module), path = recording, tmp_path / "m.safetensors"
    for seed in seeds:
        path.write_bytes(changed_bytes(content, seed))
        assert not proves(path, module) or same_recording(path, content), seed


def same_recording(path: Path, content: bytes) -> bool:
    """Whether only the padding of the header changed: description, tensors and bytes are equal."""
    original = path.with_name("original.safetensors")
    original.write_bytes(content)
    (one, text), (two, other) = read_described(path), read_described(original)
    if text[KEY] != other[KEY] or one.keys() != two.keys():
        return False
    return all(same(one[name].read(name), two[name].read(name)) for name in one)


@pytest.mark.nightly
def test_a_recording_of_an_older_version_has_no_checksum(recording, tmp_path):
    (content, module), path = recording, tmp_path / "m.safetensors"
    path.write_bytes(content)
    entries, metadata = read_described(path)
    tensors = {name: entry.read(name) for name, entry in entries.items()}
    write_file(path, tensors, {KEY: metadata[KEY]})
    assert proves(path, module)


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_goldens(seeds, tmp_path):
    """A changed byte of a golden too."""
    (case, *_) = collect("parity_tests.test_uniform_causal_average")[:1]
    content, path = golden.path_of(case).read_bytes(), tmp_path / "m.safetensors"

    def read():
        _, reader = opened(path, "record it again")
        return [reader.tensor({"tensor": name}) for name in reader.entries]

    for seed in seeds:
        path.write_bytes(changed_bytes(content, seed))
        try:
            within(8 * len(content), read)
        except ParityError as error:
            is_sentence(error)
        else:
            assert same_recording(path, content), seed


CONFIGS = json.loads(
    (Path(__file__).parents[2] / "data" / "published_configs.json").read_text("utf-8")
)


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_configs(seeds, tmp_path):
    """A ValueError or TypeError that is a sentence, or a layer."""
    path, names = tmp_path / "config.json", [*CONFIGS]
    made = 0
    for seed in seeds:
        changed = changed_json(CONFIGS[names[seed % len(names)]], seed)
        text = json.dumps(changed).encode()
        path.write_bytes(changed_bytes(text, seed) if seed % 5 == 0 else text)
        made += is_built(path)
    assert 0 < made < len(seeds)


def is_built(path: Path) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            part = next(iter(families.parts(path)), None)
            nnx.eval_shape(lambda: families.attention(path, 0, part=part, rngs=nnx.Rngs(0)))
        except (ValueError, TypeError) as error:
            is_sentence(error)
            return False
    return True


def test_a_header_of_many_small_values_takes_no_more_memory(tmp_path):
    """A text of two bytes a value would take twenty times its size when it is parsed."""
    path = tmp_path / "m.safetensors"
    for filler, marks in ((b"[],", 2), (b"0,", 1)):
        header = b'{"w":[' + filler * (MAX_VALUES // marks) + b"0]}"
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CheckpointError, match=r"Its JSON has \d+ values; at most 4000000 are"):
            within(len(header), lambda: read_described(path))


def test_a_config_of_many_bytes_is_no_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b" " * (2**24 + 1))
    with pytest.raises(ValueError, match=r"has more than 16777216 bytes: is it a config\.json\?"):
        families.attention(path, 0, rngs=nnx.Rngs(0))
