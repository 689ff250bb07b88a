"""How long `parity NAME` will take: said at the start, and corrected by the first cases."""

from types import SimpleNamespace

import pytest

from flax_attn.command import cli, estimate, proving
from flax_attn.command.estimate import Estimate, duration
from flax_attn.parity.cases import known
from flax_attn.parity.cases.prove import jobs
from flax_attn.parity.cases.selection import Selection
from flax_attn.parity.cases.workers import Workers
from parity_tests.core.parity.test_command import judged

from .test_interrupt import place


def made(count, *, most=1, started=estimate.START_SECONDS):
    """An estimate for some cases, and its clock."""
    now = [100.0]
    some = jobs([place(at, "alpha") for at in range(count)], live=True)
    workers: Workers = SimpleNamespace(most=most)
    return Estimate(some, workers, started, lambda: now[0]), now


def test_the_first_line_says_how_long_and_how_many():
    some, _ = made(14)
    seconds = some.seconds_left(0) + estimate.FIRST_SECONDS
    assert some.line() == f"{duration(seconds)}: 14 cases"
    assert made(1)[0].line().endswith(": 1 case")
    assert made(14, most=2)[0].seconds_left(0) == some.seconds_left(0) / 2


def test_a_machine_whose_workers_start_slowly_takes_longer():
    usual = made(14)[0].seconds_left(0)
    assert made(14, started=3 * estimate.START_SECONDS)[0].seconds_left(0) == 3 * usual
    slowest = made(14, started=1e9)[0].seconds_left(0)
    assert slowest == estimate.SLOWEST * usual
    seconds = estimate.SLOWEST * (made(1)[0].seconds_left(0) + estimate.FIRST_SECONDS)
    assert made(1, started=1e9)[0].line() == f"{duration(seconds)}: 1 case"


def test_cases_with_dropout_and_eager_ones_count_for_more():
    plain, trained = place(0, "alpha"), place(1, "alpha")
    trained = trained._replace(title=trained.title.replace("|torch", ",train|torch"))
    workers: Workers = SimpleNamespace(most=1)
    eager, after = jobs([plain, trained], live=True)
    assert eager.eager and not after.eager
    left = [Estimate([job], workers).seconds_left(0) for job in (eager, after)]
    seconds = estimate.SECONDS
    assert left == [seconds["plain"] + seconds["eager"], seconds["train"]]


def test_the_rest_is_estimated_from_those_that_are_done():
    some, now = made(10)
    some.line()
    expected = some.seconds_left(0)
    first = estimate.SECONDS["plain"] + estimate.SECONDS["eager"] + estimate.FIRST_SECONDS
    now[0] += 4 * first  # four times as long as the table says
    rest = 4 * (expected - first + estimate.FIRST_SECONDS)
    assert abs(some.seconds_left(1) - rest) < 1e-6
    assert some.left(1) == f"{duration(rest)} left" and some.left(10) == ""


@pytest.mark.parametrize("pace, word", [(1.0, ""), (5.0, "longer"), (0.1, "less")])
def test_a_wrong_estimate_is_corrected_once(pace, word):
    some, now = made(40)
    some.line()
    done = estimate.CORRECTED_CASES
    now[0] += pace * (
        estimate.FIRST_SECONDS + estimate.SECONDS["eager"] + done * estimate.SECONDS["plain"]
    )
    text = some.correction(done)
    assert bool(text) == bool(word) and word in text
    assert some.correction(done - 1) == some.correction(done + 1) == ""


@pytest.mark.parametrize("options", [("x",), ("--all",)])
def test_the_command_says_it_before_the_first_case(options, monkeypatch, capsys):
    cases = [place(at, "alpha") for at in range(14)]
    monkeypatch.setattr(proving, "select_cases", lambda *_: Selection(cases, cases, []))
    monkeypatch.setattr(Workers, "start", lambda *_: None)
    monkeypatch.setattr(Workers, "call", lambda *_: proving.Machine("cpu", "cpu", 1))
    monkeypatch.setattr(proving, "_bundled_layers", lambda *_: [])
    monkeypatch.setattr(known, "check_names", lambda *_: None)
    heard = []

    def prove(*_):
        heard.append(capsys.readouterr().out)
        yield from [judged(1.0)] * 14

    monkeypatch.setattr(proving, "prove", prove)
    assert cli.main(["parity", *options]) == 0
    assert heard[0].splitlines()[-1].startswith("about ") and heard[0].endswith(": 14 cases\n")
