"""The grid of jax's own tests of `dot_product_attention`, at its lengths, with ours in its place.

`test_drop_in_scenarios` takes the same grid at lengths where the plain formula serves. At 128, as
jax has it, the drop-in chooses blockwise: it must be no worse than `implementation="xla"`, which is
the plain formula, in narrow dtypes, and in float64 it must be the oracle's function.
"""

from functools import cache
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import dot_product_attention, explain
from flax_attn.parity import judge
from parity_tests.core.attend.peers.run import GIVEN, none_worse, rounded, same, truth

pytestmark = pytest.mark.nightly  # another library's suite, at its size

B, T, N, H = 2, 128, 4, 32
LENGTHS = np.asarray([[T // 2, T // 4], [T // 4, T // 2]], np.int32)
TRIANGLE = np.tri(T, dtype=bool)
BAND = TRIANGLE & ~np.tri(T, k=-4, dtype=bool)  # three keys to the left
PADDED = (np.arange(T) < LENGTHS[0][:, None])[:, None, :, None] & (
    np.arange(T) < LENGTHS[1][:, None]
)[:, None, None]
# What is static, the arrays that are handed over, and what it means; K key heads.
MODES = {
    "nothing": (4, {}, (), True),
    "bias": (4, {}, ("bias",), True),
    "causal": (2, {"is_causal": True}, (), TRIANGLE),
    "padding": (4, {}, ("lengths",), PADDED),
    "custom": (1, {}, ("mask",), TRIANGLE),
    "causal, padding": (4, {"is_causal": True}, ("lengths",), TRIANGLE & PADDED),
    "custom, padding": (2, {}, ("mask", "lengths"), TRIANGLE & PADDED),
    "bias, causal": (4, {"is_causal": True}, ("bias",), TRIANGLE),
    "causal, sliding window": (
        4,
        {"is_causal": True, "local_window_size": (3, 2)},
        (),
        BAND,
    ),
    "sliding window": (2, {"local_window_size": (3, 0)}, (), BAND),
}
SHORT = [  # those that CI takes
    ("bias, causal", "bfloat16"),
    ("custom, padding", "float64"),  # where both ways by one wrong mask would show
    ("causal, sliding window", "float64"),
]


def hand_over(arrays, given, static, implementation):
    """The call as jax's users write it."""
    q, k, v = (arrays[name] for name in "qkv")
    lengths = given.get("lengths", (None, None))
    return dot_product_attention(
        q,
        k,
        v,
        arrays.get("bias"),
        given.get("mask"),
        query_seq_lengths=lengths[0],
        key_value_seq_lengths=lengths[1],
        implementation=implementation,
        return_residual=True,
        **static,
    )


@cache
def program(mode, implementation):
    """Output, residual and all gradients of one mode, compiled once a dtype."""
    static = MODES[mode][1]

    def run(arrays, given, cotangents):
        found, back = jax.vjp(lambda x: hand_over(x, given, static, implementation), arrays)
        (gradients,) = back(
            tuple(c.astype(x.dtype) for c, x in zip(cotangents, found, strict=True))
        )
        return {**dict(zip(GIVEN, found, strict=True)), **gradients}

    return jax.jit(run)


def draw(mode, seed):
    """Learnt and given arrays and cotangents of a mode."""
    K, _, names, _ = MODES[mode]
    of = np.random.RandomState(seed).standard_normal
    learnt = {"q": of((B, T, N, H)), "k": of((B, T, K, H)), "v": of((B, T, K, H))}
    if "bias" in names:
        learnt["bias"] = of((1, N, T, T))
    given = {"mask": TRIANGLE[None, None], "lengths": LENGTHS}
    given = {name: x for name, x in given.items() if name in names}
    return learnt, given, (of((B, T, N, H)), of((B, T, N)))


def by(implementation, mode, dtype, learnt, given, cotangents):
    with jax.enable_x64(dtype == "float64"):
        as_jax = jax.tree.map(lambda x: jnp.asarray(x, dtype), (learnt, tuple(cotangents)))
        given = jax.tree.map(jnp.asarray, given)
        found = program(mode, implementation)(as_jax[0], given, as_jax[1])
        return jax.tree.map(np.asarray, found)


def check(mode, dtype):
    found = []
    for seed in range(2):
        learnt, given, cotangents = draw(mode, seed)
        learnt, cotangents = rounded((learnt, cotangents), dtype)
        how = {"seen": MODES[mode][3], "chain": ("bias",) if "bias" in learnt else ()}
        want = truth(learnt, cotangents, **how)
        got = by(None, mode, dtype, learnt, given, cotangents)
        if dtype == "float64":
            same(got, want)
        else:
            found.append((got, by("xla", mode, dtype, learnt, given, cotangents), want))
    if found:
        none_worse(found, dtype)


@pytest.mark.parametrize(("mode", "dtype"), SHORT)
def test_masks_at_jaxs_lengths(mode, dtype):
    check(mode, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_in_every_dtype(mode, dtype):
    check(mode, dtype)


def test_the_choice_at_these_lengths_is_blockwise():
    x = jnp.zeros((B, T, N, H))
    assert explain(x, x, x).chosen == "blockwise"


# What jax's issues tell of.


def small(seed, dtype="float32"):
    of = np.random.RandomState(seed).standard_normal
    return [jnp.asarray(of((2, 12, heads, 8)), dtype) for heads in (4, 2, 2)]


def call(q, k, v, bias, mask, lengths):
    return dot_product_attention(
        q, k, v, bias, mask, is_causal=True, key_value_seq_lengths=lengths, implementation="xla"
    )


def equal(a, b):
    return judge.exact(np.asarray(a), np.asarray(b)).ok


def test_mapped_and_exported_it_is_the_same():
    """Bias and lengths mapped with the batch and the mask not; exported with open batch."""
    q, k, v = small(0)
    of = np.random.RandomState(1)
    bias = jnp.asarray(of.standard_normal((2, 4, 12, 12)), jnp.float32)
    mask, lengths = jnp.asarray(of.rand(1, 12, 12) < 0.7), jnp.asarray([12, 5])
    given = q, k, v, bias, mask, lengths
    want = jax.jit(call)(*given)

    def one(q, k, v, bias, mask, length):
        return call(q, k, v, bias, mask, length[None])

    got = jax.jit(jax.vmap(one, in_axes=(0, 0, 0, 0, None, 0)))(*given)
    assert judge.no_worse(got, want, np.asarray(want, np.float64), "float32").ok
    (b,) = jax.export.symbolic_shape("b")
    shapes = [
        jax.ShapeDtypeStruct((b, *x.shape[1:]) if x is not mask else x.shape, x.dtype)
        for x in given
    ]
    exported = jax.export.export(jax.jit(call))(*shapes)
    if find_spec("flatbuffers"):  # by which jax writes it; not in a plain installation
        exported = jax.export.deserialize(exported.serialize())
    assert equal(exported.call(*given), want)
    assert exported.call(*(x if x is mask else x[:1] for x in given)).shape == (1, 12, 4, 8)


DEBUGGERS = {"nans": jax.debug_nans, "infs": jax.debug_infs}


@pytest.mark.parametrize(
    ("debugger", "traced", "dtype"),
    [
        ("nans", True, "float64"),
        ("infs", True, "float64"),
        ("infs", False, "float32"),
        ("nans", False, "float32"),
        ("infs", False, "float64"),
    ],
)
def test_nothing_trips_the_debugger(debugger, traced, dtype):
    """Causal, a mask, padding and rows that see nothing: no NaN and no infinity on the way.

    jax's own masks by a float64's largest number, which is infinite once cast (jax's #34114).
    """
    with jax.enable_x64(dtype == "float64"), DEBUGGERS[debugger](True):
        q, k, v = small(2, dtype)
        mask = np.random.RandomState(3).rand(2, 1, 12, 12) < 0.7
        mask[0, 0, 5] = False
        given = q, k, v, None, jnp.asarray(mask), jnp.asarray([7, 12])

        def loss(q, k, v, *rest):
            return jnp.sum(call(q, k, v, *rest))

        run = jax.value_and_grad(loss, argnums=(0, 1, 2))
        found, gradients = (jax.jit(run) if traced else run)(*given)
        assert all(jnp.isfinite(x).all() for x in (found, *gradients))
