"""Empty batches, no tokens and no keys: right shapes and no NaN, forward and backward."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import CAUSAL, Additive, Dropout, Lengths, attend, attention_weights
from flax_attn.layers.bahdanau import BahdanauAttention
from flax_attn.layers.luong import LuongAttention
from flax_attn.layers.transformer_multi_head import TransformerMultiHeadAttention
from parity_tests.core import layer_facts
from parity_tests.core.cases import every_case, pure, smallest
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

N, K, H, h = 6, 3, 8, 10
PLAIN = [
    case
    for case in every_case()
    if not callable(case.config) and not {"values", "rel_embeddings", "k"} & {*case.inputs}
]
OF_ALL = smallest(PLAIN, 1) + [case for case in PLAIN if "causal" in case.config][:1]


@pytest.fixture(params=with_nightly([False, True], commit=[False]), ids=["compiled", "eager"])
def both_ways(request):
    """A function's output and gradients under jit; nightly an eager run must be like it."""
    return partial(_both_ways, request.param)


def _both_ways(eagerly, f, *args):
    """Output and gradients under jit, all finite and of the shapes that they should have."""

    @jax.jit
    def run(*args):
        out, back = jax.vjp(f, *args)
        return out, back(jnp.ones_like(out))

    out, gradients = run(*args)
    if eagerly:
        eager = f(*args)
        assert eager.shape == out.shape and np.isfinite(eager).all()
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, args)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((out, gradients)))
    return out, gradients


# The axes of x before its width, and those of the result: of tokens, a class token and images.
TOKENS = {lead: lead for lead in [(0, 3), (2, 0), (0,)]}
OF_LAYERS = [
    (case, *axes)
    for case in OF_ALL
    for axes in layer_facts.EMPTY_SHAPES.get(case.variant, TOKENS).items()
]


ONCE_EACH = [next(row for row in OF_LAYERS if row[0] is case) for case in OF_ALL[::5]]


@pytest.mark.parametrize(
    ("case", "lead", "after"), with_nightly(OF_LAYERS, commit=ONCE_EACH), ids=str
)
def test_layers_take_sequences_of_length_zero(case, lead, after, both_ways):
    inputs = {
        name: np.ones((*lead, x.shape[-1]), np.float32)
        for name, x in case.arrays().items()
        if np.issubdtype(x.dtype, np.floating)
    }
    f, params, floats = pure(case, inputs)
    out, (of_params, _) = both_ways(f, params, floats)
    assert out.shape[:-1] == after
    assert out.shape[-1] == jax.eval_shape(f, params, pure(case)[2]).shape[-1]
    assert not any(np.any(x) for x in of_params.values())


def cross(kind, config, looks, seen):
    """A layer of two sequences as a function of its parameters and both, and arguments for it."""
    layer = kind(**config, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    return (
        lambda params, looks, seen: nnx.merge(graph, params, rest, copy=True)(
            **({"h": seen, "s": looks} if "units" in config else {"query": looks, "key": seen})
        ),
        params,
        np.ones(looks, np.float32),
        np.ones(seen, np.float32),
    )


CROSS = {
    "bahdanau": (BahdanauAttention, {"d_encoder": 11, "d_decoder": 7, "units": 6}),
    "luong dot": (LuongAttention, {"d_decoder": 7, "d_encoder": 7, "score": "dot", "units": None}),
    "luong general": (LuongAttention, {"d_decoder": 7, "d_encoder": 11, "units": None}),
    "luong concat": (
        LuongAttention,
        {"d_decoder": 7, "d_encoder": 11, "score": "concat", "units": 6},
    ),
    "transformer": (
        TransformerMultiHeadAttention,
        {"embed_dim": 12, "num_heads": 3, "bias": False},
    ),
}


@pytest.mark.parametrize("name", CROSS)
def test_cross_attention_over_no_keys_gives_zeros(name, both_ways):
    kind, config = CROSS[name]
    width, seen = (config.get("d_decoder", 12), config.get("d_encoder", 12))
    f, *args = cross(kind, config, (2, 5, width), (2, 0, seen))
    out, gradients = both_ways(f, *args)
    assert out.shape == (2, 5, seen)
    assert not np.any(out) and not any(np.any(x) for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize("name", CROSS)
def test_cross_attention_of_no_queries_has_zero_gradients(name, both_ways):
    kind, config = CROSS[name]
    width, seen = (config.get("d_decoder", 12), config.get("d_encoder", 12))
    f, *args = cross(kind, config, (2, 0, width), (2, 9, seen))
    out, gradients = both_ways(f, *args)
    assert out.shape == (2, 0, seen)
    assert not any(np.any(x) for x in jax.tree.leaves(gradients))


RULES = {
    "plain": {},
    "causal": {"mask": CAUSAL},
    "all": {
        "mask": CAUSAL & Lengths(np.asarray(3)),
        "score": Additive(np.ones((1, 1), np.float32)),
        "dropout": Dropout(0.5, jax.random.key(0)),
    },
}
SHAPES = [((0,), 5, 9), ((2,), 0, 9), ((4, 0), 5, 9), ((2,), 5, 0)]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("lead", "T", "S"), SHAPES, ids=str)
def test_attend_takes_no_queries_and_no_keys(lead, T, S, rules, both_ways):
    q, k, v = (np.ones((*lead, *rest), np.float32) for rest in ((T, N, H), (S, K, H), (S, K, h)))
    out, gradients = both_ways(lambda q, k, v: attend(q, k, v, **RULES[rules]), q, k, v)
    assert out.shape == (*lead, T, N, h)
    assert not np.any(out) and not any(np.any(x) for x in gradients)
    if rules != "all":
        weights = jax.jit(partial(attention_weights, **RULES[rules]))
        assert weights(q, k).shape == (*lead, N, T, S)


def test_with_no_keys_the_lse_is_that_of_the_sink():
    q, k = jnp.ones((5, N, H)), jnp.ones((0, K, H))
    sinks = jnp.arange(1.0, N + 1)
    out, lse = attend(q, k, k, return_lse=True)
    assert not np.any(out) and (lse == -jnp.inf).all()
    out, lse = attend(q, k, k, sinks=sinks, return_lse=True)
    assert not np.any(out) and (lse == jnp.broadcast_to(sinks[None], (5, N))).all()
