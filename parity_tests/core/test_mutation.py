"""A sample of the faults made by machine; `python -m parity_tests.core.mutation` makes them all."""

import random

from .mutation import Mutant, Outcome, equivalents, mutants_of
from .mutation.operators import mutants, mutated
from .mutation.worker import FILES, try_all

SAMPLE = 12

SOURCE = '''
"""Words."""
Kind = int | str

def f(x: int, scale=1.0) -> int:
    """Words."""
    if x > 0 and not scale:
        raise ValueError(f"x is {x}")
    return g(x, -1, axis=0)[:x]
'''
CHANGED = """
def f(x: int, scale=2.0) -> int:
def f(x: int, scale=0.5) -> int:
pass
if True:
if False:
if x > 0 or not scale:
if not scale:
if x > 0:
if x >= 0 and (not scale):
if x <= 0 and (not scale):
if x > 1 and (not scale):
if x > -1 and (not scale):
if x > 0 and scale:
raise TypeError(f'x is {x}')
return None
return g(x, -1, axis=0)
return x[:x]
return g(-1, x, axis=0)[:x]
return g(-1, axis=0)[:x]
return g(x, axis=0)[:x]
return g(x, 1, axis=0)[:x]
return g(x, -2, axis=0)[:x]
return g(x, -0, axis=0)[:x]
return g(x, -1)[:x]
return g(x, -1, axis=1)[:x]
return g(x, -1, axis=-1)[:x]
return g(x, -1, axis=0)[:]
"""


def test_the_changes_of_a_small_source():
    made = mutants("f", SOURCE)
    changes = [mutant.name.partition("  =>  ")[2].partition("  (")[0] for mutant in made]
    assert set(changes) == set(CHANGED.strip().splitlines())
    for mutant in made:
        text = mutated(SOURCE, mutant.number)
        assert text != mutated(SOURCE, made[0].number) or mutant == made[0]
        compile(text, "mutant", "exec")
    assert len({mutant.name for mutant in made}) == len(made)


def test_outcomes_are_counted():
    one, two, three = (Mutant("masks", i, i, str(i)) for i in range(3))
    outcome = Outcome({one: "a law", two: None, three: None}, {("masks", "2"): "why"})
    assert list(outcome.count("masks").values()) == [3, 1, 1, 1]
    assert outcome.alive == [two] and outcome.refuted == [] and outcome.share("masks") == 0.5
    assert Outcome({three: "a law"}, {("masks", "2"): "why"}).refuted == [three]


def test_every_mutant_said_to_be_equivalent_is_there_and_has_a_reason():
    there = {(mutant.file, mutant.name) for file in FILES for mutant in mutants_of(file)}
    reasons = equivalents()
    assert all(reasons.values()) and not reasons.keys() - there


def test_no_mutant_of_a_sample_lives():
    known = equivalents()
    every = [m for file in FILES for m in mutants_of(file) if (m.file, m.name) not in known]
    drawn = random.Random(len(every)).sample(every, SAMPLE)
    outcome = Outcome(try_all(sorted(drawn, key=lambda m: m.file), jobs=1), known)
    assert not outcome.alive
