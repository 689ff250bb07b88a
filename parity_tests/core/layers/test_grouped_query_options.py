"""What can be handed to GroupedQueryAttention: masks held and given, rules, sinks, valid tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import (
    CAUSAL,
    FULL,
    Alibi,
    Causal,
    Dropout,
    GroupedQueryAttention,
    Lengths,
    Prefix,
    Rotary,
    Rules,
    Softcap,
    Window,
    alibi_slopes,
)
from flax_attn.parity import judge
from parity_tests import test_grouped_query
from parity_tests.core.backends.refusal import refused

X = np.random.RandomState(0).standard_normal((2, 7, 11)).astype(np.float32)
VALID = np.asarray([[True] * 7, [True] * 5 + [False] * 2])


def build(**given):
    return GroupedQueryAttention(11, 6, 3, 4, **{"rngs": nnx.Rngs(0), **given})


@nnx.jit
def run(layer, x, **given):
    return layer(x, **given)


def same(got, want):
    return judge.exact(np.asarray(got), np.asarray(want)).ok


@pytest.mark.nightly
def test_the_mask_of_a_call_replaces_the_layers():
    narrow, plain = build(mask=Window(2, 0)), build()
    assert plain.mask == CAUSAL and narrow.mask == Window(2, 0)
    assert same(run(narrow, X), run(plain, X, mask=Window(2, 0)))
    assert same(run(narrow, X, mask=CAUSAL), run(plain, X))
    assert not same(run(narrow, X), run(plain, X))
    both = run(narrow, X, mask=narrow.mask & Lengths(4))
    assert same(both, run(plain, X, mask=Window(2, 0) & Lengths(4)))


@pytest.mark.nightly
def test_layers_hold_masks_and_scores_with_arrays():
    mask, score = CAUSAL & Lengths(jnp.asarray([7, 5])), Alibi(alibi_slopes(6))
    layer, plain = build(mask=mask, rules=Rules(score=score)), build()
    graph, state = nnx.split(layer)
    merged = nnx.merge(graph, state)
    assert merged.mask == mask and same(run(merged, X), run(layer, X))
    assert same(run(layer, X, mask=CAUSAL), run(build(rules=Rules(score=score)), X))
    assert not same(run(layer, X, mask=CAUSAL), run(plain, X))
    assert nnx.to_flat_state(nnx.state(layer, nnx.Param)).paths == (
        *((name, "kernel") for name in ("k_proj", "o_proj", "q_proj", "v_proj")),
    )


PARTS = {
    "mask": Rules(mask=CAUSAL),
    "sinks": Rules(sinks=jnp.zeros(6)),
    "dropout": Rules(dropout=Dropout(0.5, jax.random.key(0))),
}


@pytest.mark.nightly(but=["sinks"])
@pytest.mark.parametrize("part", PARTS)
def test_rules_of_a_layer_carry_score_and_scale_only(part):
    words = f"rules of a layer carry score and scale only; got Rules with {part}."
    with refused(ValueError, words, "mask=, sinks=True and dropout=rate"):
        build(rules=PARTS[part])
    assert build(rules=Rules(score=Softcap(3.0), scale=0.5)).rules.scale == 0.5


@pytest.mark.nightly
def test_norms_after_the_rotary_are_its_twins():
    """Whose gains differ by number, so that they do not commute with the rotation."""
    (case,) = (case for case in test_grouped_query.CASES if case.name == "rotary,norm_after_rotary")
    report = case.report(eager=False)
    assert report.ok, report


@pytest.mark.nightly
def test_what_would_be_ignored_is_refused():
    with refused(TypeError, "rules must be a flax_attn.Rules; got Softcap."):
        build(rules=Softcap(3.0))
    with refused(TypeError, "A mask must be a flax_attn mask or a boolean array"):
        build(mask=None)
    for given in ({"rotary": Rotary()}, {"q_norm": jnp.tanh}, {}):
        with refused(ValueError, "norm_after_rotary=True", "q_norm= and k_norm="):
            build(norm_after_rotary=True, **given)
    for bound in (0, -1.0, float("inf"), float("nan")):
        with refused(ValueError, "clip_qkv must be a finite number above zero", f"got {bound}"):
            build(clip_qkv=bound)
    layer = build()
    with refused(TypeError, "valid must be boolean", "got int32"):
        layer(X, valid=VALID.astype(np.int32))
    with refused(ValueError, "valid must broadcast to *B T = (2, 7); got shape (3, 7)."):
        layer(X, valid=np.ones((3, 7), bool))


@pytest.mark.nightly
def test_invalid_tokens_are_neither_read_nor_seen():
    """Outputs and gradients are those of the sentences alone, whatever stands in the padding."""
    layer = build(rotary=Rotary(), sinks=True, qkv_bias=True, out_bias=True, mask=Window(9, 9))
    layer.sinks[...] = jnp.linspace(-1.0, 1.0, 6)
    padded = np.where(VALID[..., None], X, np.nan)

    @nnx.jit
    def padded_loss(layer, x):
        y = layer(x, valid=VALID)
        return (y**2).sum(), y

    @nnx.jit
    def loss_alone(layer, whole, short):
        one, two = layer(whole), layer(short)
        return (one**2).sum() + (two**2).sum(), (one, two)

    (_, y), got = nnx.value_and_grad(padded_loss, has_aux=True)(layer, padded)
    alone = nnx.value_and_grad(loss_alone, has_aux=True)
    (_, (one, two)), want = alone(layer, X[0], X[1, :5])
    assert not np.any(y[1, 5:]) and judge.allclose(y[0], one) and judge.allclose(y[1, :5], two)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert judge.allclose(a, b) and np.any(b)


@pytest.mark.nightly
def test_sinks_start_at_zero_and_train():
    layer = build(sinks=True, param_dtype=jnp.bfloat16)
    assert isinstance(layer.sinks, nnx.Param) and layer.sinks.dtype == jnp.bfloat16
    assert layer.sinks.shape == (6,) and not np.any(layer.sinks[...])
    assert build().sinks is None
    x = jnp.asarray(X, jnp.bfloat16)
    gradient = nnx.jit(nnx.grad(lambda layer: (layer(x) ** 2).sum()))(layer)
    assert np.all(gradient["sinks"][...])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"mask": Causal(offset=0)},
        {"mask": Causal() & Window(3, 0) | Prefix(2)},
        {"mask": FULL, "rules": Rules(score=Softcap(3.0) >> Softcap(2.0))},
        {"rotary": Rotary(), "sinks": True},
    ],
    ids=["causal", "several", "score", "rotary and sinks"],
)
def test_a_table_of_the_layer_shows_what_it_holds(options):
    layer = GroupedQueryAttention(12, 6, 3, 4, **options, rngs=nnx.Rngs(0))
    table = nnx.tabulate(layer, jnp.ones((2, 5, 12)))
    mask = options.get("mask", Causal())
    assert "q_proj" in table and type(mask).__name__ in table
