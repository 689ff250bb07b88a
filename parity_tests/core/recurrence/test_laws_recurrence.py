"""Every recurrence is numpy's, token by token, over programs and inputs drawn with a seed.

A program draws the decay, the delta rule, the length, the chunk and which arguments it leaves out.
Its inputs draw documents, padding that holds NaN, decays from none to all, a first state, and a cut
into two calls of the same program, each of which takes the tokens of the other for padding.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from flax_attn.parity import judge
from flax_attn.recurrence import causal_convolution, elementwise_recurrence, linear_recurrence
from parity_tests.core.drawing import float64 as float64
from parity_tests.tables import with_nightly

from . import numpy_recurrence

pytestmark = pytest.mark.usefixtures("float64")
B, N, H, h, D, W = 2, 3, 5, 4, 6, 4
IDS = np.asarray([0, -1, 7, 2**31 - 1, -(2**31)], np.int32)
MODES = [(decay, delta) for decay in ("none", "head", "channel") for delta in (False, True)]
SEED = 1143  # of programs
KINDS = len(MODES) + 2


class Program(NamedTuple):
    """A function of the library, the same in numpy, and the shapes of its arguments."""

    function: Any
    oracle: Any
    tokens: dict[str, tuple[int, ...]]
    weights: dict[str, tuple[int, ...]]
    state: tuple[int, ...]
    length: int
    absent: list[str]

    def compiled(self):
        """Outputs, last state and gradients."""

        @jax.jit
        def run(x, more, dy, dlast):
            (y, last), pull = jax.vjp(lambda x: self.function(**x, **more), x)
            return y, last, *pull((dy, dlast))

        def call(x, segments, valid, dy, dlast):
            more = {"segments": segments, "valid": valid}
            more = {name: more[name] for name in more if name not in self.absent}
            return jax.tree.map(np.asarray, run(x, more, dy, dlast))

        return call


def program(number):
    """The number says which recurrence, the rest is drawn by it."""
    draw = np.random.RandomState([SEED, number])
    chunk = draw.choice([7, 8, 16, 64])
    T = int(draw.choice([1, chunk - 1, chunk, 2 * chunk, 2 * chunk + 5, 2 * chunk + 5]))
    absent = [x for x in ("beta", "state", "segments", "valid") if draw.rand() < 0.15]
    kind = number % KINDS
    if kind == len(MODES):
        tokens = {"x": (T, D), "log_decay": (T, D)}
        return Program(elementwise_recurrence, elementwise, tokens, {}, (D,), T, absent)
    if kind > len(MODES):
        weights = {"weight": (D, W), "bias": (D,)}
        state, tokens = (W - 1, D), {"x": (T, D)}
        return Program(causal_convolution, convolution, tokens, weights, state, T, absent)
    decay, delta = MODES[kind]
    tokens = {"q": (T, N, H), "k": (T, N, H), "v": (T, N, h), "beta": (T, N)}
    if decay != "none":
        tokens["log_decay"] = tokens["beta" if decay == "head" else "k"]
    tokens = {name: shape for name, shape in tokens.items() if name not in absent}
    chunk = None if draw.rand() < 0.2 else int(chunk)
    call = partial(linear_recurrence, delta=delta, chunk=chunk)
    return Program(call, partial(linear, delta), tokens, {}, (N, H, h), T, absent)


def linear(delta, x, first, dy, dlast):
    """`numpy_recurrence.recurrence` with what was left out."""
    q, v, ones = x["q"], x["v"], np.ones(x["q"].shape[:3])
    g = x.get("log_decay", 0 * ones)
    g, b, state = g.reshape(*ones.shape, -1) if g.size else 0 * q, x.get("beta", ones), x["state"]
    y, last, *gradients = numpy_recurrence.recurrence(
        q, x["k"], v, g, b, first, state, delta, dy, dlast
    )
    names = ("q", "k", "v", "log_decay", "beta", "state")
    return y, last, dict(zip(names, gradients, strict=True))


def elementwise(x, first, dy, dlast):
    y, last, *gradients = numpy_recurrence.elementwise(
        x["x"], x["log_decay"], first, x["state"], dy, dlast
    )
    return y, last, dict(zip(("x", "log_decay", "state"), gradients, strict=True))


def convolution(x, first, dy, dlast):
    y, last, *gradients = numpy_recurrence.convolution(
        x["x"], x["weight"], x["bias"], first, x["state"], dy, dlast
    )
    return y, last, dict(zip(("x", "weight", "bias", "state"), gradients, strict=True))


def drawn(program, draw):
    """Arguments, ids, which tokens are real, and the cotangents of outputs and last state."""
    T, absent = program.length, program.absent
    steps = np.where(draw.rand(B, T) < draw.choice([0, 0.1, 0.5]), draw.randint(1, 5, (B, T)), 0)
    ids = IDS[steps.cumsum(1) % 5 if "segments" not in absent else 0 * steps]
    valid = draw.rand(B, T) < ([1] if "valid" in absent else draw.choice([1, 0.7, 0.2, 0], (B, 1)))
    shapes = {name: (B, *shape) for name, shape in program.tokens.items()}
    shapes |= {**program.weights, "state": (B, *program.state)}
    x = {name: draw.standard_normal(shape) for name, shape in shapes.items()}
    if "k" in x:
        x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    if "beta" in x:
        x["beta"] = draw.rand(*shapes["beta"])
    if "log_decay" in x:
        g, odd = -draw.gamma(0.5, 2.0, shapes["log_decay"]), draw.choice([-np.inf, -800.0, 0.0])
        x["log_decay"] = np.where(draw.rand(*g.shape) < draw.choice([0, 0.1, 1]), odd, g)
    if "state" in absent:
        x["state"] *= 0
    dy = draw.standard_normal(shapes["v" if "v" in x else "x"])
    return x, ids, valid, dy, draw.standard_normal(shapes["state"])


def wanted(program, x, ids, valid, dy, dlast):
    """Outputs, last state and gradients of numpy, each row without its padding."""
    y, last, gradients = jax.tree.map(np.zeros_like, (dy, dlast, x))
    for row, there in enumerate(valid):
        mine = {name: a if name in program.weights else a[[row]] for name, a in x.items()}
        mine |= {name: mine[name][:, there] for name in program.tokens}
        own = ids[row, there]
        first = np.concatenate([0 * own[:1] > 0, own[1:] != own[:-1]])[None]
        out = program.oracle(mine, first, dy[[row]][:, there], dlast[[row]])
        y[row, there], last[row] = out[0][0], out[1][0]
        for name in x:
            if name in program.weights:
                gradients[name] += out[2][name]
            else:
                at = (row, there) if name in program.tokens else row
                gradients[name][at] = out[2][name].reshape(gradients[name][at].shape)
    return y, last, gradients


def in_two_calls(run, x, ids, valid, dy, dlast, cut):
    """The same by a call of the tokens before the cut, and one of those after it."""
    before = valid & (np.arange(ids.shape[1]) < cut)
    after, goes_on = valid & ~before, np.ones(B, bool)
    for row in np.flatnonzero(before.any(1) & after.any(1)):
        goes_on[row] = ids[row, before[row]][-1] == ids[row, after[row]][0]
    goes_on = goes_on.reshape(B, *[1] * (x["state"].ndim - 1))
    y, state, _ = run(x, ids, before, dy, dlast)
    more, last, late = run({**x, "state": np.where(goes_on, state, 0)}, ids, after, dy, dlast)
    _, _, early = run(x, ids, before, dy, np.where(goes_on, late.pop("state"), 0))
    return y + more, last, {**early, **{name: early[name] + late[name] for name in late}}


def agree(found, want, seed):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        verdict = judge.same_function(a, b, zero=True)
        assert verdict.ok or verdict.note == judge.EMPTY, (seed, verdict)


@pytest.mark.parametrize("number", with_nightly(range(10 * KINDS), commit=range(10)))
def test_a_recurrence_and_its_gradients_equal_numpy_in_one_call_and_in_two(number):
    one = program(number)
    run = one.compiled()
    for seed in range(12):
        draw = np.random.RandomState([number, seed])
        x, ids, valid, dy, dlast = drawn(one, draw)
        want = wanted(one, x, ids, valid, dy, dlast)
        for name in one.tokens:  # padding, and its ids, may be anything
            there = valid.reshape(B, -1, *[1] * (x[name].ndim - 2))
            x[name] = np.where(there, x[name], np.nan)
        ids = np.where(valid, ids, draw.choice(IDS))
        if "state" in one.absent:
            del x["state"], want[2]["state"]
        agree(run(x, ids, valid, dy, dlast), want, seed)
        if not {"state", "valid"} & {*one.absent}:
            cut = draw.randint(one.length + 1)
            agree(in_two_calls(run, x, ids, valid, dy, dlast, cut), want, seed)
