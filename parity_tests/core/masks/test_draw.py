"""`draw` and the picture in a notebook show what a mask or a score computes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    IDENTITY,
    Additive,
    Alibi,
    Dense,
    Documents,
    Segments,
    Softcap,
    T5Bias,
    Window,
)
from parity_tests.requests.masks import masks

T, S, B, N = 5, 7, 2, 3
DRAW = np.random.default_rng(7)
ANY = DRAW.random((B, N, T, S)) < 0.6


def read(text):
    """The table of booleans that a text shows."""
    return np.array([[word == "■" for word in line.split(" ")] for line in text.splitlines()])


def shown(picture):
    """The values that the cells of a picture name, by query and key."""
    cells = re.findall(r"<title>query (\d+), key (\d+): (\S+)</title>", picture)
    return {(int(q), int(k)): value for q, k, value in cells}


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12))
def test_drawing_a_mask_shows_its_table(seed):
    """Random masks, each against its meaning in numpy, for every entry and head."""
    mask, table = masks(seed, ((B,), N, T, S))
    for b, n in np.ndindex(B, N):
        assert (read(mask.draw(T, S, batch=b, head=n)) == table[b, n]).all()


@pytest.mark.nightly
def test_sizes_are_those_of_the_arrays():
    assert read(Dense(ANY).draw(batch=-1, head=1)).tolist() == ANY[-1, 1].tolist()
    assert read(Segments(jnp.asarray([0, 0, 1])).draw()).shape == (3, 3)
    assert read(Window(2, 0).draw()).shape == (8, 8) and read(CAUSAL.draw(3)).shape == (3, 3)
    assert read((Documents([2, 1]) & CAUSAL).draw(3)).tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


@pytest.mark.nightly
def test_drawing_a_score_shows_its_values_at_zero_logits():
    table = DRAW.normal(size=(B, N, T, S)).round(2)
    text = Additive(jnp.asarray(table)).draw(batch=1, head=2)
    assert np.allclose(
        [[float(x) for x in line.split()] for line in text.splitlines()], table[1, 2]
    )
    both = Softcap(20.0) >> Alibi(jnp.asarray([0.25, 0.5]))
    lines = both.draw(2, 3, head=1).splitlines()
    assert [line.split() for line in lines] == [["0", "-0.5", "-1"], ["-0.5", "0", "-0.5"]]
    bias = T5Bias(jnp.arange(8.0)[:, None], buckets=8, max_distance=16)
    assert bias.draw(2).split() == ["0", "5", "1", "0"]


def test_a_score_that_reads_the_logit_alone_is_drawn_over_logits():
    logits, capped = (line.split() for line in Softcap(20.0).draw().splitlines())
    assert len(logits) == 13
    assert capped == [f"{20 * np.tanh(float(x) / 20):.3g}" for x in logits]
    same = IDENTITY.draw().splitlines()
    assert same[0] == same[1]


def test_a_notebook_shows_the_same_as_a_picture():
    visible = read(Window(2, 0).draw())
    assert shown(Window(2, 0)._repr_svg_()) == {
        (q, k): str(visible[q, k]) for q in range(8) for k in range(8)
    }
    assert shown(Alibi(jnp.asarray([0.5]))._repr_svg_())[0, 2] == "-1"


def test_what_cannot_be_drawn_has_no_picture_and_says_why_as_text():
    seen = []
    jax.jit(lambda array: seen.append(Dense(array)._repr_svg_()))(ANY)
    assert seen == [None]
    for call, why in {
        lambda: CAUSAL.draw(0): "T must be a whole number of at least 1; got 0.",
        lambda: Dense(ANY).draw(T, S + 1): r"broadcast to .* = \(2, 3, 5, 8\); got",
        lambda: Dense(ANY).draw(head=3): "head must be one of 3, from 0 to 2; got 3.",
        lambda: Dense(ANY).draw(batch=2): "batch must be one of 2, from 0 to 1; got 2.",
    }.items():
        with pytest.raises(ValueError, match=why):
            call()
