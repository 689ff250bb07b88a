"""Two machines: what is recorded by torch proves a port as torch itself would, fault by fault."""

import inspect
import subprocess
import sys
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import use_backend
from flax_attn.parity import Decode, ParityError, Recording, Rule, compare, plan, port, record
from flax_attn.parity.cases.collect import collect
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
    """All of a report but hints, and what says where torch's side came from."""
    verdicts = [(row.name, row.kind, row.dtype, row.mode, str(row.verdict)) for row in report.rows]
    places = [replace(place, hint="") for place in report.divergences]
    return verdicts, places, [str(row) for row in report.local], report.unpaired


PORTS = [Faithful, ScaleOnQueries, NoScale, OtherEpsilon, WrongBackward, Flat, MaskShifted]


@pytest.mark.nightly(but=["WrongBackward"])
@pytest.mark.parametrize(
    "mine", with_nightly(PORTS, commit=[Faithful, NoScale, OtherEpsilon, WrongBackward])
)
def test_a_recording_gives_the_same_report_as_torch(kept, mine):
    """Every number of every row and every place are the same; a hint may need torch's program."""
    live = compare(Original(), mine(), X, optimizer=ADAMW, **JIT)
    replayed = compare(Recording(kept), mine(), **JIT)
    assert told(replayed) == told(live)
    assert replayed.ok or replayed.first.hint in (live.first.hint, "")
    assert replayed.ok is (mine not in FAULTS)
    assert replayed.ok or replayed.first.tap == FAULTS[mine]
    assert {row.kind for row in replayed.rows} == {"exact", "tap", "output", "gradient", "step"}


@pytest.mark.nightly
def test_a_report_says_who_recorded(kept):
    report = compare(Recording(kept), Faithful(), dtypes=("float64",), **JIT)
    assert report.versions["torch"] == f"{torch.__version__} (recorded)"
    assert f"kept.safetensors, recorded by torch {torch.__version__} on" in str(report)
    assert report.title == "Faithful against Original"


@pytest.mark.nightly
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


class Fixed(Faithful):
    def __init__(self):
        super().__init__()
        self.dropout = FixedKey(0.6, 0.6, rngs=nnx.Rngs(0))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mine", "said"),
    [
        (NoDropout, "Flax drew 0 dropout masks, torch 1"),
        (Twice, "Flax drew 2 dropout masks, torch 1"),
        (OtherRate, "keeps 0.8 of its places in Flax and 0.6 in torch"),
        (Fixed, "the same for every random key"),
    ],
)
def test_dropout_masks_drawn_differently_are_reported(trained, mine, said):
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
    said = (
        "mask 1 has shape (2, 3, 6, 4) in dropout of Flax and (2, 3, 4, 6) in the module of torch"
    )
    assert said in str(report)


@pytest.mark.nightly
def test_attention_in_blocks_repeats_them_too(folder):
    case = next(case for case in collect("parity_tests.test_cross") if case.train)
    case.dtypes = ("float64",)
    recording = Recording(case.record(folder / "case.safetensors"))
    with use_backend("blockwise"):
        report = case.report(recording=recording, eager=False)
    assert report.ok, report


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_port_is_proven_by_a_recording_without_torch(folder, kept):
    classes = "\n\n".join(inspect.getsource(kind) for kind in (Faithful, NoScale))
    (folder / "port_alone.py").write_text(PORT_ALONE.format(classes=classes))
    text = WITHOUT.format(tests=folder, kept=kept)
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
