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
from flax_attn.layers.linear import LinearAttention
from flax_attn.layers.luong import LuongAttention
from flax_attn.layers.spatial_reduction import SpatialReductionAttention
from flax_attn.layers.t5 import T5Attention
from flax_attn.scores import IDENTITY
from parity_tests.core import layer_facts
from parity_tests.core.backends.refusal import refused, told
from parity_tests.core.cases import every_case
from parity_tests.tables import each, with_nightly

GIVEN = {}
for case in every_case():
    if not callable(case.config) and not case.train:
        GIVEN.setdefault(case.flax_class, case)
LAYERS = list(GIVEN)
AT_COMMIT = ("AxialAttention", "CausalAttention", "CrossAttention", "SpatialReductionAttention")
of_a_few = pytest.mark.parametrize(
    "kind", with_nightly(LAYERS, commit=lambda kind: kind.__name__ in AT_COMMIT)
)
ANY_WIDTH = [kind for kind in LAYERS if not GIVEN[kind].config]


def build(kind, **given):
    return kind(**{**GIVEN[kind].config, "rngs": nnx.Rngs(0), **given})


def outline(kind, **given):
    """A layer whose weights have shapes and no values."""
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


def inputs(kind):
    """Ones for all that the layer is called with, by name."""
    return {name: np.ones(x.shape, np.float32) for name, x in drawn(kind).items()}


def called(kind, whole):
    """The layer, called as its case calls it."""
    return GIVEN[kind].flax_call(layer_of(kind), **whole)


def having(name):
    return [kind for kind in LAYERS if name in inspect.signature(kind.__init__).parameters]


@each("kind", having("context_length"))
def test_inputs_longer_than_context_length_are_refused(kind):
    config, layer = GIVEN[kind].config, layer_of(kind)
    longest, width = config["context_length"], config["d_in"]
    x = np.ones((longest, width), np.float32)
    assert nnx.eval_shape(lambda: layer(x)).shape[0] == longest
    with refused(ValueError, f"context_length={longest} tokens; got {longest + 1}."):
        layer(np.ones((longest + 1, width), np.float32))


@of_a_few
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


@of_a_few
@pytest.mark.parametrize("dtype", with_nightly([np.int32, bool, np.complex64], commit=3))
def test_inputs_are_floating(kind, dtype):
    whole = inputs(kind)
    for name, x in whole.items():
        if name in layer_facts.HEADS_GIVEN:
            continue
        with refused(TypeError, f"{name} must be floating; got {np.dtype(dtype)}"):
            called(kind, {**whole, name: x.astype(dtype)})


# Layers that check their masks themselves; others hand them to `attend`.
MASKED = {
    BahdanauAttention: (3, 1, 5, 9),
    LuongAttention: (3, 1, 5, 9),
    LinearAttention: (3, 9),
}


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
    with refused(TypeError, "mask", "boolean", "True", f"got {np.dtype(dtype)}"):
        layer(**given, mask=np.ones(MASKED[kind], dtype))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MASKED)
def test_masks_broadcast(kind):
    layer, given = masked(kind)
    shape = MASKED[kind]
    wrong = (*shape[:-1], shape[-1] + 1)
    with refused(ValueError, "mask must broadcast to", str(shape), str(wrong)):
        layer(**given, mask=np.ones(wrong, bool))


@pytest.mark.nightly(but=["LuongAttention"])
@pytest.mark.parametrize("kind", [BahdanauAttention, LuongAttention])
def test_states_share_their_batch(kind):
    layer, given = masked(kind)
    given = {**given, "s": given["s"][:2]}
    with refused(ValueError, "share their batch axes", f"h {given['h'].shape}", "s (2, 5,"):
        layer(**given)


def test_linear_attention_needs_causal_to_run_step_by_step():
    layer = layer_of(LinearAttention)
    assert not layer.causal
    with told(ValueError, "causal=True"):
        layer.recurrent(np.ones((5, 11), np.float32))
    with refused(ValueError, "causal=True"):
        layer.step(np.ones(11, np.float32), layer.initial_state())


def test_class_attention_refuses_an_input_without_a_class_token():
    with told(ValueError, "must hold the class token", "got shape (2, 0, 12)"):
        build(ClassAttention)(np.ones((2, 0, 12), np.float32))


def test_spatial_reduction_refuses_an_image_smaller_than_its_ratio():
    layer = outline(SpatialReductionAttention, ratio=3)
    with told(ValueError, "at least ratio rows and columns", "ratio=3", "2 x 5"):
        layer(np.ones((2, 5, 12), np.float32))


@pytest.mark.nightly
def test_t5_without_a_bias_table_asks_for_bias():
    sizes, x = {**GIVEN[T5Attention].config, "has_bias": False}, np.ones((2, 5, 11), np.float32)
    layer = T5Attention(**sizes, rngs=nnx.Rngs(0))
    for more in ({}, {"cache": layer.init_cache(2, 5)}):
        with refused(ValueError, "pass bias=first.score", "bias=IDENTITY for none"):
            layer(x, **more)
    assert layer(x, bias=IDENTITY).shape == layer(x, x).shape == x.shape
    assert layer(x, cache=layer.remember(x))[0].shape == x.shape


@pytest.mark.nightly
def test_the_torch_twin_of_t5_asks_for_bias_too():
    torch = pytest.importorskip("torch", reason="the twin is torch's")
    twin = import_module("torch_ref.t5").T5Attention
    x, sizes = torch.ones(2, 5, 11), GIVEN[T5Attention].config
    layer = twin(**sizes, has_bias=False)
    with refused(ValueError, "pass bias=first.position_bias(T, T)", "0 for none"):
        layer(x)
    assert layer(x, bias=0).shape == layer(x, x).shape == x.shape
