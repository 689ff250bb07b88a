"""The linear recurrence against numpy: outputs, states, gradients, documents, padding, pieces."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.parity import judge
from flax_attn.recurrence import linear_recurrence
from parity_tests.core.recurrence.numpy_recurrence import recurrence
from parity_tests.tables import with_nightly

B, N, H, h = 2, 3, 5, 4
MODES = [(decay, delta) for decay in ("none", "head", "channel") for delta in (False, True)]
NAMES = ("outputs", "state", "dq", "dk", "dv", "dlog_decay", "dbeta", "dstate")
of_modes = pytest.mark.parametrize(("decay", "delta"), MODES)


def drawn(T, decay, delta, seed=0):
    """q, k, v, log decay or None, beta, state, and the cotangents of outputs and state."""
    draw = np.random.RandomState(seed)
    q, k = (draw.standard_normal((B, T, N, H)) for _ in "qk")
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    width = {"none": 0, "head": 1, "channel": H}[decay]
    g = -draw.gamma(0.5, 2.0, (B, T, N, width)) if width else None
    v, do = (draw.standard_normal((B, T, N, h)) for _ in "vo")
    state, ds = (draw.standard_normal((B, N, H, h)) for _ in "sd")
    return q, k, v, g, draw.rand(B, T, N), state, do, ds


@cache
def compiled(decay, delta, chunk):
    """All results of `linear_recurrence`, in numpy's order; one program a shape."""

    def call(ids, valid, *x):
        return linear_recurrence(
            *x[:3],
            log_decay=x[3],
            beta=x[4],
            state=x[5],
            delta=delta,
            segments=ids,
            valid=valid,
            chunk=chunk,
        )

    def results(ids, valid, q, k, v, g, b, state, do, ds):
        g = None if g is None else g[..., 0] if decay == "head" else g
        (o, last), pull = jax.vjp(partial(call, ids, valid), q, k, v, g, b, state)
        dq, dk, dv, dg, db, ds = pull((do, ds))
        return o, last, dq, dk, dv, dg, db, ds

    return jax.jit(results)


def got(decay, delta, chunk, x, ids=None, valid=None):
    T = x[0].shape[1]
    ids = np.zeros((B, T), int) if ids is None else ids
    valid = np.ones((B, T), bool) if valid is None else valid
    with jax.enable_x64(True):
        found = compiled(decay, delta, chunk)(ids, valid, *x)
        return [None if a is None else np.asarray(a) for a in found]


def wanted(delta, x, ids=None):
    q, k, v, g, *rest = x
    b, state, do, ds = rest
    shape = q.shape[:2]
    ids = np.zeros(shape, int) if ids is None else np.broadcast_to(ids, shape)
    first = np.concatenate([np.zeros((B, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    g = np.zeros((*q.shape[:3], 1)) if g is None else g
    with np.errstate(invalid="raise"):
        return recurrence(q, k, v, g, b, first, state, delta, do, ds)


def agree(found, want):
    for name, a, b in zip(NAMES, found, want, strict=True):
        if a is not None:
            verdict = judge.same_function(a, b.reshape(a.shape))
            assert verdict.ok or verdict.note == judge.ZEROS, (name, verdict)


def ids_of(*lengths):
    return np.repeat(np.arange(len(lengths)) % 2, lengths)


@pytest.mark.nightly
@of_modes
def test_documents_and_decays_from_nothing_to_all(decay, delta):
    """One program: several documents, none, borders at chunks, empty memories and full ones."""
    x = drawn(37, decay, delta)
    cuts = [None, ids_of(5, 1, 20, 11), ids_of(16, 16, 5), ids_of(*[1] * 37)]
    cuts.append(np.stack([ids_of(30, 7), ids_of(1, 36)]))
    for ids in cuts:
        agree(got(decay, delta, 16, x, ids if ids is None else np.broadcast_to(ids, (B, 37))),
              wanted(delta, x, ids))  # fmt: skip
    if x[3] is None:
        return
    kept, empty = np.zeros_like(x[3]), np.full_like(x[3], -np.inf)
    some = np.random.RandomState(1).rand(*x[3].shape)
    for g in (kept, empty, np.where(some < 0.1, empty, x[3]), np.where(some < 0.5, -800.0, x[3])):
        other = (*x[:3], g, *x[4:])
        agree(got(decay, delta, 16, other), wanted(delta, other))


@pytest.mark.nightly
@pytest.mark.parametrize("T", with_nightly([1, 2, 9, 16, 32], commit=[1, 9, 32]))
@pytest.mark.parametrize(("decay", "delta"), [("head", True), ("channel", False)])
def test_lengths_below_at_and_beyond_a_chunk(T, decay, delta):
    x = drawn(T, decay, delta)
    agree(got(decay, delta, 16, x), wanted(delta, x))


@pytest.mark.nightly
@pytest.mark.parametrize("chunk", with_nightly([None, 7, 16, 64, 128], commit=[None, 7]))
@pytest.mark.parametrize(("decay", "delta"), [("head", True), ("channel", True), ("none", False)])
def test_chunks_of_any_size_are_the_same(chunk, decay, delta):
    x, ids = drawn(150, decay, delta), ids_of(70, 3, 77)
    agree(got(decay, delta, chunk, x, np.broadcast_to(ids, (B, 150))), wanted(delta, x, ids))


@pytest.mark.nightly(but=["none-True"])
@of_modes
def test_padding_is_as_if_it_was_not_there_and_may_hold_anything(decay, delta):
    T = 37
    x, draw = drawn(T, decay, delta), np.random.RandomState(2)
    valid = draw.rand(B, T) < 0.7
    valid[:, :3], valid[1, -2:] = False, False
    ids = np.broadcast_to(ids_of(12, 12, 13), (B, T))
    dirty = [x[i] if x[i] is None else np.where(_like(valid, x[i]), x[i], np.nan) for i in range(5)]
    ids_there = np.where(valid, ids, 9)
    found = got(decay, delta, 16, (*dirty, *x[5:]), ids_there, valid)
    for row in range(B):
        there = valid[row]

        def cut(a, row=row, there=there):
            return None if a is None else np.repeat(a[row : row + 1, there], B, axis=0)

        one = [*map(cut, x[:5]), x[5][[row] * B], cut(x[6]), x[7][[row] * B]]
        want = wanted(delta, one, ids[row, there])
        for name, a, b in zip(NAMES, found, want, strict=True):
            if a is not None:
                a = a[row] if "state" in name else a[row, there]
                assert judge.same_function(a, b[0].reshape(a.shape)).ok, name
    for name, a in zip(NAMES, found, strict=True):
        if a is not None and "state" not in name:
            assert not a[~valid].any(), name


def _like(valid, x):
    return valid.reshape(*valid.shape, *[1] * (x.ndim - 2))


@pytest.mark.nightly
@pytest.mark.parametrize(("decay", "delta"), [("head", True), ("channel", False)])
def test_pieces_with_the_state_passed_on_are_the_whole(decay, delta):
    x = drawn(37, decay, delta)
    with jax.enable_x64(True):
        run = jax.jit(partial(linear_recurrence, delta=delta, chunk=8))
        g = x[3][..., 0] if decay == "head" else x[3]
        q, k, v, g, b, state = map(jnp.asarray, (*x[:3], g, x[4], x[5]))
        want = run(q, k, v, log_decay=g, beta=b, state=state)
        outputs, start = [], 0
        for end in (1, 2, 18, 37):
            piece = [a[:, start:end] for a in (q, k, v, g, b)]
            o, state = run(*piece[:3], log_decay=piece[3], beta=piece[4], state=state)
            outputs.append(o)
            start = end
        assert judge.same_function(jnp.concatenate(outputs, 1), want[0]).ok
        assert judge.same_function(state, want[1]).ok


def kept(x, **more):
    """Shapes and dtypes of what the backward pass keeps."""
    _, pull = jax.vjp(lambda q, k, v, g: linear_recurrence(q, k, v, log_decay=g, **more), *x)
    return sorted((a.shape, str(a.dtype)) for a in jax.tree.leaves(pull))


@pytest.mark.nightly
@pytest.mark.parametrize("delta", [False, True])
def test_the_backward_pass_keeps_its_inputs_and_the_states_at_borders_alone(delta):
    q = jnp.ones((2, 48, 3, 5), jnp.bfloat16)
    v, g = jnp.ones((2, 48, 3, 4), jnp.bfloat16), jnp.zeros((2, 48, 3))
    shapes = [(q.shape, "bfloat16")] * 2 + [(v.shape, "bfloat16"), ((*g.shape, 1), "float32")]
    shapes += [((2, 48, 3, 1), "bfloat16")] if delta else []  # beta
    borders = ((3, 2, 3, 5, 4), "float32")
    assert kept((q, q, v, g), delta=delta, chunk=16) == sorted([*shapes, borders])
    assert kept((q, q, v, g), delta=delta, chunk=8)[-1] != borders


@pytest.mark.nightly
def test_any_batch_axes_and_transformations():
    x = drawn(9, "head", True)

    @jax.jit
    def call(q, k, v, g, b):
        return linear_recurrence(q, k, v, log_decay=g, beta=b, delta=True, chunk=8)

    with jax.enable_x64(True):
        x = [jnp.asarray(a) for a in (*x[:3], x[3][..., 0], x[4])]
        want, state = call(*x)
        alone, _ = call(*(a[0] for a in x))
        more, _ = call(*(a[:, None] for a in x))
        mapped, states = jax.vmap(call)(*x)
    assert more.shape == (B, 1, 9, N, h)
    for found, right in (
        (alone, want[0]),
        (more[:, 0], want),
        (mapped, want),
        (states, state),
    ):
        assert judge.same_function(found, right).ok


@pytest.mark.nightly
def test_the_step_form_has_forward_mode_derivatives():
    x = drawn(5, "head", True)
    q, k, v = (jnp.asarray(a, jnp.float32) for a in x[:3])
    _, tangent = jax.jvp(lambda v: linear_recurrence(q, k, v, delta=True, chunk=None), (v,), (v,))
    assert jnp.isfinite(tangent[0]).all()


@pytest.mark.nightly
def test_dtypes():
    for dtype in (jnp.bfloat16, jnp.float32):
        x = jnp.ones((5, 3, 4), dtype)
        o, state = linear_recurrence(x, x, x)
        assert (o.dtype, state.dtype) == (dtype, jnp.float32)
    with jax.enable_x64(True):
        x = jnp.ones((5, 3, 4), jnp.float64)
        assert {a.dtype for a in linear_recurrence(x, x, x)} == {x.dtype}


X = jnp.ones((2, 5, 3, 4))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"v": X[:, 1:]}, "q and k must have one shape"),
        ({"log_decay": X[..., :2]}, "log_decay must be"),
        ({"beta": X}, r"beta must be \*B T N = \(2, 5, 3\)"),
        ({"state": X}, r"state must be \*B N H h = \(2, 3, 4, 4\)"),
        ({"segments": X[..., 0, 0]}, "segments must hold integers"),
        ({"segments": jnp.zeros(4, int)}, r"segments must broadcast to \*B T = \(2, 5\)"),
        ({"valid": jnp.zeros(5)}, "valid must be boolean"),
        ({"valid": jnp.zeros((3, 5), bool)}, r"valid must broadcast to \*B T = \(2, 5\)"),
        ({"chunk": 0}, "chunk must be a whole number of at least 1"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(given, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        linear_recurrence(**{"q": X, "k": X, "v": X, **given})
