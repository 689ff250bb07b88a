"""Files of recordings: what comes back, and what is refused in a sentence."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, Recording, compare, record
from flax_attn.parity.recording.store import KEY, Reader, Spool, Writer
from flax_attn.parity.sides.run import Call, Run, Step
from flax_attn.weights.safetensors import read_described, write_file
from parity_tests.core.parity.test_harness import Faithful, NoScale, Original, X
from parity_tests.core.parity.test_recording import ADAMW, JIT
from parity_tests.core.parity.test_recording import folder as folder
from parity_tests.core.parity.test_recording import kept as kept

torch = pytest.importorskip("torch", reason="torch records")


def test_weights_that_are_float32_are_written_so(folder):
    theirs = torch.nn.Linear(50, 40).double()
    torch.nn.init.constant_(theirs.weight, 0.5)
    file = folder / "wide.safetensors"
    record(theirs, (np.ones((1, 50)),), file, weights="given", dtypes=("float64",), grads=False)
    entries, metadata = read_described(file)
    assert entries["weights/weight"].dtype == "F32"
    assert json.loads(metadata[KEY])["values"]["weight"]["dtype"] == "float64"
    assert Recording(file).values["weight"].dtype == np.float64
    shapes = [entry.shape for entry in entries.values()]
    assert shapes.count((40, 50)) == 1  # though each call of the layer was given it as well


@pytest.mark.nightly
def test_a_recording_lists_what_was_left_out(folder):
    file = folder / "least.safetensors"
    once = {"dtypes": ("float64",), "noise": False, "taps": False, "grads": False}
    report = compare(Recording(record(Original(), (X,), file, **once)), Faithful(), **JIT)
    assert report.ok and {row.kind for row in report.rows} == {"exact", "output"}
    for what in ("rounding noise was not", "gradients were not", "taps were not"):
        assert any(f"{what} recorded" in note for note in report.notes), what
    wrong = compare(Recording(file), NoScale(), **JIT)
    assert [row.name for row in wrong.failed] == ["output"]


REFUSED = [
    (((X + 1,), {}), "Input '0' is another than was recorded"),
    (((X, X), {}), "not recorded with the inputs 0, 1; it has the inputs 0"),
    (((), {"dtypes": ("bfloat16",)}), "not recorded with dtypes bfloat16; it has float64, float32"),
    (((), {"train": True}), "not recorded with train=True; it has train=False"),
    (((), {"seed": 4}), "not recorded with seed=4; it has seed=0"),
    (((), {"weights": "given"}), 'not recorded with weights="given"; it has weights="random"'),
    (((), {"noise": True}), r"noise=True in float32; it has none there; say record\(..., noise="),
    (((), {"optimizer": ("sgd", {})}), r"optimizer=\('sgd', {}\), steps=1; it has optimizer=\('ad"),
    (((), {"optimizer": ADAMW, "steps": 2}), "steps=2; it has optimizer=.*, steps=1"),
    (((), {"constants": ("0",)}), r"not recorded with constants=\('0',\); it has constants=\(\)"),
    (((), {"torch_call": print}), "calls nothing: give torch_call= to record"),
]


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_was_not_recorded_is_refused_in_a_sentence(kept, call, said):
    with pytest.raises(ParityError, match=said):
        compare(Recording(kept), Faithful(), *call[0], **call[1])


def test_arguments_that_cannot_be_written_are_given_again(folder):
    class Scaled(nnx.Module):
        def __call__(self, x, how):
            return x * how(2.0)

    def how(scale):
        return scale + 1

    call = {"torch_call": lambda module, x, how: x * how(2.0)}
    inputs, once = (X, how), {"dtypes": ("float64",)}
    file = record(torch.nn.Module(), inputs, folder / "how.safetensors", **once, **call)
    assert compare(Recording(file), Scaled(), *inputs, **JIT).ok
    with pytest.raises(ParityError, match="give compare the inputs too"):
        compare(Recording(file), Scaled(), **JIT)


def test_a_file_that_is_no_recording_is_refused(folder, kept):
    other = folder / "other.safetensors"
    with pytest.raises(ParityError, match=r"is no recording .*cannot be opened"):
        Recording(other)
    other.write_text("some text")
    with pytest.raises(ParityError, match="is no recording"):
        Recording(other)
    write_file(other, {"weight": np.ones(3)})
    with pytest.raises(
        ParityError, match=r"is no recording: record it with flax_attn.parity.record"
    ):
        Recording(other)
    entries, metadata = read_described(kept)
    tensors = {name: entry.read(name) for name, entry in entries.items()}
    facts = json.loads(metadata[KEY])
    write_file(other, tensors, {KEY: json.dumps({**facts, "format": 2})})
    with pytest.raises(ParityError, match=r"is of format 2, and this flax_attn reads 1"):
        Recording(other)
    del facts["sources"]
    write_file(other, tensors, {KEY: json.dumps(facts)})
    with pytest.raises(ParityError, match=r"is damaged \('sources'\)"):
        Recording(other)


def test_a_flipped_byte_is_found(folder, kept):
    entries, _ = read_described(kept)
    entry, flipped = entries["weights/q.weight"], bytearray(kept.read_bytes())
    flipped[entry.start + 3] ^= 1
    other = folder / "flipped.safetensors"
    other.write_bytes(flipped)
    with pytest.raises(ParityError, match=r"is damaged \(weights/q.weight is not what"):
        compare(Recording(other), Faithful())


def test_record_refuses_what_it_cannot_record(folder):
    file = folder / "refused.safetensors"
    with pytest.raises(
        TypeError, match=r"record takes a torch.nn.Module.*; got the class Faithful"
    ):
        record(Faithful, (X,), file)
    with pytest.raises(TypeError, match="Inputs are numpy arrays"):
        record(Original(), (torch.ones(3),), file)
    with pytest.raises(ValueError, match='weights="random" or "given"; got "as_is"'):
        record(Original(), (X,), file, weights="as_is")
    with pytest.raises(ValueError, match="float64, which dtypes leaves out"):
        record(Original(), (X,), file, dtypes=("float32",), optimizer=ADAMW)
    with pytest.raises(ValueError, match="all that tells torch's error"):
        record(Original(), (X,), file, dtypes=("float32",), noise=False)
    with pytest.raises(ParityError, match="cannot be written"):
        record(Original(), (X,), folder / "none" / "x.safetensors", dtypes=("float64",))
    assert not file.exists()


VALUES = [
    np.arange(6.0).reshape(2, 3),
    np.array([1 / 3, -np.inf, np.nan, 1e300]),
    np.array([1 + 2j, 1 / 3 - 1j]),
    np.array(1j, np.complex64),
    jnp.ones((2, 2), jnp.bfloat16),
    np.zeros((0, 3)),
    np.array([True, False]),
    np.arange(3),
]


def test_every_value_comes_back_as_it_was(folder):
    arrays, spooled = [np.asarray(x) for x in VALUES], folder / "spooled"
    call = Call("Linear", {"0": arrays[0]}, {}, {"eps": float("inf")}, [Step("mul", 0, (), (2,))])
    run = Run(outputs={str(i): x for i, x in enumerate(arrays)}, calls={"up": call})
    with spooled.open("wb") as file:
        writer = Writer(Spool(file, spooled))
        tree = json.loads(json.dumps(writer.tree("odd//name", [run, {"a": (1, None)}])))
        write_file(folder / "values.safetensors", writer.tensors)
    entries, _ = read_described(folder / "values.safetensors")
    reader = Reader(folder / "values.safetensors", entries, writer.checksums)
    (again, rest), (mine, _) = reader.value(tree), (run, None)
    assert rest == {"a": (1, None)}
    for name, x in mine.outputs.items():
        got = again.outputs[name]
        assert (got.dtype, got.shape, got.tobytes()) == (x.dtype, x.shape, x.tobytes()), name
    assert again.calls["up"].facts == call.facts and again.calls["up"].steps == call.steps
    assert replace(again, outputs={}, calls={}) == Run()
