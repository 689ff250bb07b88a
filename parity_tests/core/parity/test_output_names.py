"""A submodule called `output`, as in BERT's layers, and the output of the module."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import Recording, Rule, compare, record

pytestmark = pytest.mark.nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")

ONCE = {"dtypes": ("float64",), "eager": False}
X = np.random.RandomState(0).standard_normal((3, 5, 6))


class Theirs(torch.nn.Module):
    def __init__(self, name="output"):
        super().__init__()
        self.up, self.name = torch.nn.Linear(6, 4), name
        setattr(self, name, torch.nn.Linear(4, 6))

    def forward(self, x):
        return getattr(self, self.name)(torch.tanh(self.up(x))) * 2 + x


class Mine(nnx.Module):
    """Each attribute is a place for a fault: before, in and behind the submodule."""

    before = inside = behind = staticmethod(lambda y: y)

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.output = nnx.Linear(6, 4, rngs=rngs), nnx.Linear(4, 6, rngs=rngs)
        inside = self.inside

        class Output(nnx.Linear):
            def __call__(self, x):
                return inside(super().__call__(x))

        self.output = Output(4, 6, rngs=rngs)

    def __call__(self, x):
        return self.behind(self.output(self.before(jnp.tanh(self.up(x)))) * 2 + x)


def port(**faults):
    return type("Mine", (Mine,), {k: staticmethod(f) for k, f in faults.items()})()


FAULTS = {
    "behind": (lambda y: y + 0.1, "model output"),
    "inside": (lambda y: y * 1.5, "output"),
    "before": (lambda y: y * 1.1, "between up and output"),
}


def test_names_of_rows_are_unique():
    report = compare(Theirs(), port(), X)
    assert report.certain, str(report)
    names = [
        (row.name, row.mode, row.dtype) for row in report.rows if row.kind in ("tap", "output")
    ]
    assert len(names) == len({*names}) and "model output" in {name for name, *_ in names}
    report = compare(torch.nn.Tanh(), nnx.Sequential(jnp.tanh), X, **ONCE)
    assert [row.name for row in report.rows if row.kind == "output"] == ["output"]


@pytest.mark.parametrize("place", FAULTS)
def test_a_fault_is_placed_in_the_submodule_or_in_the_output(place):
    fault, tap = FAULTS[place]
    report = compare(Theirs(), port(**{place: fault}), X, **ONCE)
    assert [each.tap for each in report.divergences] == [tap], report
    assert str(report).count(f"> {tap} ") == 1, report


def test_flax_alone_may_have_the_name():
    rules = [Rule("last.weight -> output.kernel", "o i -> i o"), Rule("last.bias -> output.bias")]
    report = compare(Theirs("last"), port(behind=lambda y: -y), X, rules=rules, **ONCE)
    assert report.first.tap == "model output", report


def test_a_recording_keeps_the_names_of_outputs(tmp_path):
    for name in ("output", "last"):
        file = tmp_path / f"{name}.safetensors"
        record(Theirs(name), (X,), file, dtypes=("float64",))
        rules = [Rule("last -> output")] if name == "last" else []
        report = compare(Recording(file), port(), rules=rules, **{"eager": False})
        assert report.certain, str(report)
        report = compare(Recording(file), port(behind=lambda y: y + 1), rules=rules, eager=False)
        assert report.first.tap == "model output", report


def test_another_structure_is_told_with_advice():
    report = compare(Theirs(), port(behind=lambda y: (y, y)), X, **ONCE)
    assert "take [0] of what Flax returns" in str(report), report
