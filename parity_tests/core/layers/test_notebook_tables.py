"""Every table printed in the source notebooks, reproduced by the Flax side to its four decimals."""

import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    DropoutMask,
    SelfAttentionV1,
    SimplifiedSelfAttention,
    UniformCausalAverage,
    attention_weights,
    reference,
    split_heads,
    taps,
)
from flax_attn.parity import judge

from . import notebook

GPT, HEAD, THEORY, LECTURE = (
    "gpt_notebook",
    "single_head_notebook",
    "theory_notebook",
    "lecture",
)
NAMES = [(g, n) for g in (GPT, HEAD, THEORY, LECTURE) for n in notebook.TABLES[g]]
NOT_WEIGHTS = {"weights_times_mask", "dropout_of_causal_weights", "exercise_v1_with_v2_weights"}
WEIGHTS = {n for _, n in NAMES if "weights" in n} - NOT_WEIGHTS


def heard(layer, x):
    """The layer's output and everything it taps, the last of each name."""
    with taps.listen() as found:
        out = layer(x)
    return out, dict(found)


def no_weights():
    x = jnp.asarray(notebook.inputs())
    context, tap = heard(SimplifiedSelfAttention(), x)
    sums = heard(SimplifiedSelfAttention(normalise="sum"), x)[1]["weights"]
    five = jnp.asarray([0.1, -0.2, 0.3, -0.2, 0.5])
    tensor = jnp.asarray(notebook.table(GPT, "head_split_tensor"), jnp.float32)
    flat = jnp.swapaxes(tensor, 1, 2).reshape(1, 3, 8)
    heads = jnp.swapaxes(split_heads(flat, 4), 1, 2)
    return {
        "scores_journey": tap["scores"][1],
        "weights_journey_sum_normalised": sums[1],
        "weights_journey": tap["weights"][1],
        "context_journey": context[1],
        "scores": tap["scores"],
        "weights": tap["weights"],
        "context": context,
        "softmax_scale_input": five,
        "softmax_scale_1": reference.softmax(five),
        "softmax_scale_8": reference.softmax(8 * five),
        "batch": jnp.stack([x, x]),
        "head_split_tensor": heads,
        "head_split_product": heads @ heads.mT,
    }


def first_version():
    x = jnp.asarray(notebook.inputs())
    layer = notebook.layer("v1")
    q, k, v = (x @ w[...] for w in (layer.W_query, layer.W_key, layer.W_value))
    out, tap = heard(layer, x)
    return {
        "W_query": layer.W_query[...],
        "W_key": layer.W_key[...],
        "W_value": layer.W_value[...],
        "queries": q,
        "keys": k,
        "values": v,
        "query_journey": q[1],
        "scaled_case_scores_journey": q[1] @ k.T,
        "trainable_scores": q @ k.T,
        "trainable_weights_journey": tap["weights"][1],
        "trainable_context_journey": out[1],
        "self_attention_v1": out,
    }


def second_version():
    x = jnp.asarray(notebook.inputs())
    layer = notebook.layer("v2")
    out, tap = heard(layer, x)
    q, k = layer.W_query(x), layer.W_key(x)
    past = CAUSAL.grid(notebook_sizes())[0, 0]
    causal = attention_weights(q[:, None], k[:, None], mask=CAUSAL)[0]
    visible = jnp.where(past, tap["weights"], 0)
    ones = jnp.ones((6, 6))
    keep = notebook.table(GPT, "dropout_of_ones") > 0
    drop = DropoutMask(keep, 0.5)
    return {
        "self_attention_v2": out,
        "self_attention_v2_weights": tap["weights"],
        "causal_keep_mask": past.astype(float),
        "weights_times_mask": visible,
        "weights_renormalised": visible / visible.sum(axis=-1, keepdims=True),
        "masked_scores": jnp.where(past, q @ k.T, -jnp.inf),
        "causal_weights": causal,
        "dropout_of_ones": drop.apply(ones, jnp.asarray(keep)),
        "dropout_of_causal_weights": drop.apply(causal, jnp.asarray(keep)),
    }


def notebook_sizes():
    from flax_attn._internal.types import Sizes

    return Sizes((), 1, 6, 6)


def heads():
    x = jnp.asarray(notebook.inputs())
    batch = jnp.stack([x, x])
    return {
        "causal_attention": notebook.layer("causal")(batch),
        "multi_head_wrapper": notebook.layer("wrapper")(batch),
        "multi_head_attention": notebook.layer("multi_head")(batch),
    }


def single_head():
    layer, x = notebook.head()
    _, tap = heard(layer, jnp.asarray(x))
    average = heard(UniformCausalAverage(), jnp.ones((8, 2)))[1]["weights"]
    q, k = layer.query(jnp.asarray(x)), layer.key(jnp.asarray(x))
    return {
        "uniform_causal_average": average,
        "head_scores_batch0": (q @ k.mT)[0],
        "head_masked_scores_batch0": tap["scores"][0],
        "head_weights_batch0": tap["weights"][0],
    }


def exercise():
    x = jnp.asarray(notebook.inputs())
    second = notebook.layer("exercise_v2")
    first = SelfAttentionV1(3, 2, rngs=notebook.nnx.Rngs(0))
    for name in ("W_query", "W_key", "W_value"):
        getattr(first, name).set_value(getattr(second, name).kernel[...])
    return {"exercise_v1_with_v2_weights": first(x), "exercise_v2": second(x)}


def lecture():
    x = jnp.asarray(notebook.inputs())
    layer = notebook.layer("v1")
    q, k = x @ layer.W_query[...], x @ layer.W_key[...]
    weights = attention_weights(q[:, None], k[:, None], mask=CAUSAL)[0]
    return {"causal_weights_rows_2_3": weights[1:3]}


@pytest.fixture(scope="module")
def ours():
    gpt = no_weights() | first_version() | second_version() | heads()
    groups = {GPT: gpt, HEAD: single_head(), THEORY: exercise(), LECTURE: lecture()}
    return {(g, n): np.asarray(x) for g, made in groups.items() for n, x in made.items()}


@pytest.mark.nightly
def test_every_table_of_the_notebooks_is_checked(ours):
    assert set(ours) == set(NAMES)
    assert len(NAMES) == 44


@pytest.mark.nightly
@pytest.mark.parametrize(("group", "name"), NAMES)
def test_a_printed_table_of_a_notebook_is_reproduced(ours, group, name):
    assert judge.printed(ours[group, name], notebook.table(group, name))


@pytest.mark.parametrize("name", sorted(WEIGHTS | {"uniform_causal_average"}))
def test_rows_of_weights_sum_to_one(ours, name):
    weights = next(x for (_, n), x in ours.items() if n == name)
    assert judge.printed(weights.sum(axis=-1), np.ones(weights.shape[:-1]))


def test_weights_are_what_torch_draws():
    pytest.importorskip("torch", reason="the seeds are torch's")
    with np.load(notebook.STORED) as stored:
        drawn = notebook.draw()
        assert set(stored) == set(drawn)
        for name in stored:
            assert judge.exact(stored[name], drawn[name]).ok, name
