"""Every report, as JSON, fits its schema, and says what a program needs of a difference."""

import json

import jsonschema
import numpy as np
import pytest
from flax import nnx

from flax_attn.command import proving
from flax_attn.command.cli import main
from flax_attn.parity import Report, compare, report_schema

from .in_process import Here
from .schema import as_read

torch = pytest.importorskip("torch", reason="the reports compare with torch")
X = np.random.default_rng(3).normal(size=(4, 6))


class Theirs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = torch.nn.LayerNorm(6), torch.nn.Linear(6, 5)
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, x):
        return self.out(self.drop(self.norm(x)))


class Mine(nnx.Module):
    def __init__(self, epsilon, rngs):
        self.norm = nnx.LayerNorm(6, epsilon=epsilon, use_fast_variance=False, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(6, 5, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(self.norm(x)))


def report(epsilon=1e-5, x=X, **options):
    return compare(Theirs(), Mine(epsilon, nnx.Rngs(0)), x, **{"eager": False} | options)


@pytest.mark.nightly
def test_a_difference_has_both_values_and_what_to_try():
    read = as_read(report(1e-3))
    assert read["schema"] == 1 and not read["ok"] and read["verdict"] == "DIFFERENT"
    first = read["first"]
    assert first["tap"] == "norm" and abs(first["got"] - first["want"]) > 1e-6 and first["index"]
    assert read["try"].startswith(
        "Flax is different at norm (value): looks like another epsilon: 0.001"
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"train": True},
        {"dtypes": ("float64", "float32", "bfloat16"), "noise": True},
        {"optimizer": ("sgd", {"lr": 0.1}), "dtypes": ("float64",)},
        {"x": np.zeros((4, 6)), "grads": False},
        {"epsilon": 1e-3, "x": np.where(X > 1, np.nan, X), "dtypes": ("float64",)},
    ],
    ids=["plain", "train", "noise", "steps", "zeros", "nan"],
)
def test_reports_of_all_kinds_fit(options):
    read = as_read(report(**options))
    assert read["rows"] and read["versions"]["torch"]
    assert read["ok"] == ("epsilon" not in options)


def test_an_empty_report_fits_the_schema_and_an_unknown_field_does_not():
    read = as_read(Report("nothing was compared", ()))
    assert read["verdict"] == "nothing is proven" and read["first"] is None and read["try"] == ""
    for broken in ({**read, "more": 1}, {k: v for k, v in read.items() if k != "ok"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, report_schema())


@pytest.mark.nightly
def test_the_command_writes_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(proving, "Workers", Here)
    path = tmp_path / "reports.json"
    assert main(["parity", "uniform_causal_average", "--json", str(path)]) == 0
    documents = json.loads(path.read_text())
    for document in documents:
        assert document.pop("variant") and document.pop("proven_equal_to")
        jsonschema.validate(document, report_schema())
        assert document["ok"]
    assert documents


def test_a_file_is_the_same_as_the_report(tmp_path):
    found = report(dtypes=("float64",))
    found.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == as_read(found)
