"""Every layer refuses bad arguments and bad input before any arithmetic, and names them."""

import inspect
from functools import cache
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.layers.bahdanau import BahdanauAttention
from flax_attn.layers.class_attention import ClassAttention
from flax_attn.layers.grouped_query import GroupedQueryAttention
from flax_attn.layers.linear import LinearAttention
from flax_attn.layers.luong import LuongAttention
from flax_attn.layers.multi_head import MultiHeadAttention
from flax_attn.layers.multi_head_combined import MultiHeadAttentionCombined
from flax_attn.layers.multi_head_einsum import MultiHeadAttentionEinsum
from flax_attn.layers.simplified_self_attention import SimplifiedSelfAttention
from flax_attn.layers.spatial_reduction import SpatialReductionAttention
from flax_attn.layers.t5 import T5Attention
from flax_attn.layers.transformer_multi_head import TransformerMultiHeadAttention
from flax_attn.scores import IDENTITY
from parity_tests.core import layer_facts
from parity_tests.core.backends.refusal import refused, told
from parity_tests.core.cases import every_case
from parity_tests.tables import with_nightly

GIVEN = {}
for case in every_case():
    if not callable(case.config) and not case.train:
        GIVEN.setdefault(case.flax_class, case)
LAYERS = list(GIVEN)
of_all = pytest.mark.parametrize("kind", LAYERS)
of_a_third = pytest.mark.parametrize("kind", with_nightly(LAYERS, commit=3))
RATES = [-0.1, 1.5, float("nan"), "0.1"]
ANY_WIDTH = [kind for kind in LAYERS if not GIVEN[kind].config]


def build(kind, **given):
    return kind(**{**GIVEN[kind].config, "rngs": nnx.Rngs(0), **given})


def outline(kind, **given):
    """A layer whose weights have shapes and no values: none is drawn in vain."""
    return nnx.eval_shape(lambda: build(kind, **given))


@cache
def layer_of(kind):
    """The layer of the first case, all weights zero."""
    graph, state = nnx.split(outline(kind))
    return nnx.merge(graph, jax.tree.map(filled, state))


def filled(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return jnp.asarray(np.zeros(x.shape, x.dtype))


@cache
def drawn(kind):
    return GIVEN[kind].arrays()


def arguments(kind, annotation):
    given = inspect.signature(kind.__init__).parameters.values()
    return [x.name for x in given if x.annotation in (annotation, annotation | None)]


def inputs(kind):
    """Ones for all that the layer is called with, by name."""
    return {name: np.ones(x.shape, np.float32) for name, x in drawn(kind).items()}


def called(kind, whole):
    """The layer, called as its case calls it."""
    return GIVEN[kind].flax_call(layer_of(kind), **whole)


def having(name):
    return [kind for kind in LAYERS if name in inspect.signature(kind.__init__).parameters]


def test_every_layer_is_here():
    assert len(LAYERS) >= 16
    assert len(having("dropout")) >= 7 and len(having("context_length")) >= 6


@pytest.mark.nightly
@of_all
def test_counts_are_whole_numbers_from_one(kind):
    for name in arguments(kind, int):
        for count in (0, -1, 2.5, True)[name == "depth" :]:  # which counts layers from zero
            if GIVEN[kind].config.get(name) is not None:
                with refused(ValueError, name, repr(count)):
                    build(kind, **{name: count})


@pytest.mark.nightly
@of_a_third
@pytest.mark.parametrize("rate", with_nightly(RATES, commit=len(RATES)))
def test_rates_lie_between_zero_and_one(kind, rate):
    for name in inspect.signature(kind.__init__).parameters:
        if "dropout" in name:
            with refused(ValueError, f"{name} is the share dropped, from 0 to 1; got {rate!r}"):
                outline(kind, **{name: rate})


@pytest.mark.nightly
@pytest.mark.parametrize("kind", having("context_length"))
def test_a_context_has_its_end(kind):
    longest = GIVEN[kind].config["context_length"]
    width = GIVEN[kind].config["d_in"]
    layer = layer_of(kind)
    out = nnx.jit(lambda layer, x: layer(x))(layer, np.ones((longest, width), np.float32))
    assert out.shape[0] == longest
    with refused(ValueError, f"context_length={longest} tokens; got {longest + 1}."):
        layer(np.ones((longest + 1, width), np.float32))


@pytest.mark.nightly(but=["AxialAttention", "SpatialReductionAttention"])
@of_all
def test_inputs_have_their_width_and_rank(kind):
    whole = inputs(kind)
    for name, x in whole.items():
        if name in layer_facts.HEADS_GIVEN:
            continue
        with refused(ValueError, f"{name} must have shape (*batch, ", f"got ({x.shape[-1]},)"):
            called(kind, {**whole, name: x.reshape(-1, x.shape[-1])[0]})
        wrong = np.ones((*x.shape[:-1], x.shape[-1] + 2), np.float32)
        if kind not in ANY_WIDTH:
            words = f", {x.shape[-1]}); got {wrong.shape}"
            with refused(ValueError, f"{name} must have shape", words):
                called(kind, {**whole, name: wrong})


@pytest.mark.nightly(but=["bool-RelativeShiftAttention"])
@of_all
@pytest.mark.parametrize("dtype", [np.int32, bool, np.complex64])
def test_inputs_are_floating(kind, dtype):
    whole = inputs(kind)
    for name, x in whole.items():
        if name in layer_facts.HEADS_GIVEN:
            continue
        with refused(TypeError, f"{name} must be floating; got {np.dtype(dtype)}"):
            called(kind, {**whole, name: x.astype(dtype)})


HEADS = [
    (MultiHeadAttention, "d_out"),
    (MultiHeadAttentionCombined, "d_out"),
    (MultiHeadAttentionEinsum, "d_out"),
    (TransformerMultiHeadAttention, "embed_dim"),
]


@pytest.mark.parametrize(("kind", "whole"), HEADS)
def test_heads_divide_the_width(kind, whole):
    with refused(ValueError, f"num_heads must divide {whole}; got {whole}=12, num_heads=5."):
        build(kind, **{whole: 12, "num_heads": 5})


def test_key_heads_divide_the_heads():
    words = "num_kv_heads must divide num_heads; got num_heads=8, num_kv_heads=3."
    with refused(ValueError, words):
        build(GroupedQueryAttention, num_heads=8, num_kv_heads=3)
    with refused(ValueError, "num_heads=3, num_kv_heads=6"):
        build(GroupedQueryAttention, num_heads=3, num_kv_heads=6)


MASKED = {
    BahdanauAttention: (3, 1, 5, 9),
    LuongAttention: (3, 1, 5, 9),
    TransformerMultiHeadAttention: (3, 3, 9, 9),
    GroupedQueryAttention: (3, 6, 9, 9),
    LinearAttention: (3, 9),
}


# These two project first: attend, not the layer, reads the mask.
BEFORE = {TransformerMultiHeadAttention: told, GroupedQueryAttention: told}


@cache
def masked(kind):
    """A layer that takes masks, and inputs for it: 3 sentences of 9 tokens, 5 decoder states."""
    layer, lengths = layer_of(kind), {"s": 5}
    given = {
        name: np.ones((3, lengths.get(name, 9), x.shape[-1]), np.float32)
        for name, x in inputs(kind).items()
    }
    mask = np.ones(MASKED[kind], bool)
    out = nnx.jit(lambda layer, given, mask: layer(**given, mask=mask))(layer, given, mask)
    assert out.shape[0] == 3
    return layer, given


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_masks_are_boolean(kind, dtype):
    layer, given = masked(kind)
    with BEFORE.get(kind, refused)(TypeError, "mask", "boolean", "True", f"got {np.dtype(dtype)}"):
        layer(**given, mask=np.ones(MASKED[kind], dtype))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MASKED)
def test_masks_broadcast(kind):
    layer, given = masked(kind)
    shape = MASKED[kind]
    wrong = (*shape[:-1], shape[-1] + 1)
    with BEFORE.get(kind, refused)(ValueError, "mask must broadcast to", str(shape), str(wrong)):
        layer(**given, mask=np.ones(wrong, bool))


@pytest.mark.nightly(but=["LuongAttention"])
@pytest.mark.parametrize("kind", [BahdanauAttention, LuongAttention])
def test_states_share_their_batch(kind):
    layer, given = masked(kind)
    given = {**given, "s": given["s"][:2]}
    with refused(ValueError, "share their batch axes", f"h {given['h'].shape}", "s (2, 5,"):
        layer(**given)


def test_queries_and_keys_share_their_batch():
    layer, given = masked(TransformerMultiHeadAttention)
    with told(ValueError, "share their batch axes", "q (3, 9, ", "k (2, 9, "):
        layer(**given, key=given["query"][:2])


def test_choices_are_listed():
    with refused(ValueError, "normalise must be one of 'softmax', 'sum'; got 'max'."):
        SimplifiedSelfAttention(normalise="max")
    with refused(ValueError, "score must be one of 'dot', 'general', 'concat'; got 'cosine'."):
        LuongAttention(7, 7, score="cosine", rngs=nnx.Rngs(0))
    with refused(ValueError, 'score="dot"', "d_encoder=11, d_decoder=7", 'score="general"'):
        LuongAttention(11, 7, score="dot", rngs=nnx.Rngs(0))
    with refused(ValueError, 'units goes with score="concat"', "units=None"):
        LuongAttention(11, 7, score="concat", rngs=nnx.Rngs(0))
    with refused(ValueError, 'units goes with score="concat"', "units=5"):
        LuongAttention(11, 7, score="general", units=5, rngs=nnx.Rngs(0))


def test_a_recurrence_needs_a_layer_that_looks_back():
    layer = build(LinearAttention, causal=False)
    with told(ValueError, "causal=True"):
        layer.recurrent(np.ones((5, 11), np.float32))
    with refused(ValueError, "causal=True"):
        layer.step(np.ones(11, np.float32), layer.initial_state())


def test_a_class_token_must_be_there():
    with told(ValueError, "must hold the class token", "got shape (2, 0, 12)"):
        build(ClassAttention)(np.ones((2, 0, 12), np.float32))


def test_an_image_holds_a_square():
    layer = build(SpatialReductionAttention, ratio=3)
    with told(ValueError, "at least ratio rows and columns", "ratio=3", "2 x 5"):
        layer(np.ones((2, 5, 12), np.float32))


@pytest.mark.nightly
def test_self_attention_without_a_bias_of_its_own_asks_for_it():
    sizes, x = {**GIVEN[T5Attention].config, "has_bias": False}, np.ones((2, 5, 11), np.float32)
    layer = T5Attention(**sizes, rngs=nnx.Rngs(0))
    for more in ({}, {"cache": layer.init_cache(2, 5)}):
        with refused(ValueError, "pass bias=first.score", "bias=IDENTITY for none"):
            layer(x, **more)
    assert layer(x, bias=IDENTITY).shape == layer(x, x).shape == x.shape
    assert layer(x, cache=layer.remember(x))[0].shape == x.shape


@pytest.mark.nightly
def test_its_twin_asks_for_it_too():
    torch = pytest.importorskip("torch", reason="the twin is torch's")
    twin = import_module("torch_ref.t5").T5Attention
    x, sizes = torch.ones(2, 5, 11), GIVEN[T5Attention].config
    layer = twin(**sizes, has_bias=False)
    with refused(ValueError, "pass bias=first.position_bias(T, T)", "0 for none"):
        layer(x)
    assert layer(x, bias=0).shape == layer(x, x).shape == x.shape
