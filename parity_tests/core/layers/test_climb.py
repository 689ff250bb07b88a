"""The laws that all layers of the climb keep, with numpy in float64 as a third witness.

Runs are eager and of one shape, SHAPE, since the first such run of a layer compiles every operation
and the others none; what asks for another shape runs under jit, as one program.
"""

from functools import cache

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
from parity_tests.tables import with_nightly

D, CONTEXT = 11, 9
SHAPE = 2, 2, 7, D
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


@cache
def standard(kind):
    """The layer as LAYERS has it, which no test changes, and what it makes of tokens."""
    layer = build(kind)
    return layer, layer(tokens(*SHAPE))


@nnx.jit
def compiled(layer, x):
    return layer(x)


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


@pytest.mark.nightly
@of_all
def test_numpy_agrees(kind):
    layer, found = standard(kind)
    plain = kind in (SimplifiedSelfAttention, UniformCausalAverage, SingleHeadAttention)
    for at in np.ndindex(SHAPE[:2]):
        heads = projections(layer, np.asarray(tokens(*SHAPE))[at])
        scale = 1.0 if plain else heads[0][0].shape[-1] ** -0.5
        contexts = [attention(*head, scale, kind not in SEES_THE_FUTURE) for head in heads]
        want = np.concatenate(contexts, axis=-1)
        if hasattr(layer, "out_proj"):
            kernel, bias = (
                np.asarray(x[...]) for x in (layer.out_proj.kernel, layer.out_proj.bias)
            )
            want = want @ kernel + bias
        assert same(np.asarray(found)[at], want)


@pytest.mark.nightly
@of_all
def test_a_batch_equals_each_sentence_alone(kind):
    layer, whole = standard(kind)
    for at in np.ndindex(SHAPE[:2]):
        assert same(compiled(layer, np.asarray(tokens(*SHAPE))[at]), np.asarray(whole)[at])


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind not in SEES_THE_FUTURE])
def test_what_comes_later_changes_nothing(kind):
    layer, whole = standard(kind)
    x = np.array(tokens(*SHAPE))
    x[..., 5:, :] *= -3.0
    other, whole = np.asarray(layer(jnp.asarray(x))), np.asarray(whole)
    assert same(other[..., :5, :], whole[..., :5, :])
    assert not (other[..., 5:, :] == whole[..., 5:, :]).any()
    if kind is not CausalRenormalisedAttention:  # there the future passes through a denominator
        assert (other[..., :5, :] == whole[..., :5, :]).all()


@of_all
def test_every_row_of_weights_sums_to_one(kind):
    layer, _ = standard(kind)
    with taps.listen() as heard:
        layer(tokens(*SHAPE))
    tables = [np.asarray(value) for name, value in heard if name.startswith("weights")]
    assert tables
    for i, table in enumerate(tables):
        zeroed = np.triu(np.ones_like(table, dtype=bool), k=1) & (kind not in SEES_THE_FUTURE)
        before = kind is CausalRenormalisedAttention and i == 0
        assert before or not np.where(zeroed, table, 0).any()
        assert same(table.sum(-1), np.ones(table.shape[:-1]))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", WITH_DROPOUT)
def test_in_eval_mode_dropout_is_not_there(kind):
    x, without = tokens(*SHAPE), np.asarray(standard(kind)[1])
    with_dropout = build(kind, dropout=0.5)
    assert (np.asarray(with_dropout(x, deterministic=True)) == without).all()
    assert not (np.asarray(with_dropout(x)) == without).all()
    with_dropout.eval()
    assert (np.asarray(with_dropout(x)) == without).all()


@pytest.mark.parametrize("kind", [CausalAttention, CausalRenormalisedAttention])
def test_nothing_survives_a_rate_of_one(kind):
    assert not np.any(build(kind, dropout=1.0)(tokens(*SHAPE)))


of_few = pytest.mark.parametrize("shape", [(0, D), (2, 0, D), (0, 5, D), (1, D)])


@pytest.mark.nightly
@of_all
@of_few
def test_no_tokens_and_no_sentences(kind, shape):
    assert jax.eval_shape(standard(kind)[0], tokens(*shape)).shape[:-1] == shape[:-1]


@pytest.mark.nightly
@of_all
@of_few
def test_no_tokens_and_no_sentences_run(kind, shape):
    assert build(kind)(tokens(*shape)).shape[:-1] == shape[:-1]


def run(function, x):
    """In the place of `jax.eval_shape`."""
    return function(x)


@of_all
@pytest.mark.parametrize("mode", with_nightly([jax.eval_shape, run], commit=[jax.eval_shape]))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtype_reaches_the_arithmetic(kind, mode, dtype):
    def told(x):
        with taps.listen() as heard:
            return build(kind, dtype=dtype)(x), [value for _, value in heard]

    out, heard = mode(told, tokens(2, 5, D))
    assert {out.dtype, *(value.dtype for value in heard)} == {jnp.dtype(dtype)}


@of_all
def test_parameters_have_their_dtype_and_nothing_else_is_state(kind):
    state = nnx.eval_shape(lambda: nnx.state(build(kind, param_dtype=jnp.float32)))
    for _, variable in nnx.to_flat_state(state):
        if isinstance(variable, nnx.Param):
            assert variable.get_value().dtype == jnp.float32
        else:
            assert isinstance(variable, nnx.RngState)


@of_all
def test_the_start_is_torchs(kind):
    low, high = (0.0, 1.0) if kind is SelfAttentionV1 else (-(D**-0.5), D**-0.5)
    for path, param in nnx.to_flat_state(nnx.state(standard(kind)[0], nnx.Param)):
        if "out_proj" not in path:
            drawn = np.asarray(param[...])
            assert low <= drawn.min() < drawn.max() < high


@pytest.mark.nightly
@of_all
def test_runs_under_jit_vmap_and_grad(kind):
    layer, want = standard(kind)
    graph, state = nnx.split(layer)

    def forward(x):
        return nnx.merge(graph, state, copy=True)(x)

    @jax.jit
    def run(x):
        return forward(x), jax.vmap(forward)(x), jax.grad(lambda x: forward(x).mean())(x)

    x = tokens(*SHAPE)
    out, mapped, gradient = run(x)
    assert same(out, want)
    assert same(mapped, want)
    assert gradient.shape == x.shape


@of_all
def test_refuses_what_is_no_sentence(kind):
    """Where pytest checks shapes at run time, that check comes first."""
    layer, _ = standard(kind)
    with pytest.raises(TypeError, match=r"x must be floating; got int|Type-check error"):
        layer(np.ones((5, D), int))
    with pytest.raises((ValueError, TypeError), match=r"x must have shape|Type-check error"):
        layer(np.ones(D))
    if LAYERS[kind]:
        with pytest.raises(ValueError, match=rf"\(\*batch, length, {D}\); got \(5, 6\)"):
            layer(np.ones((5, 6)))


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
