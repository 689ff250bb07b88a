"""The laws that all layers of the climb keep, with numpy in float64 as a third oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import taps
from flax_attn.layers import (
    CausalAttention,
    CausalRenormalisedAttention,
    MultiHeadAttention,
    MultiHeadAttentionCombined,
    MultiHeadAttentionEinsum,
    MultiHeadAttentionWrapper,
    SelfAttentionV1,
    SelfAttentionV2,
    SimplifiedSelfAttention,
    SingleHeadAttention,
    UniformCausalAverage,
)
from flax_attn.parity import judge
from parity_tests.core.drawing import float64 as float64

D, CONTEXT = 11, 9
WIDTHS = {"d_in": D, "d_out": 6}
CAUSAL = {**WIDTHS, "context_length": CONTEXT, "dropout": 0.0, "qkv_bias": True}
MANY = {**CAUSAL, "d_out": 12, "num_heads": 3}
LAYERS = {
    SimplifiedSelfAttention: {},
    UniformCausalAverage: {},
    SelfAttentionV1: WIDTHS,
    SelfAttentionV2: {**WIDTHS, "qkv_bias": True},
    CausalRenormalisedAttention: CAUSAL,
    CausalAttention: CAUSAL,
    SingleHeadAttention: {"d_in": D, "head_size": 6},
    MultiHeadAttentionWrapper: {**MANY, "d_out": 4},
    MultiHeadAttention: MANY,
    MultiHeadAttentionCombined: MANY,
    MultiHeadAttentionEinsum: MANY,
}
SEES_THE_FUTURE = (SimplifiedSelfAttention, SelfAttentionV1, SelfAttentionV2)
WITH_DROPOUT = [kind for kind, config in LAYERS.items() if "dropout" in config]
MULTI = [kind for kind, config in LAYERS.items() if "num_heads" in config]

of_all = pytest.mark.parametrize("kind", LAYERS)


def build(kind, **given):
    """A layer of the climb; as good as float64 unless told otherwise."""
    config = {**LAYERS[kind], "param_dtype": jnp.float64, "rngs": nnx.Rngs(0), **given}
    return kind(**config)


def tokens(*shape):
    return jnp.asarray(np.random.RandomState(0).standard_normal(shape))


def same(got, want):
    return judge.same_function(np.asarray(got), np.asarray(want)).ok


def attention(q, k, v, scale, causal):
    """One sentence and one head in numpy, row by row, each over the tokens it sees."""
    rows = []
    for t in range(len(q)):
        seen = t + 1 if causal else len(k)
        weights = np.exp(scale * (k[:seen] @ q[t]))
        rows.append(weights @ v[:seen] / weights.sum())
    return np.stack(rows)


def projections(layer, x):
    """`q, k, v` of every head in numpy, from whatever parameters the layer has."""
    p = {
        ".".join(map(str, path)): np.asarray(v[...])
        for path, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }
    names = [("query", "W_query"), ("key", "W_key"), ("value", "W_value")]
    match layer:
        case SimplifiedSelfAttention():
            return [(x, x, x)]
        case UniformCausalAverage():
            return [(0 * x, x, x)]
        case SelfAttentionV1():
            return [tuple(x @ p[name] for _, name in names)]
        case SingleHeadAttention():
            return [tuple(x @ p[f"{name}.kernel"] for name, _ in names)]
        case MultiHeadAttentionWrapper():
            wide = [
                [x @ p[f"heads.{i}.{n}.kernel"] + p[f"heads.{i}.{n}.bias"] for _, n in names]
                for i in range(3)
            ]
            return [tuple(head) for head in wide]
        case MultiHeadAttentionCombined():
            wide = np.split(x @ p["qkv.kernel"] + p["qkv.bias"], 3, axis=-1)
        case MultiHeadAttentionEinsum():
            wide = [x @ p[name].T + p[f"b_{short}"] for short, name in names]
        case _:
            wide = [x @ p[f"{name}.kernel"] + p[f"{name}.bias"] for _, name in names]
    return list(
        zip(*(np.split(part, getattr(layer, "num_heads", 1), -1) for part in wide), strict=True)
    )


@of_all
def test_numpy_agrees(kind):
    layer, x = build(kind), tokens(7, D)
    heads = projections(layer, np.asarray(x))
    plain = kind in (SimplifiedSelfAttention, UniformCausalAverage, SingleHeadAttention)
    scale = 1.0 if plain else heads[0][0].shape[-1] ** -0.5
    contexts = [attention(*head, scale, kind not in SEES_THE_FUTURE) for head in heads]
    want = np.concatenate(contexts, axis=-1)
    if hasattr(layer, "out_proj"):
        want = want @ np.asarray(layer.out_proj.kernel[...]) + np.asarray(layer.out_proj.bias[...])
    assert same(layer(x), want)


@of_all
def test_a_batch_equals_each_sentence_alone(kind):
    layer, x = build(kind), tokens(4, 2, 5, D)
    whole = layer(x)
    for i in range(4):
        for j in range(2):
            assert same(layer(x[i, j]), whole[i, j])


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind not in SEES_THE_FUTURE])
def test_what_comes_later_changes_nothing(kind):
    layer, x = build(kind), tokens(2, 7, D)
    whole, other = layer(x), layer(x.at[:, 5:].multiply(-3.0))
    assert same(other[:, :5], whole[:, :5])
    assert not (other[:, 5:] == whole[:, 5:]).any()
    if kind is not CausalRenormalisedAttention:  # there the future passes through a denominator
        assert (other[:, :5] == whole[:, :5]).all()


@of_all
def test_every_row_of_weights_sums_to_one(kind):
    with taps.listen() as heard:
        build(kind)(tokens(2, 7, D))
    tables = [value for name, value in heard if name.startswith("weights")]
    assert tables
    for table in tables:
        zeroed = jnp.triu(jnp.ones_like(table, dtype=bool), k=1) & (kind not in SEES_THE_FUTURE)
        before = kind is CausalRenormalisedAttention and table is tables[0]
        assert before or not jnp.where(zeroed, table, 0).any()
        assert same(table.sum(-1), np.ones(table.shape[:-1]))


@pytest.mark.parametrize("kind", WITH_DROPOUT)
def test_in_eval_mode_dropout_is_not_there(kind):
    x = tokens(2, 5, D)
    without, with_dropout = build(kind), build(kind, dropout=0.5)
    assert (with_dropout(x, deterministic=True) == without(x)).all()
    assert not (with_dropout(x) == without(x)).all()
    with_dropout.eval()
    assert (with_dropout(x) == without(x)).all()


@pytest.mark.parametrize("kind", [CausalAttention, CausalRenormalisedAttention])
def test_nothing_survives_a_rate_of_one(kind):
    assert not build(kind, dropout=1.0)(tokens(2, 5, D)).any()


@of_all
@pytest.mark.parametrize("shape", [(0, D), (2, 0, D), (0, 5, D), (1, D)])
def test_no_tokens_and_no_sentences(kind, shape):
    assert build(kind)(tokens(*shape)).shape[:-1] == shape[:-1]


@of_all
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtype_reaches_the_arithmetic(kind, dtype):
    with taps.listen() as heard:
        out = build(kind, dtype=dtype)(tokens(2, 5, D))
    assert {out.dtype, *(value.dtype for _, value in heard)} == {jnp.dtype(dtype)}


@of_all
def test_parameters_have_their_dtype_and_nothing_else_is_state(kind):
    layer = build(kind, param_dtype=jnp.float32)
    for _, variable in nnx.to_flat_state(nnx.state(layer)):
        if isinstance(variable, nnx.Param):
            assert variable[...].dtype == jnp.float32
        else:
            assert isinstance(variable, nnx.RngState)


@of_all
def test_the_start_is_torchs(kind):
    low, high = (0.0, 1.0) if kind is SelfAttentionV1 else (-(D**-0.5), D**-0.5)
    for path, param in nnx.to_flat_state(nnx.state(build(kind), nnx.Param)):
        if "out_proj" not in path:
            assert low <= param[...].min() < param[...].max() < high


@of_all
def test_runs_under_jit_vmap_and_grad(kind):
    layer, x = build(kind), tokens(2, 5, D)
    graph, state = nnx.split(layer)

    def forward(x):
        return nnx.merge(graph, state, copy=True)(x)

    assert same(jax.jit(forward)(x), layer(x))
    assert same(jax.vmap(forward)(x), layer(x))
    assert jax.grad(lambda x: forward(x).mean())(x).shape == x.shape


@of_all
def test_refuses_what_is_no_sentence(kind):
    """Where pytest checks shapes at run time, that check comes first."""
    layer = build(kind)
    with pytest.raises(TypeError, match=r"x must be floating; got int|Type-check error"):
        layer(jnp.ones((5, D), int))
    with pytest.raises((ValueError, TypeError), match=r"x must have shape|Type-check error"):
        layer(jnp.ones(D))
    if LAYERS[kind]:
        with pytest.raises(ValueError, match=rf"\(\*batch, length, {D}\); got \(5, 6\)"):
            layer(jnp.ones((5, 6)))


@pytest.mark.parametrize("kind", WITH_DROPOUT)
def test_refuses_a_sentence_beyond_its_context(kind):
    with pytest.raises(ValueError, match=f"context_length={CONTEXT} tokens; got {CONTEXT + 1}"):
        build(kind)(tokens(CONTEXT + 1, D))
    with pytest.raises(ValueError, match="dropout is the share dropped"):
        build(kind, dropout=1.5)


@of_all
def test_refuses_sizes_that_cannot_be(kind):
    for name in LAYERS[kind].keys() & {"d_in", "d_out", "head_size", "context_length", "num_heads"}:
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1; got 0"):
            build(kind, **{name: 0})


@pytest.mark.parametrize("kind", [k for k in MULTI if k is not MultiHeadAttentionWrapper])
def test_refuses_heads_that_do_not_divide(kind):
    with pytest.raises(ValueError, match="num_heads must divide d_out; got d_out=12, num_heads=5"):
        build(kind, num_heads=5)


def test_refuses_options_that_do_not_exist():
    with pytest.raises(ValueError, match="normalise must be one of 'softmax', 'sum'; got 'max'"):
        SimplifiedSelfAttention(normalise="max")
    with pytest.raises(ValueError, match="context_dropout is the share dropped"):
        build(CausalAttention, context_dropout=-0.1)
