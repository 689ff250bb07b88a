"""The laws of the blocks that JAX differentiates: they give the plain formula and its gradients."""

import pytest

from flax_attn.backends.blockwise import autodiff
from parity_tests.tables import with_nightly

from .law_cases import RULES, check, eager64

FIRST = ("table", "lengths", "documents", "padding", "window", "masked out by a bias")


def forward(*given, **blocks):
    """Output and log-sum-exp, as the laws compare them."""
    o, stats = autodiff.attention(*given, **blocks)
    return o, stats.lse


@pytest.mark.parametrize("name", with_nightly(RULES, commit=FIRST))
def test_blocks_that_overlap_are_the_plain_formula(name):
    eager64(lambda: check(forward, name, rows=2, cols=2))()


@pytest.mark.parametrize("name", with_nightly(RULES, commit=["blind", "causal"]))
def test_blocks_that_divide_the_lengths_are_the_plain_formula(name):
    eager64(lambda: check(forward, name, rows=1, cols=5))()
