"""Padding and packing: each row and each document equals itself alone, with and without a cache."""

import inspect
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_attn.layers
from flax_attn import (
    CAUSAL,
    FULL,
    Causal,
    Chunked,
    Dense,
    Documents,
    Lengths,
    MaskFn,
    ScoreFn,
    Segments,
    Window,
    assume_platform,
    attend,
    explain,
)
from flax_attn.parity import judge
from parity_tests.core.backends.refusal import refused, told
from parity_tests.core.cache.cuts import same
from parity_tests.core.drawing import float64 as float64
from parity_tests.tables import with_nightly

from .numbered import (
    CACHED,
    COUNTS,
    LAYERS,
    OF_LENGTH,
    OF_POSITIONS,
    OTHERS,
    RECURRENT,
    D,
    Program,
    T,
    extra,
    is_recurrent,
    program,
)

pytestmark = pytest.mark.usefixtures("float64")
X = np.random.RandomState(0).standard_normal((len(COUNTS), T, D))
EVERY = range(8 * len(LAYERS))
CUTS = ((9,), (1, 5, 3), (4, 5))


def runner(layer: nnx.Module, seed: int, **fixed: Any) -> Any:
    """The layer's call as one compiled function of arrays."""
    graph, state = nnx.split(layer)

    @jax.jit
    def run(state, x, cache=None, **numbers):
        layer = nnx.merge(graph, state)
        given = {k: v for k, v in {**fixed, **numbers}.items() if v is not None}
        tokens = {k: v for k, v in given.items() if k in ("mask", "valid", "positions")}
        more = extra(layer, x, seed, **tokens)
        if cache is not None:
            more["cache"] = cache
        return layer(x, **given, **more)

    def called(x, *args, **numbers):
        with jax.numpy_dtype_promotion("standard"):  # nnx's own norms cannot run under strict
            return run(state, jnp.asarray(x), *args, **numbers)

    return called


def alone(run: Any, program: Program, valid: np.ndarray, positions: Any) -> np.ndarray:
    """The outputs of each row's real tokens by themselves; zeros elsewhere."""
    found = np.zeros(X.shape)
    for row, real in enumerate(valid):
        at = None if positions is None else positions[row][real]
        y = run(X[row][real], positions=at)
        found[row, real] = np.asarray(y) if program.layer != "class" else np.asarray(y)[0]
    return found


def outputs(program: Program, found: Any, valid: np.ndarray) -> np.ndarray:
    """The outputs, in the form of `alone`; the class token is a row's first real one."""
    found = np.asarray(found)
    return np.where(valid[..., None], found, 0) if program.layer == "class" else found


@pytest.mark.parametrize("seed", with_nightly(EVERY, commit=19))
def test_a_padded_row_is_what_it_is_alone(seed):
    drawn = program(seed)
    valid, positions = drawn.valid(), drawn.places()
    if drawn.layer == "class":  # its first slot holds the class token
        valid[:, 0] = True
    layer = drawn.build()
    masked = drawn.masked()
    want = alone(runner(layer, seed, **masked), drawn, valid, positions)
    x = np.where(valid[..., None], X, np.nan)
    known = runner(layer, seed, **masked, valid=valid, positions=positions)(x)
    by_arrays = runner(layer, seed, **masked)
    found = [known, by_arrays(x, valid=valid, positions=positions)]
    if drawn.padding in ("left", "right") and drawn.layer != "class":
        count = np.asarray(COUNTS)
        by_number = Lengths(count) if drawn.padding == "right" else ~Lengths(T - count)
        found.append(by_arrays(x, valid=by_number, positions=positions))
    for y in found:
        assert same(outputs(drawn, y, valid), want), drawn


OF_CACHES = [seed for seed in EVERY if program(seed).layer in (*CACHED, *RECURRENT)]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", with_nightly(OF_CACHES, commit=17))
def test_a_padded_row_is_the_same_in_every_cut_of_a_cache(seed):
    drawn = program(seed)
    if drawn.mask in OF_POSITIONS or drawn.score == "function of positions":
        drawn = drawn._replace(positions="none")
    if drawn.mask == "end":  # refused beside a cache, which has no last slot
        drawn = drawn._replace(mask="all")
    valid, positions = drawn.valid(), drawn.places()
    layer, masked = drawn.build(), drawn.masked()
    want = alone(runner(layer, seed, **masked), drawn, valid, positions)
    x, step = np.where(valid[..., None], X, np.nan), runner(layer, seed, **masked)
    looks_ahead = drawn.mask in ("both sides", "prefix")
    for cut in CUTS[:1] if drawn.rotary in OF_LENGTH or looks_ahead else CUTS:
        cache, out = layer.init_cache(len(COUNTS), T), []
        for start, stop in zip(np.cumsum((0, *cut)), np.cumsum(cut), strict=False):
            some = {"valid": valid[:, start:stop]}
            if positions is not None:
                some["positions"] = positions[:, start:stop]
            elif drawn.layer == "later":  # whose keys another layer makes
                some["positions"] = jnp.maximum(
                    cache.next_positions(stop - start, some["valid"]), 0
                )
            y, cache = step(x[:, start:stop], cache, **some)
            out.append(y)
        assert same(np.concatenate(out, 1), want), (drawn, cut)


LENGTHS = (2, 1, 6)  # of which one is beyond the border of each scaling by length


@pytest.mark.parametrize("seed", with_nightly(EVERY, commit=17))
def test_a_packed_document_is_what_it_is_alone(seed):
    drawn = program(seed)._replace(positions="restart")
    if drawn.layer in ("longformer", "class"):
        pytest.skip("the layer takes no mask, or one query")
    if drawn.mask == "function":  # by the order, in which documents follow each other
        drawn = drawn._replace(mask="function of positions")
    if drawn.score == "function":
        drawn = drawn._replace(score="function of positions")
    layer, masked, ids = drawn.build(), drawn.masked(), np.repeat((3, 1, 2), LENGTHS)
    documents = Documents(np.asarray(LENGTHS)) if seed % 2 else Segments(ids)
    packed = {"mask": masked.get("mask", CAUSAL) & documents}
    found = runner(layer, seed, **packed)(X, positions=drawn.places(LENGTHS))
    run, ends = runner(layer, seed, **masked), np.cumsum((0, *LENGTHS))
    for start, stop in pairwise(ends):
        want = run(X[:, start:stop], positions=np.arange(stop - start))
        assert same(found[:, start:stop], want), drawn
    if is_recurrent(layer):
        assert same(found, runner(layer, seed, segments=ids)(X))


@pytest.mark.parametrize("kind", ["tie", "fall", "jump", "below zero"])
def test_positions_never_change_whom_a_causal_mask_shows(kind):
    drawn = program(0)._replace(positions=kind, rotary="none", score="alibi", mask="window")
    layer, run = drawn.build(), runner(drawn.build(), 0, **drawn.masked())
    assert layer.rotary is None
    assert same(run(X, positions=drawn.places()), run(X))


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(RECURRENT, commit=4))
def test_a_recurrence_takes_what_the_other_layers_of_a_model_are_given(name):
    """A mask that a recurrence cannot apply is refused, and the error names what it takes."""
    layer, ids = program(list(LAYERS).index(name)).build(), np.repeat((0, 1, 2), 3)
    run = runner(layer, 0, segments=ids)
    packed = runner(layer, 0, mask=Segments(ids) & CAUSAL)
    at = np.arange(3 * T).reshape(3, 1, T)  # as a rotary with three axes is given
    assert judge.exact(packed(X, positions=at), run(X)).ok
    by_lengths = runner(layer, 0, mask=CAUSAL & Documents([3, 3, 3]))
    assert judge.exact(by_lengths(X), run(X)).ok
    assert judge.exact(runner(layer, 0, mask=CAUSAL)(X), runner(layer, 0)(X)).ok
    for mask in (FULL, CAUSAL & Window(3, 0), Segments(ids), Causal(1), np.tri(T, dtype=bool)):
        with refused(ValueError, "takes mask=CAUSAL, CAUSAL & Segments(ids) or CAUSAL & Documents"):
            layer(X, mask=mask)
    with refused(ValueError, "passed twice"):
        layer(X, mask=CAUSAL & Segments(ids), segments=ids)


@pytest.mark.nightly
def test_unused_positions_are_accepted_without_a_warning():
    """Also several for each token, which the layers with a rotary of such a model read."""
    layer = program(0)._replace(rotary="none", score="alibi", mask="window").build()
    run = runner(layer, 0)
    for at in (np.arange(T) * 7, np.full((len(COUNTS), T), 3), np.ones((3, len(COUNTS), T), int)):
        assert same(run(X, positions=at), run(X))


LONG = 1024
BY_SLOT = {
    "all": FULL,
    "causal": CAUSAL,
    "documents": CAUSAL & Segments(np.arange(LONG) // 64),
    "lengths": CAUSAL & Lengths(np.full(2, 900)),
    "array": CAUSAL & Dense(np.tri(LONG, dtype=bool)[None, None]),
}
PADDINGS = {
    "left": np.arange(LONG) >= np.asarray([[9], [0]]),
    "right": np.arange(LONG) < np.asarray([[900], [LONG]]),
    "between": np.arange(LONG) % 5 > 0,
    "traced": jax.ShapeDtypeStruct((2, LONG), bool),
    "none": None,
}
AT_ENDS = {
    "window": CAUSAL & Window(99, 0),
    "ahead": Causal(1),
}


def chosen(layer: nnx.Module, mask: Any, valid: Any, platform: str, numbered: bool) -> str:
    """The backend for what a layer hands to `attend`, or for its mask beside hidden padding."""
    shape = jax.ShapeDtypeStruct
    q = shape((2, LONG, 4, 128), jnp.bfloat16)
    found = []

    def ask(valid):
        x, positions = jnp.zeros((2, LONG, D)), jnp.asarray(np.arange(LONG) % 64)
        call = {"mask": mask, "valid": valid, "positions": positions}
        handed, plain = layer.tokens(x, **call).rules.mask, mask
        if valid is not None and not numbered:
            plain = mask & Dense(jnp.broadcast_to(valid, (2, LONG))[:, None, None, :])
        with assume_platform(platform):
            found.append(explain(q, q, q, mask=handed if numbered else plain).chosen)
        return 0

    is_traced = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(valid))
    jax.eval_shape(ask, valid) if is_traced else ask(valid)
    return found[0]


REQUESTS = [(mask, padding) for mask in BY_SLOT for padding in PADDINGS]
REQUESTS += [(mask, padding) for mask in AT_ENDS for padding in ("left", "right", "none")]


BY_NUMBER = {"right": Lengths(jax.ShapeDtypeStruct((2,), jnp.int32))}
BY_NUMBER["left"] = ~BY_NUMBER["right"]


def test_padding_given_as_lengths_reaches_kernels(recwarn):
    """Lengths may be arrays; a boolean array reaches no kernel, and one warning says so."""
    layer = program(0)._replace(rotary="plain").build()
    for platform, kernel in (("gpu", "cudnn"), ("tpu", "splash")):
        for mask in (CAUSAL, CAUSAL & Window(99, 0), FULL):
            for valid in BY_NUMBER.values():
                assert chosen(layer, mask, valid, platform, True) == kernel, (mask, valid)
    q = jax.ShapeDtypeStruct((2, LONG, 4, 128), jnp.bfloat16)
    padded = jax.ShapeDtypeStruct((2, 1, 1, LONG), bool)
    with assume_platform("gpu"):
        for _ in range(2):
            jax.eval_shape(lambda q, real: attend(q, q, q, mask=CAUSAL & real), q, padded)
    assert ["valid=Lengths(n)" in str(x.message) for x in recwarn.list] == [True]


@pytest.mark.nightly
def test_requests_without_positions_keep_their_kernel():
    """With positions too, which packed documents pass to the rotary."""
    layer, kernels = program(0)._replace(rotary="plain").build(), set()
    for mask, padding in REQUESTS:
        for platform in ("cpu", "gpu", "tpu"):
            case = (BY_SLOT | AT_ENDS)[mask], PADDINGS[padding], platform
            kernels.add(chosen(layer, *case, False))
            assert chosen(layer, *case, True) == chosen(layer, *case, False), (mask, padding)
    assert {"cudnn", "splash"} <= kernels


@pytest.mark.nightly
def test_each_side_of_cross_attention_is_numbered_by_its_own_padding():
    """Queries by the call's `valid`, a memory by that of `remember`; "end" is that of real ones."""
    layer = LAYERS["cross"](param_dtype=jnp.float64, rngs=nnx.Rngs(3))
    memory = np.random.RandomState(1).standard_normal((len(COUNTS), T, D))
    for seed, mask in enumerate((CAUSAL, Window(2, 0), Causal("end"), Chunked(3), FULL)):
        drawn = program(seed)
        for padding in ("left", "right", "between"):
            valid = drawn._replace(padding=padding).valid()
            run = jax.jit(lambda x, m, v=None, mask=mask: layer(x, m, mask=mask, valid=v))
            y, kept = run(X, memory, valid), np.asarray(layer(X, memory, mask=mask, valid=valid))
            for row, real in enumerate(valid):
                want = run(X[row][real], memory[row])
                assert same(y[row][real], want) and same(kept[row][real], want), (mask, padding)
            if mask == Causal("end"):  # a memory in a cache has no last slot
                continue
            there = drawn._replace(seed=seed + 9, padding=padding).valid()
            cache = layer.remember(memory, valid=there)
            y, _ = layer(X, cache=cache, mask=mask, valid=valid)
            for row, real in enumerate(valid):
                want = run(X[row][real], memory[row][there[row]])
                assert same(y[row][real], want), (mask, padding, "remembered")


@pytest.mark.nightly
def test_positions_that_do_not_fit_are_refused_where_they_are_read():
    layer = program(0)._replace(rotary="none", score="none").build()
    with told(ValueError, "positions must broadcast to (3, 9); got shape (4,)."):
        layer(X, mask=Chunked(4), positions=np.arange(4))
    recurrent = program(list(LAYERS).index("lightning")).build()
    for some in (layer, recurrent):
        for at in (np.arange(9.0), np.ones(T), np.ones(T, bool)):
            with told(TypeError, f"positions must hold integers; got {at.dtype}."):
                some(X, positions=at)
    assert same(layer(X, mask=Chunked(4), positions=[*range(T)]), layer(X, mask=Chunked(4)))


@pytest.mark.nightly
def test_positions_of_padding_do_not_change_gradients():
    """A position of -1 would make the logarithm of a temperature NaN."""
    drawn = program(0)._replace(score="temperature", padding="between", rotary="plain")
    layer, valid = drawn.build(), drawn.valid()
    graph, state = nnx.split(layer)

    def loss(state, x, at):
        return jnp.sum(jnp.square(nnx.merge(graph, state)(x, valid=valid, positions=at)))

    order = np.maximum(valid.cumsum(-1) - 1, 0)
    grads = [jax.grad(loss, (0, 1))(state, X, np.where(valid, order, at)) for at in (0, -1)]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        assert judge.exact(a, b).ok and np.isfinite(a).all()


def test_an_unknown_reads_value_is_refused_in_the_constructor():
    for build in (MaskFn, ScoreFn):
        with told(ValueError, f"{build.__name__}.reads must be one of", "got 'positions'"):
            build(lambda *args: args[0], reads="positions")


def test_every_layer_with_valid_or_positions_is_in_the_tables():
    """A layer that comes later has to be added to `LAYERS`, or to `OTHERS` with its reason."""
    layers = {name: x for name, x in vars(flax_attn.layers).items() if isinstance(x, type)}
    names = {
        name
        for name, layer in layers.items()
        if {"valid", "positions"} & {*inspect.signature(layer.__call__).parameters}
    }
    tried = {build.func.__name__ for build in LAYERS.values()}
    assert names == tried | set(OTHERS)


@pytest.mark.nightly
def test_positions_that_a_cache_does_not_know_are_refused_beside_chunks():
    drawn = program(0)._replace(layer="grouped", mask="chunks", rotary="plain", score="none")
    layer, ids = drawn.build(), np.asarray([0, 1, 2, 0, 1])
    cache = layer.init_cache(len(COUNTS), T)
    with refused(ValueError, "Chunked reads positions", "count the non-padding tokens of a row"):
        layer(X[:, :5], cache=cache, positions=ids, **drawn.masked())
    y, _ = runner(layer, 0, **drawn.masked())(X[:, :5], cache, positions=ids)
    assert np.isnan(y).all()  # what is known only when the program runs
    y, _ = layer(X[:, :5], cache=cache, positions=np.arange(5), **drawn.masked())
    assert same(y, layer(X[:, :5], **drawn.masked()))
