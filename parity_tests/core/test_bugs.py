"""The lists of planted bugs fit the code, and the runner chooses the tests that enter a patch."""

import ast
import builtins
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from .bugs import __main__ as command
from .bugs import choice, trial
from .bugs.bug import HERE, ROOT, Bug, bugs
from .bugs.choice import MOST, SECONDS, Entered, chosen
from .bugs.entered import Recorder
from .bugs.failures import Failures
from .bugs.hook import VARIABLE, Loader, tell_children
from .bugs.marks import NAME, around, blocks, changed_lines, mark
from .bugs.trial import IMPORT, Copy, Outcome, Record, hash_of, judged

SOURCE = '''
"""Words."""
LIMIT = 1

def one(x):
    """Words."""
    if x > LIMIT:
        return 2
    elif x == LIMIT:
        y = 1
    else:
        y = 0
    try:
        return y / x
    except ZeroDivisionError:
        return two(x)

def two(x):
    match x:
        case 0:
            return 0

def three(x):
    return x
'''.lstrip()


def test_every_bug_is_a_patch_of_its_file():
    wrong, texts = [], {}
    for bug in bugs():
        text = texts.setdefault(bug.file, (ROOT / bug.file).read_text("utf-8"))
        try:
            ast.parse(bug.patched(text))
        except (SyntaxError, ValueError) as error:
            wrong.append(f"{bug.id}: {error}")
        old, new = (re.sub(r"#.*|\s", "", part) for part in (bug.old, bug.new))
        wrong += [f"{bug.id}: the patch changes no code"] * (old == new)
    assert not wrong, "Renew these bugs and keep their ids:\n" + "\n".join(wrong)


def test_ids_are_unique_and_every_room_has_two_bugs():
    ids, rooms = (Counter(getattr(bug, name) for bug in bugs()) for name in ("id", "room"))
    twice = [name for name, count in ids.items() if count > 1]
    assert not twice, f"Two bugs have one id: {twice}."
    lists = {path.stem for path in HERE.glob("*.toml")}
    few = sorted(room for room in lists if rooms[room] < 2)
    assert lists and not few, f"These rooms have fewer than two bugs: {few}."


def test_behaviours_are_sentences_and_files_are_of_the_library():
    wrong = [bug.id for bug in bugs() if not bug.behaviour.endswith(".")]
    wrong += [bug.id for bug in bugs() if not bug.file.startswith("flax_attn/")]
    assert not wrong, f"A sentence and a file of flax_attn are asked of {wrong}."


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[bug", "room.toml is not TOML: "),
        ("bug = 1", "bug of room.toml must have behaviour, file, old, new and no more"),
        ("[bug]\nid = 'a'", "bug of room.toml must have behaviour, file, old, new"),
        ("[bug]\nbehaviour=1\nfile=''\nold=''\nnew=''", "must have text for behaviour."),
    ],
)
def test_a_list_that_is_wrong_is_refused_in_a_sentence(tmp_path, text, error):
    (tmp_path / "room.toml").write_text(text)
    with pytest.raises(ValueError) as caught:
        bugs(tmp_path)
    assert error in str(caught.value)


def test_a_patch_needs_its_old_text_once_and_another_new_one():
    bug = Bug("a", "room", "It fails.", "flax_attn/a.py", "x", "y")
    assert bug.patched("ax") == "ay"
    for text, new in (("axx", "y"), ("a", "y"), ("x", "x")):
        with pytest.raises(ValueError, match="bug a"):
            Bug("a", "room", "It fails.", "flax_attn/a.py", "x", new).patched(text)


def test_blocks_are_the_bodies_of_functions_and_branches():
    known = blocks(ast.parse(SOURCE))
    lines = SOURCE.splitlines()
    named = {block.line: lines[block.line - 1].strip() for block in known}
    assert named == {
        4: "def one(x):",
        7: "return 2",
        9: "y = 1",
        11: "y = 0",
        15: "return two(x)",
        17: "def two(x):",
        20: "return 0",
        22: "def three(x):",
    }
    assert [x.line for x in around(known, 9)] == [9, 4]
    assert [x.line for x in around(known, 8)] == [4]
    assert [x.line for x in around(known, 13)] == [4]
    assert around(known, 2) == []
    assert [x.line for x in known if x.is_function] == [4, 17, 22]


def test_marks_tell_the_blocks_that_are_entered(monkeypatch):
    tree, entered = ast.parse(SOURCE), []
    mark(tree, "a.py")
    monkeypatch.setattr(builtins, NAME, entered.append, raising=False)
    names = {}
    exec(compile(tree, "a.py", "exec"), names)
    assert names["one"](0) == 0
    assert entered == ["a.py:4", "a.py:11", "a.py:15", "a.py:17", "a.py:20"]
    assert names["one"].__doc__ == "Words." and names["one"].__code__.co_firstlineno == 4


def test_changed_lines_are_those_of_the_text_before():
    assert changed_lines("a\nb\nc\n", "a\nB\nc\n") == [2]
    assert changed_lines("a\nb\nc\n", "a\nc\n") == [2]
    assert changed_lines("a\nb\nc\n", "a\nb\nx\nc\n") == [2]
    assert changed_lines("a\nb\n", "x\na\nb\n") == [1]


def entered(tmp_path, lines):
    """A record of tests, each with its seconds, the lines that it enters, and how it ended."""
    path = tmp_path / "entered"
    with path.open("w") as file:
        for test, seconds, names, outcome in lines:
            line = {"test": test, "seconds": seconds, "outcome": outcome, "entered": names}
            file.write(json.dumps(line) + "\n")
    return Entered.read(path)


def bug_of(old, new):
    return Bug("a", "room", "It fails.", "a.py", old, new)


def test_tests_of_the_patched_branch_are_chosen_the_cheapest_first(tmp_path):
    record = entered(
        tmp_path,
        [
            ("slow", 9.0, ["a.py:4", "a.py:11"], "passed"),
            ("quick", 1.0, ["a.py:4", "a.py:11"], "passed"),
            ("red", 0.1, ["a.py:11"], "failed"),
            ("skipped", 0.1, ["a.py:11"], "skipped"),
            ("elsewhere", 0.1, ["a.py:4", "a.py:9", "ba.py:11"], "passed"),
        ],
    )
    assert chosen(bug_of("y = 0", "y = 1"), SOURCE, record) == ["quick", "slow"]
    assert chosen(bug_of("x > LIMIT", "x >= LIMIT"), SOURCE, record) == [
        "elsewhere",
        "quick",
        "slow",
    ]


def test_where_a_condition_is_patched_those_go_first_for_which_it_held(tmp_path):
    lines = [("quick", 1.0, ["a.py:4"], "passed"), ("slow", 9.0, ["a.py:4", "a.py:7"], "passed")]
    record = entered(tmp_path, lines)
    assert chosen(bug_of("x > LIMIT", "x > 9"), SOURCE, record) == ["slow", "quick"]


def test_where_nobody_enters_the_branch_the_function_or_the_file_is_asked(tmp_path, monkeypatch):
    lines = [("a", 2.0, ["a.py:4"], "passed"), ("b", 1.0, ["a.py:22"], "passed")]
    lines += [("c", 1.0, ["ba.py:4"], "passed")]
    record = entered(tmp_path, lines)
    assert chosen(bug_of("y = 0", "y = 1"), SOURCE, record) == ["a"]
    assert chosen(bug_of("return 0", "return 1"), SOURCE, record) == ["b", "a"]
    assert chosen(bug_of("LIMIT = 1", "LIMIT = 2"), SOURCE, record) == ["b", "a"]
    assert chosen(bug_of("y = 0", "y = 1"), SOURCE, entered(tmp_path, lines[2:])) == []
    (tmp_path / "a.py").touch()  # after the record, whose lines are no longer those of the file
    monkeypatch.setattr(choice, "ROOT", tmp_path)
    assert chosen(bug_of("y = 0", "y = 1"), SOURCE, replace(record, made=0.0)) == ["b", "a"]


def test_the_files_take_turns(tmp_path):
    names = {"a.py::one": 1.0, "a.py::two": 2.0, "b.py::one": 3.0, "b.py::two": 0.5}
    lines = [(test, seconds, ["a.py:22"], "passed") for test, seconds in names.items()]
    bug = bug_of("    return x\n", "    return -x\n")
    order = ["b.py::two", "a.py::one", "a.py::two", "b.py::one"]
    assert chosen(bug, SOURCE, entered(tmp_path, lines)) == order


def test_no_more_tests_are_chosen_than_fit(tmp_path):
    long = [(f"{i:03}", SECONDS / 3, ["a.py:22"], "passed") for i in range(9)]
    many = [(f"{i:03}", 0.0, ["a.py:22"], "passed") for i in range(MOST + 9)]
    one = [("whole", SECONDS + 1, ["a.py:22"], "passed")]
    bug = bug_of("    return x\n", "    return -x\n")
    assert chosen(bug, SOURCE, entered(tmp_path, long)) == ["000", "001", "002"]
    assert len(chosen(bug, SOURCE, entered(tmp_path, many))) == MOST
    assert chosen(bug, SOURCE, entered(tmp_path, one)) == ["whole"]


def test_the_recorder_writes_a_line_for_each_test(tmp_path, monkeypatch):
    monkeypatch.setattr(builtins, NAME, None, raising=False)
    for name in (VARIABLE, "PYTHONPATH"):
        monkeypatch.setenv(name, "")
    recorder = Recorder(tmp_path / "entered")
    for test, outcomes in {"a": ["passed"], "b": ["passed", "failed"], "c": ["skipped"]}.items():
        protocol = recorder.pytest_runtest_protocol(SimpleNamespace(nodeid=test))
        next(protocol)
        getattr(builtins, NAME)(f"{test}.py:1")
        for outcome in outcomes:
            recorder.pytest_runtest_logreport(SimpleNamespace(outcome=outcome))
        with pytest.raises(StopIteration):
            protocol.send(True)
    recorder.pytest_unconfigure()
    lines = [json.loads(line) for line in (tmp_path / "entered").read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["passed", "failed", "skipped"]
    assert [line["entered"] for line in lines] == [["a.py:1"], ["b.py:1"], ["c.py:1"]]
    assert Entered.read(tmp_path / "entered").tests == {"a.py:1": {"a"}}


def test_a_process_that_a_test_starts_adds_its_marks(tmp_path, monkeypatch):
    for name in (VARIABLE, "PYTHONPATH"):
        monkeypatch.setenv(name, "")
    file = tell_children(tmp_path)
    call = "from flax_attn._internal.devices import fake_devices as f; f(2), f(3)"
    subprocess.run([sys.executable, "-c", call], check=True)
    lines = file.read_text().splitlines()
    assert len([line for line in lines if line.startswith("flax_attn/_internal/devices.py:")]) == 1


def test_a_module_is_loaded_with_its_marks():
    code = Loader("flax_attn.taps", str(ROOT / "flax_attn/taps.py")).get_code("flax_attn.taps")
    tap = next(x for x in code.co_consts if getattr(x, "co_name", "") == "tap")
    assert f"flax_attn/taps.py:{tap.co_firstlineno}" in tap.co_consts


def test_failed_tests_are_written_one_by_one(tmp_path):
    failures = Failures(tmp_path / "failures")
    for test, failed in (("a", False), ("b", True)):
        failures.pytest_runtest_logreport(SimpleNamespace(nodeid=test, failed=failed))
    assert (tmp_path / "failures").read_text() == "b\n"


@pytest.mark.parametrize(
    ("status", "failed", "seen", "note"),
    [
        (0, (), (), ""),
        (1, ("a",), ("a",), ""),
        (5, (), (), "no test ran"),
        (2, (), (IMPORT,), "what pytest said"),
        (4, (), (IMPORT,), "what pytest said"),
        (-24, ("a",), ("a",), "ended by status -24"),
        (-24, (), (), "ended by status -24"),
    ],
)
def test_how_pytest_ends_tells_who_saw_a_bug(status, failed, seen, note):
    tests, said = judged(status, "what pytest said", failed)
    assert tests == seen and said.startswith(note) and bool(said) == bool(note)


def test_tests_that_are_gone_are_left_out_and_if_all_are_a_new_record_is_asked_for(
    tmp_path, monkeypatch
):
    copy, asked = Copy(tmp_path, ROOT / "docs"), []
    copy.scratch.joinpath("failures").touch()

    def run(*_, **__):
        asked.append((copy.scratch / "tests").read_text().split())
        gone = f"ERROR: not found: {copy.checkout}/a.py::gone\n" * ("a.py::gone" in asked[-1])
        return SimpleNamespace(returncode=4 if gone else 0, stdout="", stderr=f"\n{gone}")

    monkeypatch.setattr(trial.subprocess, "run", run)
    assert copy._run(["a.py::gone", "a.py::there"], True) == ((), "")
    assert asked == [["a.py::gone", "a.py::there"], ["a.py::there"]]
    with pytest.raises(RuntimeError, match=r"Record again .*/a\.py::gone"):
        copy._run(["a.py::gone"], True)


def test_a_bug_is_planted_in_a_copy_and_taken_out_again(tmp_path, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    for name, text in {"a.py": "x = 1\n", ".gitignore": "b.py\n", "b.py": ""}.items():
        (root / name).write_text(text)
    copy, texts = Copy(tmp_path / "copy", root), []

    def run(self, tests, only_commit):
        texts.append((self.checkout / "a.py").read_text())
        return tuple(tests), ""

    monkeypatch.setattr(Copy, "_run", run)
    outcome = copy.try_bug(bug_of("1", "2"), ["test"], True)
    assert texts == ["x = 2\n"] and outcome.seen == ("test",)
    assert outcome.hash == hash_of(bug_of("1", "2"), True, root)
    assert sorted(x.name for x in copy.checkout.iterdir()) == [".gitignore", "a.py"]
    assert (copy.checkout / "a.py").read_text() == (root / "a.py").read_text() == "x = 1\n"
    assert copy.try_bug(bug_of("1", "2"), [], True).note == "no test enters the file"


def test_an_outcome_holds_for_the_patch_and_the_file_that_it_was_made_with(tmp_path):
    bug, other = bugs()[:2]
    outcome = Outcome(bug.id, hash_of(bug, True), ("a", "b"), 3, 1.5, "é")
    Record(tmp_path / "record").add(outcome)
    again = Record(tmp_path / "record")
    assert again.outcome(bug, True) == outcome
    assert again.outcome(bug, False) is None and again.outcome(other, True) is None
    renewed = Bug(**{**vars(bug), "new": bug.new + "# more\n"})
    assert again.outcome(renewed, True) is None


def test_an_outcome_stands_while_a_test_that_saw_the_bug_runs():
    outcome = Outcome("a", "", ("first", "second"), 3, 1.0)
    assert outcome.stands({"second"}, 5) and not outcome.stands({"third"}, 5)
    assert Outcome("a", "", (IMPORT,), 3, 1.0, enough=1).stands((), 5)
    assert not Outcome("a", "", (), 3, 1.0).stands({"first"}, 5)


def test_an_outcome_of_fewer_tests_is_none_of_more():
    outcome = Outcome("a", "", ("first",), 3, 1.0, enough=1)
    assert outcome.stands({"first"}, 1) and not outcome.stands({"first"}, 2)


def test_the_command_tells_what_is_known_and_names_the_unseen(tmp_path, capsys):
    bug, other = bugs()[:2]
    entered(tmp_path, [("first", 1.0, [], "passed")])  # and none that enters the other's file
    record = Record(tmp_path / "record")
    record.add(Outcome(bug.id, hash_of(bug, False), ("first", "second", "third"), 3, 1.0))
    how = ["--entered", str(tmp_path / "entered"), "--record", str(tmp_path / "record")]
    assert command.main([bug.id, *how]) == 0
    printed = capsys.readouterr().out
    assert "second" in printed and "third" not in printed and "unseen" not in printed
    assert command.main([bug.id, other.id, *how]) == 1
    printed = capsys.readouterr().out
    assert f"unseen: {other.id}" in printed and f"{other.id}: no test enters the file" in printed


def test_the_command_refuses_an_unknown_bug(tmp_path, capsys):
    (tmp_path / "entered").write_text("")
    with pytest.raises(SystemExit):
        command.main(["window-off-by-two", "--entered", str(tmp_path / "entered")])
    assert "Did you mean window-off-by-one?" in capsys.readouterr().err
