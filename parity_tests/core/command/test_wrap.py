"""What people read wraps at words, and no command, path or name is cut."""

import re
import subprocess
import sys

import pytest

from flax_attn.command import cli
from flax_attn.command.wrap import wrapped

SENTENCE = "the quick brown fox jumps over the lazy dog and then some more of the same"


def test_lines_wrap_at_words_and_short_ones_stay():
    lines = wrapped(SENTENCE, 30).splitlines()
    assert max(map(len, lines)) <= 30 and " ".join(lines) == SENTENCE
    assert wrapped("two\n  lines  of a table", 30) == "two\n  lines  of a table"


def test_no_word_is_broken():
    path = "/a/very/long/path-with-hyphens/that/is/longer/than/the/line.json"
    assert wrapped(f"it is at {path} now", 30).splitlines() == ["it is at", path, "now"]
    hyphens = wrapped("it takes --no-cache or --all-figures here", 17)
    assert hyphens.splitlines() == ["it takes", "--no-cache or", "--all-figures", "here"]


def test_indentation_and_columns_are_kept():
    assert wrapped(f"    {SENTENCE}", 40).splitlines()[1].startswith("    ")
    lines = wrapped(f"blockwise  {SENTENCE}", 40).splitlines()
    assert lines[0].startswith("blockwise  the quick") and lines[1].startswith(" " * 11 + "over")
    assert max(map(len, lines)) <= 40


@pytest.mark.parametrize(
    "line",
    [
        "  see it again  flax-attn parity 'multi_head[d_in=3|x=2x6x3|torch_ref.MultiHead]'",
        "| layer | equal to | backends | devices | params | float64 | grads | decoded | verdict |",
    ],
)
def test_commands_and_tables_are_not_wrapped(line):
    assert wrapped(line, 40) == line


def test_code_in_a_sentence_stays_on_one_line():
    text = "this needs torch, which is not here: pip install 'flax-attn[torch]' brings it"
    assert "pip install 'flax-attn[torch]'" in wrapped(text, 48).splitlines()[1]
    assert wrapped("the quick brown fox `a b c d e f`", 26).splitlines()[1] == "`a b c d e f`"
    long = wrapped("`flax-attn bench --seq 64,128 --heads 2`", 20)
    assert max(map(len, long.splitlines())) <= 20


LONG = {
    "xyzzy": "there is no command 'xyzzy': the commands are parity, record,",
    "bench --seq 4k:1k": "--seq takes lengths such as 512,1024 or a range",
    "parity nothing_like_it": "the names are attention_pool,",
    "explain --q 1 2 3 4 --mask Causl --nosuch": "there is no option --nosuch",
}


@pytest.mark.nightly
@pytest.mark.parametrize("line", LONG)
def test_errors_fit_80_columns_in_a_pipe(line, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS")
    try:
        assert cli.main(line.split()) == 2
    except SystemExit as end:
        assert end.code == 2
    text = capsys.readouterr().err
    assert max(map(len, text.splitlines())) <= 80 and len(text) > 80
    assert LONG[line] in " ".join(text.split())


@pytest.mark.parametrize("command", ["parity", "bench"])
def test_help_breaks_no_name(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if re.search(r"\w-$", line)]


def test_the_width_of_a_pipe_is_80(tmp_path):
    line = [sys.executable, "-m", "flax_attn", "parity", "--json", str(tmp_path / "no" / "x.json")]
    run = subprocess.run(line, capture_output=True, text=True, env=None)
    assert run.returncode == 2 and "there is no folder" in run.stderr
