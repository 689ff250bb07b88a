"""Kernels (simulated here) on a cache without positions equal attention at positions.

Attention at positions is the way out. Where it is not to be needed it is made NaN.
"""

import warnings
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import CAUSAL, FULL, Alibi, Chunked, Prefix, Softcap, Window, attend_cached
from flax_attn.cache import Cache, by_slot
from flax_attn.where import assume_platform
from parity_tests.core.backends import flash
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.pages.kernels import tokamax_is_there
from parity_tests.tables import with_nightly

from . import cuts
from .cuts import N, empty, jitted, paged, same, stepped, tokens, without_padding

pytestmark = pytest.mark.usefixtures("float64")

T, PROMPT = 13, 5
CUT = (PROMPT, 1, 1, 1, PROMPT)
SINKS = np.linspace(-1, 2, N)
H100, A100, V5E = ("gpu", (9, 0)), ("gpu", (8, 0)), ("tpu", None)
# Padding of a prompt at the end, at the beginning, and of a later call in between.
VALID = np.ones((3, T), bool)
VALID[0, 3:PROMPT] = VALID[1, :2] = VALID[2, 6] = VALID[1, 9:11] = False

# What is asked, how the cache is made, on which device, and what serves a prompt, a step and a
# later chunk.
KINDS = {
    "static": ({"mask": CAUSAL}, {}, A100, ("cudnn", "cudnn", None)),
    "window": (
        {"mask": CAUSAL & Window(2, 0), "sinks": SINKS},
        {"length": 20},
        H100,
        ("cudnn", "cudnn", "tokamax"),
    ),
    "ring": (
        {"mask": CAUSAL & Window(3, 0), "sinks": SINKS},
        {"window": 4},
        A100,
        ("cudnn", "cudnn", None),
    ),
    "softcap": (
        {"mask": CAUSAL & Chunked(4), "score": Softcap(2.0)},
        {"length": 16},
        H100,
        ("tokamax",) * 3,
    ),
    "pages": ({"mask": CAUSAL}, None, H100, ("cudnn", "cudnn", "tokamax")),
    "tpu": (
        {"mask": CAUSAL & Window(5, 0), "scale": 0.5},
        {"length": 20},
        V5E,
        ("splash", "splash", None),
    ),
    "all that is stored": ({"mask": FULL}, {}, A100, (None, "cudnn", None)),
    "a narrow ring": ({"mask": CAUSAL & Window(1, 0)}, {"window": 4}, A100, ("cudnn", None, None)),
    "spare": (
        {"mask": CAUSAL & Window(3, 0)},
        {"window": 4, "spare": 1},
        A100,
        ("cudnn", None, None),
    ),
    "not the first": ({"mask": CAUSAL & ~Prefix(2)}, {}, A100, (None,) * 3),
}


@pytest.fixture
def played(monkeypatch):
    flash.stand_ins(monkeypatch)
    monkeypatch.setattr(cuts, "H", 8)
    monkeypatch.setattr(cuts, "h", 8)
    taken = {}

    def recorded(request, backend, asked=by_slot.kernel_for):
        name = asked(request, backend)
        taken.setdefault(request.sizes.T, []).append(name)
        return name

    monkeypatch.setattr(by_slot, "kernel_for", recorded)
    return taken


def decoded(kind, cut):
    """Outputs by the kernels of the kind's device, and of each row without its padding."""
    how, made, device, _ = KINDS[kind]
    x = tokens(length=T)
    with assume_platform(*device), tokamax_is_there():
        cache = paged() if made is None else empty(**{"length": T, **made})
        o, _ = stepped(x, cache, cut, jnp.asarray(VALID), **how)
    how = how if kind != "all that is stored" else {"mask": CAUSAL}
    return np.asarray(o), without_padding(x, VALID, **how)


@pytest.mark.parametrize("kind", with_nightly(KINDS, commit=6))
def test_kernels_without_positions_are_equal(played, monkeypatch, kind):
    def no_way_out(q, k, v, rules, backend):
        return by_slot_attend(q, k, v, rules, backend) * (jnp.nan if backend == "blockwise" else 1)

    by_slot_attend = by_slot.attend_over
    monkeypatch.setattr(by_slot, "attend_over", no_way_out)
    prompt, step, chunk = KINDS[kind][3]
    cut = (1,) * T if kind == "all that is stored" else CUT
    got, want = decoded(kind, cut)
    for part, kernel in ((slice(0, PROMPT), prompt), (slice(PROMPT, T - PROMPT), step)):
        if kernel is not None:
            assert same(got[:, part], want[:, part])
    if chunk is not None:
        assert same(got[:, -PROMPT:], want[:, -PROMPT:])
    assert played.get(1, [None])[0] == step
    assert {*played.get(PROMPT, []), None} == {prompt, chunk, None}


def step_of(x, cache, device=None):
    """Output and gradients of a step, on an assumed device or as here."""

    @jax.jit
    def both(x, keys, values):
        def f(x, keys, values):
            o, _ = attend_cached(**x, cache=replace(cache, keys=keys, values=values), sinks=SINKS)
            return o

        o, back = jax.vjp(f, x, keys, values)
        return o, *jax.tree.leaves(back(jnp.cos(o)))

    with assume_platform(*(device or ("cpu", None))):
        return both(x, cache.keys, cache.values)


def test_slots_emptied_by_the_caller_are_masked(played):
    """A kernel's output is discarded if slots and stored positions disagree."""
    x = tokens(length=6)
    parts = [{name: y[:, cut] for name, y in x.items()} for cut in (slice(0, 5), slice(5, 6))]
    _, cache = jitted()(**parts[0], cache=empty(length=8), valid=None)
    emptied = np.array(cache.positions)
    emptied[1, 2] = -1
    for positions in (cache.positions, emptied):
        now = replace(cache, positions=positions)
        for got, want in zip(step_of(parts[1], now, A100), step_of(parts[1], now), strict=True):
            assert same(got, want)
    assert played[1] == ["cudnn"] * 2


MOVING = ("transpose", "copy", "concatenate", "gather", "pad", "select_n", "convert_element_type")


def operations(program):
    """All equations of a traced program, also inside others."""
    for equation in program.eqns:
        yield equation
        for part in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield from operations(inner)


@pytest.mark.parametrize("device", [A100, V5E], ids=str)
def test_a_step_does_not_move_the_cache(device):
    """A score that reads positions has no kernel; both paths copy nothing of the cache's size."""
    x = {name: jnp.ones((2, 1, n, 64), jnp.bfloat16) for name, n in (("q", 4), ("k", 2), ("v", 2))}
    cache = Cache.empty(2, 4096, 2, 64, dtype=jnp.bfloat16)
    for score in (None, Alibi(np.linspace(0.1, 0.7, 4))):
        step = jax.make_jaxpr(partial(attend_cached, score=score))
        with assume_platform(*device), jax.enable_x64(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a slow backend
            found = list(operations(step(*x.values(), cache).jaxpr))
        kinds = {equation.primitive.name for equation in found}
        kernel = {"dot_product_attention_fwd_wrapper", "pallas_call"} & kinds
        assert bool(kernel) == (score is None) and {"scatter", "mul"} <= kinds
        moved = [x for x in found if x.primitive.name in MOVING]
        assert all(v.aval.size < cache.keys.size for x in moved for v in x.outvars)
