"""Caches, states, masks and scores handed to a function that `jax.export` writes to a file."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

from flax_attn import (
    CAUSAL,
    Additive,
    Alibi,
    Cache,
    CrossAttention,
    Dense,
    Documents,
    Float8,
    GatedDeltaAttention,
    GroupedQueryAttention,
    Int8,
    LatentAttention,
    Lengths,
    MaskFn,
    Memory,
    PagedCache,
    Rotary,
    Segments,
    State,
    Window,
    attend,
)
from flax_attn._internal.exported import read_structure, written_structure
from flax_attn._internal.types import frozen
from flax_attn.parity import judge
from parity_tests.core.backends.refusal import told

pytest.importorskip("flatbuffers", reason="jax.export writes by it")
B, D = 2, 12


def grouped(**options):
    return GroupedQueryAttention(D, 4, 2, 8, rotary=Rotary(), **options, rngs=nnx.Rngs(0))


def latent():
    return LatentAttention(D, 3, 5, 4, 2, 4, rotary=Rotary(), rngs=nnx.Rngs(0))


def in_window():
    return grouped(mask=CAUSAL & Window(3, 0))


CACHES = {
    "static": lambda: (grouped(), {}),
    "ring": lambda: (in_window(), {"window": 4, "keep_first": 1, "spare": 2}),
    "int8": lambda: (grouped(), {"store": Int8()}),
    "float8": lambda: (grouped(), {"store": Float8()}),
    "paged": lambda: (grouped(), {"pages": (8, 4)}),
    "paged in eight bits": lambda: (grouped(), {"pages": (8, 4), "store": Int8()}),
    "latent": lambda: (latent(), {}),
    "recurrent": lambda: (GatedDeltaAttention(D, 2, 4, 5, rngs=nnx.Rngs(0)), {}),
}
KINDS = {
    "masks": (CAUSAL & Window(3, 0)) | ~Dense(jnp.ones((4, 4), bool)),
    "of rows": Lengths(jnp.asarray([3, 4])) & Segments(jnp.asarray([[0, 0, 1, 1]] * B)),
    "documents": CAUSAL & Documents(jnp.asarray([[3, 1], [4, 0]])),
    "scores": (Alibi(jnp.ones(4)), Additive(jnp.zeros((4, 4)))),
    "plain values": Rotary(1e6, width=4),
}


def with_weights(layer):
    graph, state = nnx.split(layer)

    def call(weights, *args, **kwargs):
        return nnx.merge(graph, nnx.State(weights))(*args, **kwargs)

    return jax.jit(call), nnx.to_pure_dict(state)


def through_a_file(program, *args, **kwargs):
    return export.deserialize(export.export(program)(*args, **kwargs).serialize())


def check_alike(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert judge.exact(np.asarray(a), np.asarray(b)).ok


@pytest.mark.nightly
@pytest.mark.parametrize("name", CACHES)
def test_an_exported_step_gives_the_same_output(name):
    layer, options = CACHES[name]()
    step, weights = with_weights(layer)
    x = jax.random.normal(jax.random.key(1), (B, 1, D))
    cache = layer.init_cache(B, 16, **options)
    loaded = through_a_file(step, weights, x, cache=cache)
    for _ in range(3):
        want = step(weights, x, cache=cache)
        check_alike(loaded.call(weights, x, cache=cache), want)
        cache = want[1]


@pytest.mark.nightly
def test_an_exported_step_reads_a_memory():
    layer = CrossAttention(D, 3, memory_features=10, rngs=nnx.Rngs(0))
    step, weights = with_weights(layer)
    memory = layer.remember(jax.random.normal(jax.random.key(1), (B, 5, 10)))
    x = jnp.ones((B, 1, D))
    loaded = through_a_file(step, weights, x, cache=memory)
    check_alike(loaded.call(weights, x, cache=memory), step(weights, x, cache=memory))


@pytest.mark.nightly
@pytest.mark.parametrize("name", KINDS)
def test_other_frozen_objects_are_arguments_too(name):
    node = KINDS[name]
    loaded = through_a_file(jax.jit(lambda x: x), node)
    check_alike(loaded.call(node), node)
    assert loaded.in_tree == jax.tree.structure(((node,), {}))


@pytest.mark.nightly
def test_a_mask_decides_in_the_loaded_program():
    q = jax.random.normal(jax.random.key(0), (B, 4, 3, 8))
    run = jax.jit(lambda q, mask: attend(q, q, q, mask=mask))
    loaded = through_a_file(run, q, Lengths(jnp.asarray([3, 4])))
    other = Lengths(jnp.asarray([1, 2]))
    check_alike(loaded.call(q, other), run(q, other))


@frozen
class Settings:
    """One field of each plain kind."""

    x: jax.Array
    values: tuple
    name: str = "é"


def test_plain_values_keep_their_types():
    values = (None, True, 2, 2.0, float("inf"), -0.0, 1 + 2j, (np.float32(0.1), np.int8(3)), ())
    node = Settings(jnp.ones(2), values)
    loaded = through_a_file(jax.jit(lambda x: x), node).call(node)
    assert repr(loaded.values) == repr(values) and loaded.name == node.name


def test_a_function_cannot_be_written():
    mask = MaskFn(lambda b, n, q, k: q >= k)
    with told(TypeError, "MaskFn.fn", "make the MaskFn inside the exported function"):
        through_a_file(jax.jit(lambda mask, x: x), mask, jnp.ones(2))


def test_other_formats_are_refused():
    cache = Cache.empty(1, 4, 1, 2)
    aux = jax.tree.structure(cache).node_data()[1]
    text = json.loads(written_structure(Cache, aux))
    with told(ValueError, "Cache", "format 2", "format 1", "export it again"):
        read_structure(Cache, json.dumps({**text, "format": 2}).encode())
    text["values"]["pages"] = text["values"].pop("spare")
    with told(ValueError, "Cache", "pages", "spare", "export it again"):
        read_structure(Cache, json.dumps(text).encode())


def defined():
    @frozen
    class Pair:
        x: jax.Array
        y: jax.Array

    return Pair


def test_a_class_that_is_defined_again_takes_the_name():
    before, now = defined(), defined()  # as importlib.reload does
    for cls in (now, before):
        pair = cls(jnp.zeros(2), jnp.ones(3))
        loaded = through_a_file(jax.jit(lambda pair: pair.y), pair)
        ((argument,), _) = loaded.in_tree.unflatten([0.0, 1.0])
        assert type(argument) is now and argument.y == 1.0


@pytest.mark.parametrize("cls", [Cache, PagedCache, State, Memory])
def test_the_name_is_that_of_the_class(cls):
    structure = jax.tree.structure(made(cls))
    program = export.export(jax.jit(lambda node: node))(made(cls)).serialize()
    assert f"{cls.__module__}.{cls.__name__}".encode() in program
    assert b"pickle" not in program and export.deserialize(program).out_tree == structure


def made(cls):
    return cls(**{field.name: jnp.ones(2) for field in dataclasses.fields(cls)})
