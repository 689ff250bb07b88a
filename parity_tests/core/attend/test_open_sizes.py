"""Sizes left open for `jax.export`: an open batch everywhere, open lengths by the plain formula."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from flax_attn import (
    CAUSAL,
    FULL,
    Causal,
    Chunked,
    Dense,
    Documents,
    Lengths,
    Segments,
    Window,
    attend,
    explain,
)
from flax_attn.parity import judge
from parity_tests.core.backends.refusal import told
from parity_tests.core.drawing import float64 as float64
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

N, H = 3, 4
MASKS = {
    "full": FULL,
    "causal": CAUSAL,
    "window from the end": Causal("end") & Window(2, 0, "end"),
    "lengths": Lengths(np.asarray([3])),
    "chunks": Chunked(2),
    "documents": Documents(np.asarray([2, 0, 1])),
}
OF_FIVE = {
    "segments": Segments(np.asarray([[7, 7, 8, 8, 8]])),
    "dense": Dense(np.tri(5, dtype=bool)),
}


def exported(shape, **options):
    def both_ways(q):
        o, back = jax.vjp(lambda q: attend(q, q, q, **options), q)
        return o, back(o)[0]

    return export.export(jax.jit(both_ways))(jax.ShapeDtypeStruct(shape, jnp.float64)), both_ways


ROWS = [*product([*MASKS, *OF_FIVE], ["auto", "blockwise"])]
AT_COMMIT = [("causal", "blockwise"), ("lengths", "auto"), ("segments", "blockwise")]
AT_COMMIT += [("dense", "auto"), ("documents", "auto")]


@pytest.mark.parametrize(("name", "backend"), with_nightly(ROWS, commit=AT_COMMIT))
def test_an_open_batch(name, backend):
    (b,) = export.symbolic_shape("b")
    mask = {**MASKS, **OF_FIVE}[name]
    program, plain = exported((b, 5, N, H), mask=mask, backend=backend)
    check_on(program, plain, 2, 5)


@pytest.mark.parametrize(
    "name", with_nightly(MASKS, commit=["window from the end", "lengths", "chunks"])
)
def test_open_lengths_are_served_by_the_plain_formula(name):
    b, t = export.symbolic_shape("b, t")
    program, plain = exported((b, t, N, H), mask=MASKS[name])
    check_on(program, plain, 2, 5)
    check_on(program, plain, 1, 7)


def check_on(program, plain, batch, length):
    q = jnp.asarray(np.random.RandomState(0).standard_normal((batch, length, N, H)))
    for got, want in zip(program.call(q), jax.jit(plain)(q), strict=True):
        verdict = judge.same_function(np.asarray(got), np.asarray(want), zero=True)
        assert verdict.ok, verdict


def test_requests_that_need_known_lengths_raise():
    b, t = export.symbolic_shape("b, t")
    reason = "needs lengths that are known when it is compiled"
    with told(NotImplementedError, "'blockwise'", reason):
        exported((b, t, N, H), backend="blockwise")
    q = jax.ShapeDtypeStruct((b, t, N, H), jnp.float64)
    with told(NotImplementedError, "'cudnn'", reason):
        exported(q.shape, backend="cudnn")
    seen = []
    export.export(jax.jit(lambda q: (seen.append(explain(q, q, q)), q)[1]))(q)
    assert seen[0].chosen == "reference" and reason in str(seen[0])
