"""What the command finds by its names: every way to have a list, every way to ask for a case."""

import sys
from functools import cache
from importlib import invalidate_caches
from pathlib import Path

import pytest

from flax_attn.command import parity_command
from flax_attn.parity import ParityError, Report
from flax_attn.parity.cases import certificate, golden
from flax_attn.parity.cases.collect import collect, listed, modules
from flax_attn.parity.cases.selection import select_cases
from flax_attn.parity.cases.workers import attempt
from flax_attn.parity.report import times

from .in_process import Here

OURS = "parity_tests"
LIST = "CAS" + "ES"  # in pieces, so that this file is none that holds cases
MINE = """
from flax import nnx


class HalfOfIt(nnx.Module):
    pass


class Other(nnx.Module):
    pass
"""
HELD = """
from flax_attn.parity import Case
from somebody.half_module import HalfOfIt, Other


def case(of=HalfOfIt, **more):
    return Case(of, more.pop("config", {}), reference="somebody.theirs.Half", x=(3, 4), **more)

"""
ONE = f"{HELD}{LIST} = [case(name='good'), case(name='bad')]"
WAYS = {
    "plain": f"{HELD}{LIST} = [case()]",
    "annotated": f"{HELD}{LIST}: list = [case()]",
    "in_a_branch": f"{HELD}if True:\n    {LIST} = [case()]",
    "by_name": f"from elsewhere.held import {LIST}",
    "by_names": f"from elsewhere.held import (\n    {LIST},\n    case,\n)",
}
LEFT = {
    "untouched": "raise RuntimeError",
    "star": "from somebody.cases import *\nraise RuntimeError",
    "of_another": f"import other\nother.{LIST}\nraise RuntimeError",
}


@pytest.fixture
def somewhere(tmp_path, monkeypatch):
    """Writes packages where one stands; each test forgets them."""
    known, path = {*sys.modules}, list(sys.path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(**packages):
        for package, files in packages.items():
            (tmp_path / package).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (tmp_path / package / f"{name}.py").write_text(text)
        invalidate_caches()
        return tmp_path

    yield write
    sys.path[:] = path
    for name in {*sys.modules} - known:
        if name.partition(".")[0] in ("somebody", "elsewhere", "held_cases"):
            del sys.modules[name]


@cache
def once(work, item):
    """What this library itself has is listed once for all tests."""
    return attempt(work, item)


class HereOnce(Here):
    def as_completed(self, work, items):
        if work is listed and items and items[0][0] == OURS:
            return ((i, once(work, item)) for i, item in enumerate(items))
        return super().as_completed(work, items)


def package(**files):
    return {"__init__": "", "half_module": MINE, **files}


def titles(*names):
    return [case.title for case in asked(*names).cases]


def asked(*names):
    return select_cases(OURS, names, HereOnce())


def whats_wrong(*names):
    with pytest.raises(ValueError) as caught:
        titles(*names)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("way", WAYS)
def test_a_list_is_found_whichever_way_a_module_has_it(way, somewhere):
    elsewhere = {"__init__": "", "held": ONE}
    somewhere(somebody=package(cases=WAYS[way]), elsewhere=elsewhere)
    assert modules("somebody") == ["somebody.cases"]
    assert len(collect("somebody")) in (1, 2)


@pytest.mark.parametrize("way", LEFT)
def test_a_file_without_a_trace_of_a_list_stays_unread(way, somewhere):
    somewhere(somebody=package(cases=ONE, left=LEFT[way]))
    assert modules("somebody") == ["somebody.cases"]


@pytest.mark.nightly
def test_a_list_that_two_modules_have_is_proven_once(somewhere):
    also = f"from .cases import {LIST}"
    more = f"{also}, case\n{LIST} = [*{LIST}, case(name='third')]"
    somewhere(somebody=package(cases=ONE, also=also, more=more))
    assert len(modules("somebody")) == 3
    found = collect("somebody")
    assert [case.name for case in found] == ["good", "bad", "third"]
    assert [case.home.module for case in found] == [
        f"somebody.{n}" for n in ("cases", "cases", "more")
    ]
    assert len(titles("somebody")) == 3


def test_the_suite_reads_the_files_of_its_variants_alone():
    files = {path.stem for path in (Path(__file__).parents[2]).glob("test_*.py")}
    assert {name.removeprefix("parity_tests.") for name in modules("parity_tests")} == files


def test_a_file_by_its_path_may_have_its_list_from_anywhere(somewhere):
    root = somewhere(somebody=package(cases=ONE))
    (root / "held_cases.py").write_text("from somebody.cases import *")
    assert len(titles("held_cases.py")) == 2


def test_a_path_is_the_module_that_it_names(somewhere):
    root = somewhere(somebody=package(cases=ONE, inside=ONE.replace("bad", "worse")))
    (root / "held_cases.py").write_text(ONE)
    both = ["half_module[good|x=3x4|somebody.theirs.Half]"]
    both += [both[0].replace("good", "bad")]
    assert titles("held_cases.py") == titles("somebody/cases.py") == both
    assert titles(str(root / "held_cases.py"), "good") == both[:1]
    assert len(titles("somebody/")) == 4
    (case, *_) = collect("held_cases")
    case.home = case.home._replace(package="./held_cases.py")
    assert case.reproduce == f"flax-attn parity ./held_cases.py '{both[0]}'"


def test_a_missing_path_is_refused(somewhere):
    root = somewhere(somebody=package(cases=ONE))
    (root / "held_cases.py").write_text(ONE)
    (root / "held-cases-2.py").write_text(ONE)
    assert whats_wrong("held_case.py").startswith(
        "There is no file held_case.py: did you mean held_cases.py"
    )
    assert "held-cases-2 is no module's name" in whats_wrong("held-cases-2.py")
    (root / "json.py").write_text(ONE)  # another json is imported already
    (failed,) = asked("json.py").failed
    assert failed[0] == "json" and "is a module of the same name, json." in failed[1].text


def test_a_case_is_asked_for_by_its_variant_its_class_or_its_name(somewhere):
    somewhere(somebody=package(cases=f"{ONE}\n{LIST} += [case(Other, name='other')]"))
    good, bad, other = titles("somebody")
    assert titles("somebody", "good") == [good]
    assert titles("somebody", "good", "Other") == [good, other]
    assert titles("somebody", "half-module") == [good, bad, other]
    causal = titles("causal_attention")
    assert causal and titles("causal-attention") == titles("CausalAttention") == causal
    assert titles("somebody", "good", "causal-attention") == [good, *causal]
    assert titles("somebody", "OOD|") == [good] and titles("somebody", "half_module[b") == [bad]
    whole = [case.title for case in asked("causal_attention").known]
    assert titles("torch.nn.functional.scaled") == [x for x in whole if "functional.scaled" in x]
    somewhere(good={"__init__": ONE})
    assert titles("somebody", "good") == [good]  # what is known is no package


NEAR = {
    ("causal_atention",): "did you mean causal_attention",
    ("CausalAtention",): "did you mean CausalAttention",
    ("somebdy",): "did you mean somebody?",
    ("somebody", "goood"): "did you mean good?",
    ("somebody", "half_modle"): "did you mean half_module?",
    ("somebody", "half_module[god|x=3x4|somebody.theirs.Half]"): (
        "did you mean 'half_module[good|x=3x4|somebody.theirs.Half]'"
    ),
    ("somebody", "linaer"): "did you mean linear",
    ("somebody", "zzzz"): "the names are half_module, HalfOfIt, good, bad, attention_pool, axial, ",
    ("zzzz",): "the names are attention_pool, axial, bahdanau, causal_attention, ",
}


@pytest.mark.parametrize("names", NEAR, ids=" ".join)
def test_a_name_that_means_nothing_is_told_the_nearest(names, somewhere):
    somewhere(somebody=package(cases=ONE))
    text = whats_wrong(*names)
    assert text.startswith(f"{names[-1]!r} is no file, no package ") and NEAR[names] in text


def test_a_broken_module_is_told_whatever_else_is_asked_for(somewhere):
    somewhere(somebody=package(cases=ONE, broken=f"{LIST} = ["))
    for names in (["somebody"], ["somebody", "linear"], ["somebody", "nothing"]):
        found = asked(*names)
        ((name, failure),) = found.failed
        assert name == "somebody.broken"
        assert failure.text.startswith("SyntaxError: '[' was never closed (")
        assert failure.text.endswith("broken.py, line 1)") and failure.text.count("line") == 1
    assert not asked("somebody", "good").failed


@pytest.mark.parametrize("text", [f"{LIST} = []", f"{LIST} = ()", "x = 1", "import json"])
def test_an_empty_list_of_cases_is_refused(text, somewhere):
    root = somewhere(somebody=package(cases=text))
    (root / "held_cases.py").write_text(text)
    for name in ("somebody", "held_cases.py", "json"):
        assert whats_wrong(name).startswith(f"{name} holds no case: it has no list {LIST} of ")


def test_cases_of_several_classes_are_told_apart(somewhere):
    more = "case(), case(Other), case(Other, name='third'), case(Other, config={'n': 1})"
    somewhere(somebody=package(cases=f"{HELD}{LIST} = [{more}]"))
    end = "|x=3x4|somebody.theirs.Half]"
    wanted = [f"half_module[{part}{end}" for part in ("HalfOfIt", "Other", "third", "n=1")]
    assert titles("somebody") == wanted == [str(case) for case in collect("somebody")]
    assert titles("somebody", wanted[1]) == wanted[1:2]
    case = collect("somebody")[1]
    case.tells_class = False  # as pytest has it, which knows no list
    assert case.titles == (f"half_module[{end}", wanted[1])


def test_two_cases_with_one_name_are_refused_by_it(somewhere):
    somewhere(somebody=package(cases=f"{HELD}{LIST} = [case(seed=0), case(seed=1), case(Other)]"))
    ((name, failure),) = asked("somebody").failed
    assert name == "somebody.cases"
    assert failure.text == (
        "somebody.cases.CASES holds 2 cases with one name, half_module[HalfOfIt|x=3x4|"
        "somebody.theirs.Half]: give each a name of its own, Case(name=...)."
    )


def test_two_modules_with_one_name_are_not_recorded(somewhere):
    one = f"{HELD}{LIST} = [case()]"
    somewhere(somebody=package(cases=one, more=one))
    with pytest.raises(ParityError, match=r"2 cases have one name, .*somebody.cases, somebody.mor"):
        golden.record(collect("somebody"))


def test_messages_about_a_case_name_it_once():
    about = "half[good|x=3x4|somebody.theirs.Half]"
    for note in (f"{about} is not recorded in half.npz.", "KeyError: 'x'", "half is not here."):
        text = parity_command._report_text(Report(about, (), notes=(note,)))
        assert text.count(about) == 1 and text.startswith(about) and text.endswith(note)


def test_counts_of_one_are_singular():
    reports = [("half", "theirs", Report(f"half[{i}]", ())) for i in range(2)]
    for some, told in ((reports[:1], "1 case"), (reports, "2 cases")):
        (foot,) = parity_command.footer(parity_command.Results(), certificate.lines(some))
        assert foot.startswith(f"1 variant, {told}, nothing is proven; ")


def test_a_large_ratio_is_read_at_a_glance():
    ratios = (0.0, 1.04, 999.0, 1000.0, 3666431.0, 1e300, float("inf"), float("nan"))
    told = ["0.0x", "1.0x", "999.0x", "1e3x", "4e6x", "1e300x", "infx", "nanx"]
    assert [times(ratio) for ratio in ratios] == told
