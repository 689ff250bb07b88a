"""Two machines: what is recorded by torch proves a port as torch itself would, fault by fault."""

import json
import subprocess
import sys
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import Decode, ParityError, Recording, Rule, compare, plan, port, record
from flax_attn.parity.recording.recording import KEY
from flax_attn.parity.recording.store import Reader, Writer
from flax_attn.parity.sides.run import Call, Run, Step
from flax_attn.weights.safetensors import read_described, write_file
from parity_tests.core.parity.test_dropout_and_state import FixedKey
from parity_tests.core.parity.test_harness import (
    FAULTS,
    Faithful,
    Flat,
    HiddenCast,
    MaskShifted,
    NoDropout,
    NoScale,
    Original,
    OtherEpsilon,
    OtherRate,
    ScaleOnQueries,
    WrongBackward,
    X,
)
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="torch records")
JIT = {"eager": False}
ADAMW = ("adamw", {"lr": 1e-2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def kept(folder):
    dtypes = ("float64", "float32")
    return record(Original(), (X,), folder / "kept.safetensors", dtypes=dtypes, optimizer=ADAMW)


@pytest.fixture(scope="module")
def trained(folder):
    file = folder / "trained.safetensors"
    return record(Original(), (X,), file, dtypes=("float64",), train=True, seed=3)


@pytest.fixture(scope="module")
def narrow(folder):
    return record(Original(), (X,), folder / "narrow.safetensors", dtypes=("float32",))


def told(report):
    """Of a report all but what says where torch's side came from."""
    verdicts = [(row.name, row.kind, row.dtype, row.mode, str(row.verdict)) for row in report.rows]
    return verdicts, report.divergences, [str(row) for row in report.local], report.unpaired


PORTS = [Faithful, ScaleOnQueries, NoScale, OtherEpsilon, WrongBackward, Flat, MaskShifted]


@pytest.mark.parametrize(
    "mine", with_nightly(PORTS, commit=[Faithful, NoScale, OtherEpsilon, WrongBackward])
)
def test_a_recording_says_what_torch_says(kept, mine):
    """Every number of every row, every place and every hint are the same, bit for bit."""
    live = compare(Original(), mine(), X, optimizer=ADAMW, **JIT)
    replayed = compare(Recording(kept), mine(), **JIT)
    assert told(replayed) == told(live)
    assert replayed.ok is (mine not in FAULTS)
    assert replayed.ok or replayed.first.tap == FAULTS[mine]
    assert {row.kind for row in replayed.rows} == {"exact", "tap", "output", "gradient", "step"}


def test_a_report_says_who_recorded(kept):
    report = compare(Recording(kept), Faithful(), dtypes=("float64",), **JIT)
    assert report.versions["torch"] == f"{torch.__version__} (recorded)"
    assert f"kept.safetensors, recorded by torch {torch.__version__} on" in str(report)
    assert report.title == "Faithful against Original"


def test_jax_repeats_the_masks_that_torch_drew(trained):
    report = compare(Recording(trained), Faithful())
    assert report.ok and {row.mode for row in report.rows} == {"", "eager", "jit"}
    (keep,) = Recording(trained).keeps
    assert keep.shape == (3, 5, 5) and 0.4 < keep.mean() < 0.8
    wrong = compare(Recording(trained), NoScale(), **JIT)
    assert wrong.first.tap == "scores" and not wrong.ok


class Twice(Faithful):
    def drop(self, weights):
        return self.dropout(self.dropout(weights))


class Whole(Faithful):
    def drop(self, weights):
        return self.dropout(weights[None])[0]


class ByRows(Faithful):
    def drop(self, weights):
        return self.dropout(weights.mT).mT[..., :4] @ jnp.eye(4, 5)


class Fixed(Faithful):
    def __init__(self):
        super().__init__()
        self.dropout = FixedKey(0.6, 0.6, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        (NoDropout, "Flax drew 0 dropout masks, torch 1"),
        (Twice, "Flax drew 2 dropout masks, torch 1"),
        (OtherRate, "keeps 0.8 of its places in Flax and 0.6 in torch"),
        (Fixed, "the same for every random key"),
    ],
)
def test_masks_that_are_drawn_otherwise_are_told(trained, mine, said):
    report = compare(Recording(trained), mine(), **JIT)
    assert not report.ok and said in str(report)


def test_masks_of_other_shapes_are_told_and_merged_batches_are_none(folder):
    class Theirs(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.dropout(x, 0.5, self.training)

    class Mine(nnx.Module):
        def __init__(self, shape):
            self.dropout, self.shape = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), shape

        def __call__(self, x):
            return self.dropout(x.reshape(self.shape)).reshape(x.shape)

    x = np.random.RandomState(0).standard_normal((2, 3, 4, 6))
    file = record(Theirs(), (x,), folder / "shapes.safetensors", dtypes=("float64",), train=True)
    assert compare(Recording(file), Mine((6, 4, 6)), **JIT).ok
    report = compare(Recording(file), Mine((2, 3, 6, 4)), **JIT)
    assert "mask 1 has shape (2, 3, 6, 4) in Flax and (2, 3, 4, 6) in torch" in str(report)


def test_without_float64_the_same_precision_is_all_that_is_judged(narrow):
    report = compare(Recording(narrow), Faithful())
    assert report.ok and {row.verdict.statement for row in report.rows} == {
        "exact",
        "same precision",
    }
    (note,) = [note for note in report.notes if "float64" in note]
    assert note.startswith("torch was not recorded in float64")
    for mine, place in ((NoScale, "scores"), (OtherEpsilon, "norm")):
        report = compare(Recording(narrow), mine())
        assert not report.ok and report.first.tap == place


def test_a_cast_is_found_in_another_width(folder):
    file = record(Original(), (X,), folder / "cast.safetensors", dtypes=("float64",))
    assert compare(Recording(file), HiddenCast(), **JIT).first.tap == "weights"


def test_plan_and_port_take_a_recording(folder):
    theirs, mine = Original(), Faithful()
    once = {"dtypes": ("float32",), "weights": "given"}
    recording = Recording(record(theirs, (X,), folder / "given.safetensors", **once))
    assert str(plan(recording, mine)) == str(plan(theirs, mine))
    port(recording, mine)
    np.testing.assert_array_equal(mine.q.kernel[...], theirs.q.weight.detach().numpy().T)
    with pytest.raises(TypeError, match="fills no Recording"):
        port(mine, recording)


def test_modules_and_their_order_are_there(kept):
    recording = Recording(kept)
    assert recording.order == ["", "norm", "q", "k", "dropout", "v", "out"]
    norm = recording.modules["norm"]
    assert norm.kind == "torch.nn.modules.normalization.LayerNorm"
    assert norm.settings["eps"] == 1e-5 and norm.settings["normalized_shape"] == (6,)
    assert recording.modules["dropout"].bases[0] == "torch.nn.modules.dropout._DropoutNd"


class Counting(torch.nn.Module):
    """Tied weights, running statistics, a buffer that is carried, and one that is not."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.down.weight = self.up.weight
        self.norm = torch.nn.BatchNorm1d(6)
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x, scale=1.0):
        return self.norm(self.down(self.up(x + self.table)).mT).mT * scale


class Counted(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(6, 6, rngs=rngs)
        self.down = nnx.Linear(6, 6, rngs=rngs)
        self.down.kernel = self.up.kernel
        fast = {"use_fast_variance": False, "momentum": 0.9}
        self.norm = nnx.BatchNorm(6, epsilon=1e-5, **fast, rngs=rngs)

    def __call__(self, x, scale=1.0):
        return self.norm(self.down(self.up(x + jnp.arange(6.0)[None, None]))) * scale


@pytest.mark.parametrize("weights", ["random", "given"])
def test_ties_statistics_and_plain_arguments_are_recorded(folder, weights):
    theirs, how = Counting(), {"weights": weights, "dtypes": ("float64", "float32")}
    file = record(theirs, (X, 2.5), folder / "counting.safetensors", train=True, **how)
    replayed = compare(Recording(file), Counted(), **JIT)
    live = compare(theirs, Counted(), X, 2.5, train=True, **how, **JIT)
    assert told(replayed) == told(live) and replayed.ok, replayed
    assert compare(Recording(file), Counted(), X, 2.5, train=True, **how, **JIT).ok


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


def sums(module, x, cache=0.0):
    y = cache + x.cumsum(-2)
    return y, y[:, -1:]


def test_steps_of_torch_are_recorded(folder):
    class Sums(nnx.Module):
        fault = 0.0

        def init_cache(self, batch, length):
            return np.zeros((batch, 1, 4))

        def __call__(self, x, cache=None):
            y = (0 if cache is None else cache) + x.cumsum(-2)
            return y if cache is None else (y, y[:, -1:] + self.fault)

    def theirs(module, x, cache=None):
        y, cache = sums(module, x, 0.0 if cache is None else cache)
        return y, cache

    x, cuts = np.random.RandomState(0).standard_normal((2, 7, 4)), [(3, 4), (5, 1, 1)]
    file = record(
        torch.nn.Module(),
        (x,),
        folder / "steps.safetensors",
        dtypes=("float64",),
        torch_call=lambda module, x: x.cumsum(-2),
        decode=Decode(cuts=cuts, torch=theirs),
    )
    assert compare(Recording(file), Sums(), decode=Decode(cuts=cuts), **JIT).ok
    wrong = Sums()
    wrong.fault = 0.5
    assert not compare(Recording(file), wrong, decode=Decode(cuts=cuts), **JIT).ok
    with pytest.raises(ParityError, match=r"not recorded with the cut 7; it has 3\+4, 5\+2x1"):
        compare(Recording(file), Sums(), decode=Decode(cuts=[(7,)]), **JIT)
    with pytest.raises(ParityError, match=r"give Decode\(torch=...\) to record"):
        compare(Recording(file), Sums(), decode=Decode(cuts=cuts, torch=theirs), **JIT)


def test_what_a_rule_skips_keeps_its_own_values_only_if_record_knows(folder):
    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.place = torch.nn.Linear(6, 6), torch.nn.Parameter(torch.arange(6.0))

        def forward(self, x):
            return self.up(x + self.place)

    class Mine(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(6, 6, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.up(x + jnp.arange(6.0)[None, None])

    once = {"dtypes": ("float64",), "rules": [Rule.skip("place")]}
    file = record(Theirs(), (X,), folder / "skipped.safetensors", **once)
    assert compare(Recording(file), Mine(), **once, **JIT).ok
    record(Theirs(), (X,), file, dtypes=("float64",))
    with pytest.raises(ParityError, match=r"place, which a rule skips, has random numbers in"):
        compare(Recording(file), Mine(), **once, **JIT)


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
    (((), {"torch_call": sums}), "calls nothing: give torch_call= to record"),
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
    with pytest.raises(ParityError, match=r"is no recording: flax_attn.parity.record writes one"):
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
    with pytest.raises(ParityError, match=r"is damaged: weights/q.weight is not what was recorded"):
        compare(Recording(other), Faithful())


def test_record_refuses_what_it_cannot_record(folder):
    file = folder / "refused.safetensors"
    with pytest.raises(TypeError, match=r"record takes a torch.nn.Module; got Faithful"):
        record(Faithful(), (X,), file)
    with pytest.raises(TypeError, match="Inputs are numpy arrays"):
        record(Original(), (torch.ones(3),), file)
    with pytest.raises(ValueError, match='weights="random" or "given"; got "as_is"'):
        record(Original(), (X,), file, weights="as_is")
    with pytest.raises(ValueError, match="float64, which dtypes leaves out"):
        record(Original(), (X,), file, dtypes=("float32",), optimizer=ADAMW)
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
    writer, arrays = Writer(), [np.asarray(x) for x in VALUES]
    call = Call("Linear", {"0": arrays[0]}, {}, {"eps": float("inf")}, [Step("mul", 0, (), (2,))])
    run = Run(outputs={str(i): x for i, x in enumerate(arrays)}, calls={"up": call})
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


WITHOUT = """
import sys


class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")


sys.meta_path.insert(0, NoTorch())
sys.path.insert(0, "{tests}")
from flax_attn.parity import Recording, compare
from port_alone import Faithful, NoScale
assert compare(Recording("{kept}"), Faithful(), eager=False).ok
report = compare(Recording("{kept}"), NoScale(), eager=False)
assert report.first.tap == "scores", report
"""
PORT_ALONE = """
import jax, jax.numpy as jnp
from flax import nnx
from flax_attn.reference import softmax
from flax_attn.taps import tap


{classes}
"""


def test_a_port_is_proven_where_torch_is_not(folder, kept):
    import inspect

    classes = "\n\n".join(inspect.getsource(kind) for kind in (Faithful, NoScale))
    (folder / "port_alone.py").write_text(PORT_ALONE.format(classes=classes))
    text = WITHOUT.format(tests=folder, kept=kept)
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
