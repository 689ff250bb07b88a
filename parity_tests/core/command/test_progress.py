"""What a long command says while it runs: lines in a pipe, a bar on a terminal, results apart."""

import io
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from flax_attn._internal import progress as _progress
from flax_attn._internal.progress import Progress


def wait_until(condition, seconds=20.0):
    """Until another thread has done its part."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(_progress, "SECONDS_BETWEEN_LINES", 0.01)


def test_in_a_pipe_lines_go_to_stderr_and_results_to_stdout(fast, capsys):
    err = ""

    def heard():
        nonlocal err
        err += capsys.readouterr().err
        return "run: torch, 1 of 3, about 0 s left (0 s)" in err

    console = Console(file=io.StringIO())
    with Progress("run", console) as progress:
        progress.begin(3)
        progress.advance()
        progress.at("torch")
        wait_until(heard)
        progress.write_line("a result")
    assert console.file.getvalue() == "a result\n"
    assert err.startswith("run: ") and "a result" not in err


def test_progress_shows_the_time_left(monkeypatch):
    clock = iter([0, 5, 15, 25, 35])  # it begins at 5
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    progress = Progress("run", Console())
    progress.begin(3)
    assert progress.text == "starting, 0 of 3"
    for text in ("a, 1 of 3, about 20 s left", "b, 2 of 3, about 10 s left", "c, 3 of 3"):
        progress.advance(text[0])
        assert progress.text == text


def test_a_short_command_prints_no_progress(capsys):
    with Progress("run", Console()) as progress:
        progress.write_line("a result")
    assert capsys.readouterr() == ("a result\n", "")


def test_no_progress_is_printed_after_the_end(fast, capsys):
    with pytest.raises(KeyboardInterrupt), Progress("run", Console()):
        raise KeyboardInterrupt
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_on_a_terminal_a_bar_is_drawn_and_gone_at_the_end(fast, capsys):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60)
    with Progress("run", console) as progress:
        progress.begin(3)
        progress.advance("window")
        progress._bar.refresh()
        progress.write_line("a result")
    drawn = screen.getvalue()
    assert "window, 1 of 3, about 0 s left \x1b[33m0:00:00" in drawn and "a result\n" in drawn
    assert drawn.endswith("\x1b[1A\x1b[2K")  # one line up, and it is cleared
    assert capsys.readouterr().err == ""


def test_a_piped_result_holds_no_bar_where_stderr_is_a_terminal(monkeypatch, capsys):
    screen = io.StringIO()
    made = _progress.Console

    def console(stderr):
        return made(file=screen, force_terminal=True, width=60, stderr=stderr)

    monkeypatch.setattr(_progress, "Console", console)
    with Progress("run", Console()) as progress:
        progress.begin(2)
        progress.write_line("a result")
        print("and another")
    assert capsys.readouterr().out == "a result\nand another\n"
    assert "starting, 0 of 2" in screen.getvalue() and "result" not in screen.getvalue()
