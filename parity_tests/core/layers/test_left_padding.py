"""Padding on the left, as Hugging Face has it: its rows see nothing and give the mean of all."""

from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from flax_attn import CAUSAL, CrossAttention, Dense, GroupedQueryAttention, Rotary, T5Attention
from flax_attn.parity import assert_parity, judge
from parity_tests.core.backends.refusal import refused
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

REAL = np.asarray([[True] * 7, [False] * 3 + [True] * 4])
SEEN = np.tri(7, dtype=bool) & REAL[:, None, None]  # B 1 T S
X = np.random.RandomState(0).standard_normal((2, 7, 24))
SIZES = {"in_features": 24, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}


def layer(**more):
    return GroupedQueryAttention(**SIZES, **more, rngs=nnx.Rngs(0))


def llama():
    """transformers' layer, and its call with an additive mask."""
    torch = pytest.importorskip("torch", reason="the witness is torch's")
    transformers = pytest.importorskip("transformers", reason="the witness is transformers'")
    from transformers.models.llama import modeling_llama

    config = transformers.LlamaConfig(
        hidden_size=24,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        attn_implementation="eager",
    )

    def call(module, x):
        hidden, lowest = torch.tensor(~SEEN), torch.finfo(x.dtype).min
        mask = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, lowest)
        turns = modeling_llama.LlamaRotaryEmbedding(config)(x, torch.arange(7)[None])
        return module(x, position_embeddings=turns, attention_mask=mask)[0]

    return modeling_llama.LlamaAttention(config, 0), call


def padded():
    return layer(rotary=Rotary(), mask=CAUSAL & Dense(REAL[:, None, None, :]))


def mean(module, x, **more):
    return module(x, empty="mean", **more)


def test_every_row_is_that_of_transformers():
    """Outputs of all rows; gradients too, as a loss has them that leaves padding out.

    In rows of padding torch's sum with finfo.min also sends a gradient to q and k.
    """
    module, call = llama()
    options = {"eager": False, "taps": False}
    dtypes = ("float64", "float32", "bfloat16")
    both = {"torch_call": call, "flax_call": mean}
    assert_parity(module, padded(), X, **both, grads=False, dtypes=dtypes, **options)

    def theirs(module, x):
        y = call(module, x)
        return y.masked_fill(~y.new_tensor(REAL[..., None]).bool(), 0.0)

    def ours(module, x):
        return jax.numpy.where(REAL[..., None], mean(module, x), 0)

    assert_parity(module, padded(), X, torch_call=theirs, flax_call=ours, **options)


OPTIONS = [{}, {"sinks": True}, {"qkv_bias": True, "out_bias": True}]


@pytest.mark.parametrize("more", with_nightly(OPTIONS, commit=OPTIONS[:2]), ids=str)
def test_every_row_and_gradient_is_that_of_the_twin(more):
    pytest.importorskip("torch", reason="the twin is torch's")
    from torch_ref.grouped_query import GroupedQueryAttention as Twin

    both = {"torch_call": mean, "flax_call": mean, "kwargs": {"mask": SEEN}}
    assert_parity(Twin(**SIZES, **more), layer(**more), X, **both, eager=False)


def test_the_word_reaches_the_arithmetic_and_the_default_is_zero():
    module, x = layer(), X.astype(np.float32)
    calls = (partial(module, **how) for how in ({}, {"empty": "zero"}, {"empty": "mean"}))
    a, b, c = (np.asarray(nnx.jit(f)(x, mask=SEEN)) for f in calls)
    assert judge.exact(a, b).ok and judge.exact(a[REAL], c[REAL]).ok
    assert not a[~REAL].any() and c[~REAL].all()
    values = module.v_proj(x).mean(1).reshape(2, 3, 1, 4)
    want = module.o_proj(np.broadcast_to(values, (2, 3, 2, 4)).reshape(2, 24))
    assert judge.allclose(c[1, 0], want[1])


def test_another_word_is_refused():
    with refused(ValueError, "empty must be one of 'zero', 'mean'; got 'nan'."):
        layer()(X, empty="nan")


@pytest.mark.parametrize(
    "build",
    [
        lambda **init: CrossAttention(12, 3, **init),
        lambda **init: T5Attention(12, 3, 4, **init),
    ],
)
def test_layers_with_a_memory_say_what_an_empty_row_gives(build):
    attention, x = build(rngs=nnx.Rngs(0)), np.ones((2, 5, 12), np.float32)
    nothing = np.zeros((5, 5), bool)
    call = nnx.jit(lambda layer, x, mask: layer(x, mask=mask))
    averaged = nnx.jit(lambda layer, x, mask: mean(layer, x, mask=mask))
    found = np.asarray(averaged(attention, x, nothing))
    assert found.any() and judge.allclose(
        found, call(attention, x, ~nothing)
    )  # all values are alike
    assert judge.allclose(call(attention, x, nothing), call(attention, 0 * x, nothing))
    with refused(ValueError, "empty must be one of 'zero', 'mean'; got 'nan'."):
        attention(x, empty="nan")
