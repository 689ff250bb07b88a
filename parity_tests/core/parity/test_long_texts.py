"""Long refusals and reports fit a screen; the whole text is at hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, Report, Row, compare, judge, plan

torch = pytest.importorskip("torch", reason="the harness compares with torch")

X = np.random.RandomState(0).standard_normal((2, 6))


def pair(count):
    """Modules with `count` linear layers each, whose names differ."""
    theirs, mine = torch.nn.Module(), nnx.Module()
    for i in range(count):
        letters = chr(97 + i % 26) * (1 + i // 26)
        setattr(theirs, f"theirs_{letters}", torch.nn.Linear(3 + i, 5 + i))
        setattr(mine, f"mine_{letters}", nnx.Linear(3 + i, 5 + i, rngs=nnx.Rngs(0)))
    return theirs, mine


@pytest.mark.nightly
def test_a_long_refusal_gives_its_rules_first():
    with pytest.raises(ParityError) as caught:
        plan(*pair(30))
    lines = str(caught.value).split("\n")
    assert len(lines) <= 20 and lines[1] == "you may mean:" and lines[2].startswith("  Rule(")
    assert lines[-1].endswith("problems more: the error's `full` has all")
    shown = [line for line in lines if line.startswith("  - ")]
    full = caught.value.full.split("\n")
    problems = [line for line in full if line.startswith("  - ")]
    assert shown and len(problems) == 120 and problems[: len(shown)] == shown
    assert f"and {120 - len(shown)} problems more" in lines[-1]


@pytest.mark.nightly
def test_a_short_refusal_is_whole():
    with pytest.raises(ParityError) as caught:
        plan(*pair(1))
    assert caught.value.full == str(caught.value) and "more" not in str(caught.value)


def test_a_long_report_fits_a_screen():
    right, wrong = judge.same_function(np.ones(2), np.ones(2)), judge.failed_fact("wrong")
    rows = (Row("output", "output", "float64", "jit", right), Row("up", "exact", "", "", wrong))
    notes = tuple(f"{chr(97 + i % 26) * (1 + i // 26)} is odd" for i in range(90))
    report = Report("long", rows, notes=notes, reproduce="flax-attn parity this")
    lines, full = str(report).split("\n"), report.text(full=True).split("\n")
    assert len(lines) == 60 and len(full) > 90 and lines[:50] == full[:50]
    assert lines[-3].endswith("more: report.text(full=True)")
    assert lines[-2:] == full[-2:] and lines[-2].startswith("  see it again")
    hidden = int(lines[-3].split()[1])
    assert len(full) - hidden == 59


class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(4, 6)

    def forward(self, x):
        y = self.up(x)
        return self.down(torch.sin(3 * y[:, :4]) - y[:, 4:] ** 3)


class Exchanged(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(4, 6, rngs=rngs)

    def __call__(self, x):
        y = self.up(x)
        return self.down(jnp.sin(3 * y[:, 4:]) - y[:, :4] ** 3)


@pytest.mark.nightly
def test_messages_do_not_print_the_end_of_an_open_slice():
    report = compare(Halves(), Exchanged(), X, dtypes=("float64",), eager=False)
    assert "exchanged: another order of the one from 0 and the one from 4" in report.first.hint, (
        report
    )
    assert "9223372036854775807" not in str(report)


@pytest.mark.nightly
def test_a_short_report_is_whole():
    report = compare(torch.nn.Tanh(), nnx.Sequential(nnx.tanh), X, dtypes=("float64",))
    assert str(report) == report.text(full=True)
