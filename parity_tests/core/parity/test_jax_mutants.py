"""The judge of JAX functions on mistakes and rewrites that a generator makes, by a seed."""

from itertools import islice

import jax
import numpy as np
import pytest

from flax_attn.parity import compare

from ...tables import with_nightly
from .jax_sides import attentions, rewrites
from .jax_sides.mutants import MISTAKES, REWRITES, drawn_mutants, moves

pytestmark = pytest.mark.nightly

EACH = 4  # mutants of a seed
SEEDS = with_nightly(range(40), commit=[0])
DRAWN = np.random.default_rng(0)
SUBJECTS = [
    (attentions.formula, attentions.inputs()),
    (attentions.each_head, attentions.inputs()),
    (rewrites.looped, rewrites.STATES),
    (rewrites.mlp, [DRAWN.normal(size=s) for s in ((5, 6), (6,), (6, 16), (8, 6))]),
]
QUICK = {"eager": False, "dtypes": ("float64", "float32")}


@pytest.fixture(autouse=True)
def as_people_write():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("seed", SEEDS)
def test_one_operation_done_wrong_is_seen(seed):
    mutants = drawn_mutants(SUBJECTS, [*MISTAKES], seed)
    wrong = ((mutant, given) for mutant, given in mutants if moves(mutant, given))
    for mutant, given in islice(wrong, EACH):
        report = compare(mutant.function, mutant, *given, **QUICK)
        assert not report.ok, f"{mutant}: {report}"


@pytest.mark.parametrize("seed", SEEDS)
def test_one_operation_done_in_another_way_is_let_pass(seed):
    for mutant, given in islice(drawn_mutants(SUBJECTS, [*REWRITES], seed), EACH):
        report = compare(mutant.function, mutant, *given, **QUICK)
        assert report.ok, f"{mutant}: {report}"
