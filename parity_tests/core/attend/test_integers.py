"""Offsets, counts and ids in every kind of integer and container mean the plain number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    FULL,
    Alibi,
    Causal,
    Lengths,
    MaskFn,
    ScoreFn,
    Segments,
    Window,
    attend,
    attention_weights,
    dot_product_attention,
    flax_attention,
)
from flax_attn.parity import judge
from parity_tests.core.backends.refusal import told

B, T, S, N, H = 2, 9, 9, 2, 4
SLOPES = np.asarray([0.5, 0.25], "float32")
BACKENDS = ("reference", "blockwise")


def drawn(*shape):
    return [
        jnp.asarray(np.random.RandomState(i).standard_normal(shape), "float32") for i in range(3)
    ]


def close(got, want):
    return judge.no_worse(got, want, np.asarray(want, float), "float32", zero=True).ok


def plainly(rules):
    return attend(*drawn(B, T, N, H), **rules, backend="reference")


def same(asked, meant, backend):
    """What is asked by a backend is what is meant, by the plain formula."""
    assert close(attend(*drawn(B, T, N, H), **asked, backend=backend), plainly(meant))


@pytest.mark.nightly
def test_documents_are_never_merged():
    wide = np.asarray([[7] * 4 + [7 + 2**32] * 5] * B)
    q, k, v = drawn(B, T, N, H)
    with told(ValueError, "Segments.ids must fit int32; got 4294967303"):
        attend(q, k, v, mask=Segments(wide))
    with told(ValueError, "one length; got T=9 and S=3: say Segments"):
        attend(q, k[:, :3], v[:, :3], mask=Segments(np.zeros((B, T), int)))
    with jax.enable_x64(True):
        for backend in BACKENDS:
            same(
                {"mask": Segments(jnp.asarray(wide))},
                {"mask": Segments((wide > 7).astype(int))},
                backend,
            )


# Masks that are one truth for all, and functions that hold what changes.


@pytest.mark.nightly
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_may_be_one_truth_for_all(backend):
    everywhere = Window(None, None, jnp.asarray(3))
    for mask, meant in (
        (MaskFn(lambda b, n, q, k: True), FULL),
        (MaskFn(lambda b, n, q, k: jnp.asarray(1) > 0), FULL),
        (everywhere, FULL),
        (~everywhere, ~FULL),
    ):
        same({"mask": mask}, {"mask": meant}, backend)
        q, k, _ = drawn(B, T, N, H)
        found, want = (attention_weights(q, k, mask=m) for m in (mask, meant))
        assert judge.exact(found, want).ok


@pytest.mark.nightly
def test_constants_inside_a_jitted_function_are_those_of_the_call():
    held = [jnp.zeros(S)]

    def bent(x, b, n, q, k):
        return x + jax.jit(lambda k: held[0][k])(k)

    def seen(b, n, q, k):
        return jax.jit(lambda k: held[0][k] < 3)(k)

    values = np.zeros(S), np.full(S, np.nan), np.arange(S), np.arange(S)[::-1].copy()
    for held[0] in (jnp.asarray(x, "float32") for x in values):
        for rules in ({"score": ScoreFn(bent)}, {"mask": MaskFn(seen)}):
            same(rules, rules, "blockwise")


@pytest.mark.nightly
def test_keys_inside_a_jitted_function_are_those_of_the_call():
    held = [None]

    def noisy(x, b, n, q, k):
        draw = jax.jit(lambda: jax.random.uniform(held[0]))
        return x * (1 + draw()).astype(x.dtype)

    for held[0] in map(jax.random.key, (0, 1, 0)):
        same({"score": ScoreFn(noisy)}, {"score": ScoreFn(noisy)}, "blockwise")


def test_mask_objects_are_no_arrays():
    q, k, v = drawn(B, T, N, H)
    for call in (dot_product_attention, flax_attention):
        with told(TypeError, "mask must be an array in this function; got Causal"):
            call(q, k, v, mask=CAUSAL)


@pytest.mark.nightly
def test_padding_on_the_left():
    shown = np.arange(S) >= np.asarray([4, 0])[:, None, None, None]
    for backend in BACKENDS:
        same({"mask": CAUSAL & ~Lengths([4, 0])}, {"mask": CAUSAL & shown}, backend)


def test_a_mask_has_no_truth_value():
    for wrong in (lambda: CAUSAL and FULL, lambda: CAUSAL or FULL, lambda: not CAUSAL):
        with told(TypeError, "use &, | and ~"):
            wrong()


def test_a_mesh_of_one_device_is_a_mesh():
    """Explicit axes stand in every type, however many devices they have."""
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", None, "model"))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    q, k, v = drawn(B, T, N, H)
    offsets, slopes = np.asarray([0, 3]), np.tile(SLOPES, (B, 1))
    want = jax.jit(lambda *x: attend(*x, mask=Causal(offsets), score=Alibi(slopes)))(q, k, v)
    placed = [jax.device_put(x, cut) for x in (q, k, v)]
    mask = Causal(jax.device_put(offsets, rows))
    score = Alibi(jax.device_put(slopes, rows))
    for backend in BACKENDS:
        got = attend(*placed, mask=mask, score=score, backend=backend)
        assert got.sharding.is_equivalent_to(cut, 4)
        assert close(got, want)
