"""Faults that a generator makes in ports are found and placed, and most of them named."""

from itertools import islice

import jax
import pytest

pytest.importorskip("torch", reason="the harness compares with torch")
pytest.importorskip("transformers", reason="some of the blocks are its classes")

from parity_tests.faults import answer, drawn
from parity_tests.mutations import LACKING, mutations, rewrites

pytestmark = pytest.mark.nightly

BLOCKS = drawn.blocks()


def of(*names):
    return [block for block in BLOCKS if block.name in names]


def test_faults_are_drawn_from_many_blocks_and_kinds():
    """29 blocks, hundreds of faults in each, a third of kinds that the catalogue lacks."""
    made = {block.name: drawn.faults(block.name) for block in BLOCKS}
    kinds = {fault.kind for faults in made.values() for fault in faults}
    assert len(made) == 29 and len(kinds) > 35 and kinds >= {*LACKING}
    assert 4 * len(LACKING) >= len(kinds)
    assert min(map(len, made.values())) >= 200


def test_faults_are_drawn_by_a_seed():
    one, same, other = (
        [str(fault) for fault, _, _ in drawn.drawn(of("Phi3MLP"), 3, seed)] for seed in (5, 5, 6)
    )
    assert one == same and one != other


def test_a_few_faults_are_placed_and_named():
    faults = drawn.drawn(of("Phi3MLP", "Mixer"), 4, 11, lacking=0.0)
    answers = [answer.answered(*each) for each in faults]
    assert all(x.found and x.placed and not x.misled for x in answers), answers
    assert sum(x.named for x in answers) >= 3, answers


def test_a_change_that_fails_on_the_second_draw_counts_as_misleading(monkeypatch):
    """A change that does not hold on the second draw misleads, and names nothing."""
    monkeypatch.setattr(answer, "gives_flax", lambda *_: False)
    (each,) = drawn.drawn(of("Phi3MLP"), 1, 11, lacking=0.0)
    said = answer.answered(*each)
    assert said.found and said.misled and not said.named, said


@pytest.mark.parametrize("part", range(30), ids=lambda n: f"third{n // 10 + 1}-{n}")
def test_six_hundred_faults(part):
    """20 of usual kinds in each part: nearly all placed, most named, next to none misled."""
    some = BLOCKS[part % 29 :][:4]
    answers = [answer.answered(*each) for each in drawn.drawn(some, 20, part, lacking=0.0)]
    text = "\n".join(map(str, answers))
    assert sum(x.placed for x in answers) >= 18, text
    assert sum(x.named for x in answers) >= 14, text
    assert sum(x.misled for x in answers) <= 2, text


# Two JAX sides: the same faults, and rewrites, in the text of a function.

FUNCTIONS = {
    "JAX formula": "formula",
    "vmap over heads": "each_head",
    "JAX loop": "looped",
    "JAX MLP": "mlp",
}
EACH = 4  # faults or rewrites of a seed


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", [mutations, rewrites], ids=lambda f: f.__name__)
def test_a_function_with_a_fault_is_different_and_a_rewrite_is_equal(kind, seed):
    name = list(FUNCTIONS)[seed % len(FUNCTIONS)]
    tried = list(islice(drawn.functions(name, FUNCTIONS[name], kind, seed), EACH))
    assert len(tried) == EACH
    for changed in tried:
        with jax.numpy_rank_promotion("allow"):
            report = changed.report(dtypes=("float64", "float32"))
        assert report.ok is (kind is rewrites), f"{changed.name}: {report}"


@pytest.mark.parametrize("part", range(5))
def test_faults_of_functions_are_named_and_none_misleads(part):
    """12 in each part, of all kinds: a change that is named gives the same on a second draw."""
    name = list(FUNCTIONS)[part % len(FUNCTIONS)]
    named, misled = 0, []
    for wrong in islice(drawn.functions(name, FUNCTIONS[name], mutations, 100 + part), 12):
        with jax.numpy_rank_promotion("allow"):
            report = wrong.report(dtypes=("float64",))
        assert report.first is not None
        causes = [place.cause for place in report.divergences if place.cause is not None]
        holds = bool(causes) and answer.gives_flax(wrong, causes, report.first.kind)
        named += holds
        misled += [f"{wrong.name}: {report.first}"] if causes and not holds else []
    assert not misled and named >= 7, (named, misled)
