"""References that a function builds, and references that are not installed where a case runs."""

import sys
import types
from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

from flax_attn.command.parity_command import Results, footer
from flax_attn.parity import Case, ParityError, Report
from flax_attn.parity.cases import certificate, golden, markdown
from flax_attn.parity.cases.case import has_torch
from parity_tests.witnesses import by_path

live = pytest.mark.skipif(not has_torch(), reason="a witness is made in torch")
ABSENT = ModuleNotFoundError("No module named 'absent'", name="absent.part")


def case(made_by="makers.doubled", **more):
    """A linear layer against the one that a function of a module `makers` makes."""
    return Case(
        nnx.Linear,
        {"in_features": 3, "out_features": 2},
        reference="absent.part.Linear",
        made_by=made_by,
        flax_call=lambda m, input: m(input),
        dtypes=("float64",),
        input=(4, 3),
        **more,
    )


@pytest.fixture
def makers(monkeypatch):
    """A module whose functions make witnesses."""

    def doubled(in_features, out_features):
        from torch import nn

        return nn.Sequential(nn.Linear(in_features, out_features))[0]

    def absent(**config):
        raise ABSENT

    def torn(**config):
        raise ModuleNotFoundError("No module named 'numpy.torn'", name="numpy.torn")

    made = types.SimpleNamespace(doubled=doubled, absent=absent, torn=torn, number=lambda **x: 3)
    monkeypatch.setitem(sys.modules, "makers", made)
    return made


@pytest.fixture
def kept(makers, tmp_path, monkeypatch):
    """A golden of the case, recorded while its witness could be made."""
    path = tmp_path / "linear.safetensors"
    monkeypatch.setattr(golden, "path_of", lambda case: path)
    monkeypatch.setattr(golden, "_read_from", lambda case: path)
    golden.record([case()])
    return path


@pytest.mark.nightly
@live
def test_a_function_makes_the_witness_of_its_arguments(makers):
    report = case().report(live=True)
    assert report.ok and not report.replayed
    assert case().proven_equal_to == "absent.part.Linear"


def test_a_function_that_makes_a_witness_needs_its_name():
    with pytest.raises(
        ValueError, match=r"made_by='a.b' builds a reference; name it by reference="
    ):
        Case(nnx.Linear, {}, made_by="a.b", x=(2, 3))


@live
def test_what_is_made_must_be_a_module(makers):
    with pytest.raises(TypeError, match=r"makers.number must make a torch.nn.Module; got int"):
        case("makers.number").report(live=True)


@pytest.mark.nightly
@live
def test_a_witness_that_is_not_installed_is_replayed_and_says_so(kept):
    report = case("makers.absent").report(live=True)
    assert report.ok and report.rows
    assert report.replayed == (
        "compared with recorded results: absent.part.Linear cannot be imported here "
        "(No module named 'absent')"
    )
    assert report.replayed in str(report) and report.to_dict()["replayed"] == report.replayed


@live
def test_a_wrong_port_is_found_by_a_recorded_reference(kept):
    wrong = case("makers.absent")
    wrong.flax_call = lambda m, input: 1.01 * m(input)
    assert not wrong.report(live=True).ok


@live
def test_what_was_not_recorded_names_both(makers):
    with pytest.raises(ParityError, match=r"absent.part.Linear cannot be .*, and .* not recorded"):
        case("makers.absent").report(live=True)


@live
def test_a_broken_package_and_another_seed_are_no_reason_for_the_record(kept):
    with pytest.raises(ModuleNotFoundError, match=r"numpy\.torn"):
        case("makers.torn").report(live=True)
    other = case("makers.absent")
    other.seed = 5
    with pytest.raises(ModuleNotFoundError, match="absent"):
        other.report(live=True)


def test_tables_say_that_results_were_recorded(kept_report):
    lines = certificate.lines([("linear", "absent.part.Linear", kept_report)])
    assert lines[0].cells()[-1] == "equal, recorded"
    assert markdown.markdown(lines, {}).splitlines()[-1].endswith("| equal, recorded |")
    told, _ = footer(Results(), lines)
    assert told.startswith("recorded: absent.part.Linear cannot be imported here")
    plain = certificate.lines([("linear", "torch.nn.Linear", replace(kept_report, replayed=""))])
    assert plain[0].cells()[-1] == "equal"
    assert footer(Results(), plain)[0].startswith("1 variant, 1 case")


@pytest.fixture
def kept_report():
    from flax_attn.parity import judge
    from flax_attn.parity.report import Row

    verdict = judge.same_function(np.ones(2), np.ones(2))
    rows = (Row("output", "output", "float64", "jit", verdict),)
    return Report("linear", rows, replayed="compared with recorded results: it is not here")


def test_a_file_is_loaded_without_its_package():
    module = by_path("rich", "rich/errors.py")
    assert issubclass(module.StyleError, Exception)
    assert by_path("rich", "rich/errors.py") is module is not sys.modules.get("rich.errors")
    with pytest.raises(ModuleNotFoundError, match="flax-attn-absent is not installed") as error:
        by_path("flax-attn-absent", "a.py")
    assert error.value.name == "flax-attn-absent"
    for _ in range(2):  # what could not be loaded is not kept
        with pytest.raises(ModuleNotFoundError, match=r"rich has no file rich/absent\.py"):
            by_path("rich", "rich/absent.py")
