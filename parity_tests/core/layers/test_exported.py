"""Layers with sizes left open for `jax.export`: the batch, the length, and steps beside a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

from flax_attn import (
    DisentangledAttention,
    DynamicScaling,
    GroupedQueryAttention,
    LinearAttention,
    LongRope,
    MultiHeadAttention,
    Rotary,
    Sections,
)
from flax_attn.layers._recurrent import Recurrent
from flax_attn.parity import judge
from parity_tests.core.backends.refusal import told
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.drawing import normal
from parity_tests.core.layers.test_common_arguments import build
from parity_tests.core.layers.test_rngs import VARIANTS, called, first_cases, takes

TURNING = [name for name in VARIANTS if takes(first_cases()[name], "rotary")]
RECURRENT = [name for name in VARIANTS if issubclass(first_cases()[name].flax_class, Recurrent)]
STEPPING = [
    name for name in (*TURNING, *RECURRENT) if hasattr(first_cases()[name].flax_class, "init_cache")
]


def layer_of(name):
    rotary = {"rotary": Rotary()} if name in TURNING else {}
    return build(name, param_dtype=jnp.float64, **rotary)


def inputs_of(name, batch, length):
    """Those of the layer's first case, in which all inputs have one batch and one length."""
    arrays = {x: value.shape[2:] for x, value in first_cases()[name].arrays().items()}
    drawn = (normal(i, batch, length, *rest) for i, rest in enumerate(arrays.values()))
    return dict(zip(arrays, map(jnp.asarray, drawn), strict=True))


def program_of(layer):
    graph, state = nnx.split(layer)

    def run(state, inputs, **call):
        return nnx.merge(graph, state)(**called(inputs), **call)

    return jax.jit(run), state


def opened(tree, *sizes):
    """Shapes of arrays whose first axes are of these open sizes."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*sizes, *x.shape[len(sizes) :]), x.dtype), tree
    )


def check_alike(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        same = judge.same_function if jnp.issubdtype(b.dtype, jnp.floating) else judge.same_values
        verdict = same(np.asarray(a), np.asarray(b))
        assert verdict.ok, verdict


def check_open(layer, inputs, sizes=((2, 5), (1, 1))):
    """One program for every batch and length gives what the layer gives."""
    run, state = program_of(layer)
    shapes = opened(inputs(2, 5), *export.symbolic_shape("b, t"))
    program = export.export(run)(state, shapes)
    for batch, length in sizes:
        given = inputs(batch, length)
        check_alike(program.call(state, given), run(state, given))


def test_every_layer_is_exported_or_has_a_reason():
    assert len(TURNING) >= 12 and len(RECURRENT) >= 7 and len(STEPPING) >= 13


@pytest.mark.nightly
@pytest.mark.parametrize("name", TURNING)
def test_layers_export_with_a_symbolic_batch_and_length(name):
    check_open(layer_of(name), lambda b, t: inputs_of(name, b, t))


@pytest.mark.nightly
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_export_with_a_symbolic_length(name):
    sizes = (2, 1), (1, 140)  # more than one chunk, and more than one block
    check_open(layer_of(name), lambda b, t: inputs_of(name, b, t), sizes)


@pytest.mark.nightly
@pytest.mark.parametrize("name", STEPPING)
def test_a_decode_step_exports_with_a_symbolic_batch(name):
    layer = layer_of(name)
    run, state = program_of(layer)
    one = opened(inputs_of(name, 2, 1), *export.symbolic_shape("b"))
    kept = layer.init_cache(2, 8, dtype=jnp.float64)
    program = export.export(run)(state, one, cache=opened(kept, *one["x"].shape[:1]))
    for batch in (2, 3):
        cache = layer.init_cache(batch, 8, dtype=jnp.float64)
        for _ in range(2):
            want = run(state, inputs_of(name, batch, 1), cache=cache)
            check_alike(program.call(state, inputs_of(name, batch, 1), cache=cache), want)
            cache = want[1]


@pytest.mark.nightly
@pytest.mark.parametrize("buckets", [None, 4])
def test_relative_positions_export_with_a_symbolic_length(buckets):
    sizes = {"max_positions": 8, "buckets": buckets}
    layer = DisentangledAttention(12, 3, **sizes, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    rows = jnp.asarray(normal(1, 8 if buckets else 16, 12))
    graph, state = nnx.split(layer)
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x, rows))
    x = jnp.asarray(normal(0, 2, 5, 12))
    program = export.export(run)(state, opened(x, *export.symbolic_shape("b, t")))
    check_alike(program.call(state, x), run(state, x))


@pytest.mark.nightly
def test_linear_attention_exports_with_a_symbolic_length():
    layer = LinearAttention(12, 3, 4, causal=True, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    check_open(layer, lambda b, t: {"x": jnp.asarray(normal(0, b, t, 12))}, [(2, 5), (1, 70)])


@pytest.mark.nightly
def test_context_length_asks_for_a_constraint_on_a_symbolic_length():
    layer = MultiHeadAttention(12, 12, 6, 0.0, 2, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    run, state = program_of(layer)
    for constraints in ([], ["t >= 2"]):
        sizes = export.symbolic_shape("b, t", constraints=constraints)
        with told(ValueError, "context_length=6", "open length t", 'constraints=["t <= 6"]'):
            export.export(run)(state, opened({"x": jnp.ones((1, 1, 12))}, *sizes))
    sizes = export.symbolic_shape("b, t", constraints=["t <= 6"])
    x = {"x": jnp.asarray(normal(0, 2, 5, 12))}
    check_alike(export.export(run)(state, opened(x, *sizes)).call(state, x), run(state, x))


FACTORS = (1.0, 2.0), (3.0, 4.0)
ROTARIES = {
    "dynamic": Rotary(scaling=DynamicScaling(2.0, 4)),
    "dynamic of a known length": Rotary(scaling=DynamicScaling(2.0, 4, length=9)),
    "longrope": Rotary(scaling=LongRope(*FACTORS, original_length=4, factor=2.0)),
    "sections": Rotary(axes=Sections((1, 1))),
    "interleaved": Rotary(layout="interleaved", width=2),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROTARIES)
def test_every_rotary_exports_with_a_symbolic_length(name):
    layer = GroupedQueryAttention(
        12, 4, 2, 4, rotary=ROTARIES[name], param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    check_open(layer, lambda b, t: {"x": jnp.asarray(normal(0, b, t, 12))})
