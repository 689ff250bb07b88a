"""The fourth trial: faults that a generator makes in the source of ports."""

from importlib import import_module

import pytest

from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

pytest.importorskip("torch", reason="the harness compares with torch")
pytest.importorskip("transformers", reason="some of the blocks are its classes")
PLACE = "parity_tests.core.parity.trial"
subjects = import_module(f"{PLACE}.subjects").SUBJECTS
mutations = import_module(f"{PLACE}.mutations")
drawn = import_module(f"{PLACE}.draw_faults").drawn
answered = import_module(f"{PLACE}.answer").answered
compared = import_module(f"{PLACE}.answer").compared


def of(*names):
    return [subject for subject in subjects if subject.name in names]


def test_blocks_and_kinds_are_many():
    """29 blocks, hundreds of faults in each, a third of kinds that the catalogue lacks."""
    assert len(subjects) == len({subject.name for subject in subjects}) == 29
    kinds = {fault.kind for subject in subjects for fault in subject.faults()}
    assert len(kinds) > 35 and kinds >= {*mutations.LACKING}
    assert 4 * len(mutations.LACKING) >= len(kinds)
    assert min(len(subject.faults()) for subject in subjects) >= 200


@pytest.mark.parametrize(
    "subject",
    with_nightly(subjects[15:], commit=lambda subject: subject.name in ("Mixer", "GAT")),
    ids=lambda subject: subject.name,
)
def test_a_right_port_is_equal(subject):
    """Of the older list of blocks another test shows it."""
    report = compared(subject, subject.port, 0)
    assert report.certain, str(report)
    assert any(row.kind == "gradient" and row.verdict.shows for row in report.rows)


def test_faults_are_drawn_by_a_seed():
    one, same, other = (
        [str(fault) for fault, _, _ in drawn(of("Phi3MLP"), 3, seed)] for seed in (5, 5, 6)
    )
    assert one == same and one != other


def test_a_few_faults_are_placed_and_named():
    faults = drawn(of("Phi3MLP", "Mixer"), 4, 11, lacking=0.0)
    answers = [answered(*each) for each in faults]
    assert all(x.found and x.placed and not x.misled for x in answers), answers
    assert sum(x.named for x in answers) >= 3, answers


def test_what_the_trial_counts_against_the_harness(monkeypatch):
    """A change that does not hold on the second draw misleads, and names nothing."""
    answer = import_module(f"{PLACE}.answer")
    monkeypatch.setattr(answer, "gives_flax", lambda *_: False)
    (each,) = drawn(of("Phi3MLP"), 1, 11, lacking=0.0)
    said = answer.answered(*each)
    assert said.found and said.misled and not said.named, said


@pytest.mark.parametrize("part", range(30), ids=lambda n: f"third{n // 10 + 1}-{n}")
def test_six_hundred_faults(part):
    """20 of usual kinds in each part: nearly all placed, most named, next to none misled."""
    answers = [answered(*each) for each in drawn(subjects[part % 29 :][:4], 20, part, lacking=0.0)]
    text = "\n".join(map(str, answers))
    assert sum(x.placed for x in answers) >= 18, text
    assert sum(x.named for x in answers) >= 14, text
    assert sum(x.misled for x in answers) <= 2, text
