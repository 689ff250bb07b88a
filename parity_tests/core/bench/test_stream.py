"""Rows of ratios are shown as they are measured, each once, under the heading of their table."""

from dataclasses import replace

import pytest

from flax_attn.bench import result, table
from flax_attn.bench.stream import Stream
from flax_attn.bench.workload import BOTH, FORWARD, Workload

from .conftest import MACHINE

WIDE = Workload(256, 64, 3, 2)


def race(w, which=FORWARD, **seconds):
    rows = {"flax_attn": 1.0, **seconds}
    row = result.Row(w, which, "", "", status="timed")
    return [replace(row, competitor=n, family=n, seconds=[s]) for n, s in rows.items()]


@pytest.fixture
def stream():
    stream = Stream(result.Results("", "", MACHINE, []), lambda line: stream.lines.append(line))
    stream.lines = []

    def more(rows):
        before = len(stream.lines)
        stream.results.rows.extend(rows)
        stream.update()
        return [line.strip("\n") for line in stream.lines[before:]]

    stream.more = more
    return stream


def test_a_row_comes_when_it_is_measured_and_its_heading_once(stream):
    title = "time over that of flax_attn: head width 64, causal, float32"
    heading, header, first = stream.more(race(WIDE, torch=2.0))
    assert heading == title
    assert header.split() == ["T", "B", "x", "N", "pass", "flax_attn", "of", "peak", "torch"]
    shape, share = ["256", "2", "x", "3", "fwd", "1", "s"], first.split()[7:-1]
    assert first.split() == [*shape, *share, "2x"] and share[1:] == ["%"]
    assert stream.more([]) == []
    (second,) = stream.more(race(replace(WIDE, length=512), BOTH, torch=3.0))
    assert second.split()[:7] == ["512", "2", "x", "3", "fwd+bwd", "1", "s"]
    assert second.split()[-1] == "3x"
    assert header.index("torch") + len("torch") == first.index("2x") + len("2x")


def test_another_group_has_a_heading_of_its_own(stream):
    stream.more(race(WIDE, torch=2.0))
    heading, _, row = stream.more(race(replace(WIDE, width=128), jax=4.0))
    assert "head width 128" in heading and row.endswith("4x")


def test_what_is_left_for_the_end_is_every_figure(stream):
    stream.more(race(WIDE, torch=2.0))
    assert [rest.title[:12] for rest in stream.rest()] == ["every figure"]


def test_without_a_table_of_ratios_the_figures_are_shown(stream):
    others = {f"other{i}": 2.0 for i in range(table.MAX_COLUMNS)}
    lines = stream.more(race(WIDE, **others))
    assert lines[0].startswith("every figure") and len(lines) == 3 + len(others)
    assert stream.rest() == []
