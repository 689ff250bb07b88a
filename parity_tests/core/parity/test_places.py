"""How an equivalent step inside a module is distinguished from a fault."""

from types import SimpleNamespace

import numpy as np

from flax_attn.parity.diagnosis.places import _before, _misses_term


def found(scores, want):
    """A run as `_missed` reads it."""
    taps, force = {"scores": scores}, {"scores": SimpleNamespace(value=want)}
    return SimpleNamespace(run=SimpleNamespace(taps=taps), force=force)


def test_scores_that_are_hidden_are_left_out():
    want = np.asarray([1.0, 2.0, -np.inf])
    forced, own = np.asarray([1.0, 1.5, -np.inf]), np.asarray([1.0, 1.9, -np.inf])
    with np.errstate(invalid="raise"):  # which -inf less -inf would be
        assert _misses_term(found(forced, want), found(own, want), "scores")
        assert not _misses_term(found(own, want), found(own, want), "scores")


def test_a_step_lies_behind_the_last_tap_that_feeds_it():
    taps = dict.fromkeys(("q", "scores", "weights", "output"))
    local = SimpleNamespace(run=SimpleNamespace(taps=taps), feeds={"mixed": {"scores", "weights"}})
    assert _before(local, "mixed") == "weights" and _before(local, "q") is None
