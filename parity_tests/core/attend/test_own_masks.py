"""Masks and scores that a user wrote as classes: every backend takes them, or says why."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_attn
from flax_attn import CAUSAL, IDENTITY, Causal, Mask, Score, Window, attend, explain, frozen
from flax_attn.parity import judge
from parity_tests.tables import with_nightly

B, N, K, H = 4, 4, 2, 8
BOTH = ("blockwise", "reference")


@frozen
class Stripes(Mask):
    """Every `step`-th key counted from the query; known without batch entry or head."""

    step: int

    is_static = True

    def __call__(self, b, n, q, k):
        return jnp.abs(q - k) % self.step == 0


@frozen
class Near(Mask):
    """Keys near the query, further for later heads, which says where blocks may be skipped."""

    by: int

    def __call__(self, b, n, q, k):
        return abs(q - k) <= self.by + n

    def key_range(self, b, n, q, sizes):
        return q[0] - self.by - N, q[1] + self.by + N


@frozen
class Band(Mask):
    """A window that says all that a mask may: it is skipped and left unmasked as ours is."""

    back: int
    ahead: int

    is_static = True

    def __call__(self, b, n, q, k):
        return (k - q >= -self.back) & (k - q <= self.ahead)

    def key_range(self, b, n, q, sizes):
        return q[0] - self.back, q[1] + self.ahead

    def seen_range(self, b, n, q, sizes):
        return q[1] - 1 - self.back, q[0] + self.ahead + 1

    def as_band(self):
        return flax_attn.Band(-self.back, self.ahead)


@frozen
class Reach(Mask):
    """As many keys back as an array says of the batch entry and the head."""

    table: Any

    def __call__(self, b, n, q, k):
        return (k <= q) & (q - k <= self.table[b, n])


@frozen
class Temperature(Score):
    """Logits over an array by batch entry and head."""

    table: Any

    def __call__(self, logits, b, n, q, k):
        return logits / self.table[b, n] + ((q + k) % 3).astype(logits.dtype)


TABLE = 1 + np.arange(B * N, dtype=np.float32).reshape(B, N) / 7
MASKS = {
    "stripes": Stripes(3),
    "not stripes": ~Stripes(3) & CAUSAL,
    "near": Near(30),
    "band": Band(40, 3),
    "not band": ~Band(140, 3) | Band(0, 0),
    "reach": Reach(np.arange(B * N).reshape(B, N) * 11 % 150),
    "both": Reach(np.arange(B * N).reshape(B, N) * 11 % 150) | Near(2),
}


def arrays(T):
    drawn = np.random.RandomState(T)
    shapes = [(B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)]
    return [jnp.asarray(drawn.standard_normal(shape), jnp.float32) for shape in shapes]


def program(mask, score, backend):
    """Output and gradients of q, k, v and of the score's arrays."""

    def run(score, q, k, v, do):
        def look(score, q, k, v):
            return attend(q, k, v, mask=mask, score=score, backend=backend)

        out, back = jax.vjp(look, score, q, k, v)
        return out, back(do)

    return jax.jit(run)


def same(got, want):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(judge.allclose(a, b) for a, b in pairs)


AT_COMMIT = ["stripes", "near", "not band", "reach"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(MASKS, commit=AT_COMMIT))
def test_blocks_give_what_the_plain_formula_gives(name):
    score = Temperature(TABLE) if name in ("near", "both") else IDENTITY
    q, k, v, do = arrays(150)
    got, want = (program(MASKS[name], score, x)(score, q, k, v, do) for x in BOTH)
    assert same(got, want)
    assert np.isfinite(np.asarray(want[0])).all() and np.abs(np.asarray(want[0])).max() > 0.1


@pytest.mark.nightly
def test_blocks_of_a_band_give_what_those_of_a_window_give():
    """Bit by bit, at a length of written-out blocks and at one of loops, which leave out much."""
    for T, back, wrap in (
        (150, 40, lambda x: x),
        (150, 40, lambda x: ~x | Window(3, 0)),
        (1100, 600, lambda x: x),
    ):
        got, want = (
            attend(*arrays(T)[:3], mask=wrap(kind(back, 3)), backend="blockwise")
            for kind in (Band, Window)
        )
        assert judge.exact(got, want).ok


@pytest.mark.nightly
@pytest.mark.parametrize("T", with_nightly([1100, 2100], commit=[1100]))
def test_loops_give_what_the_plain_formula_gives(T):
    """At lengths where blocks run in loops, of one batch entry."""
    mask = (Stripes(3) & Window(700, 5)) | Near(40)
    q, k, v, do = (x[:1] for x in arrays(T))
    got, want = (program(mask, IDENTITY, x)(IDENTITY, q, k, v, do) for x in BOTH)
    assert same(got, want)


def test_a_class_that_is_no_pytree_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Plain(Mask):
        def __call__(self, b, n, q, k):
            return k <= q

    class Child(Causal):
        pass

    class Double(Score):
        def __call__(self, logits, b, n, q, k):
            return 2 * logits

    q, k, v, _ = arrays(5)
    for name, rules in (
        ("Plain", {"mask": Plain()}),
        ("Plain", {"mask": CAUSAL & ~Plain()}),
        ("Child", {"mask": Child()}),
        ("Double", {"score": Double()}),
        ("Double", {"score": IDENTITY >> Double()}),
    ):
        for call in (attend, explain):
            with pytest.raises(TypeError, match=rf"^{name} is no pytree.*flax_attn\.frozen"):
                call(q, k, v, **rules)
