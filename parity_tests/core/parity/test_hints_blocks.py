"""Hints without a tap: torch is run again with each mistake until it gives Flax's value.

Each pair is a function of a few parameters, written twice; the wrong one is like the right one but
for one line.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.nn import sigmoid, softmax, softplus

from flax_attn.parity import Rule, compare, record
from flax_attn.parity.recording.recording import Recording

torch = pytest.importorskip("torch", reason="the harness compares with torch")
F = torch.nn.functional

X = np.random.RandomState(0).standard_normal((3, 8, 4))
QUICK: dict[str, Any] = {"dtypes": ("float64",), "jit": False, "grads": False}


class Pair(NamedTuple):
    """One function in torch, in Flax, and in Flax with a mistake.

    Attributes:
      shapes: of the parameters.
      theirs, right, wrong: called with the parameters and the input.
      said: what the hint must say.
    """

    shapes: dict[str, tuple[int, ...]]
    theirs: Callable[..., Any]
    right: Callable[..., Any]
    wrong: Callable[..., Any]
    said: str


class Theirs(torch.nn.Module):
    def __init__(self, shapes, function):
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.ones(shape)))

    def forward(self, x):
        return self.function(self, x)


class Mine(nnx.Module):
    def __init__(self, shapes, function):
        self.function = function
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.ones(shape)))

    def __call__(self, x):
        return self.function(self, x)


def conv(p, x, padding, dilation=1, stride=1, kernel=None, groups=1):
    """By hand, B T C."""
    kernel = p.w[...] if kernel is None else kernel
    layout = jax.lax.conv_dimension_numbers(x.shape, kernel.shape, ("NWC", "OIW", "NWC"))
    return jax.lax.conv_general_dilated(
        x, kernel, (stride,), padding, (1,), (dilation,), layout, feature_group_count=groups
    )


def cell(p, x, step):
    """A recurrent cell of two gates."""
    states, h = [], 0 * x[:, 0]
    for t in range(x.shape[1]):
        h = step(x[:, t] @ p.w + h @ p.u, h)
        states.append(h)
    return states


def torch_cell(p, x):
    def step(y, h):
        new, keep = y.chunk(2, -1)
        keep = torch.sigmoid(keep)
        return (1 - keep) * torch.tanh(new) + keep * h

    return torch.stack(cell(p, x, step), 1)


def flax_cell(p, x, turn=False, exchanged=False):
    def step(y, h):
        new, keep = jnp.split(y, 2, -1)[:: -1 if turn else 1]
        keep = sigmoid(keep)
        keep = 1 - keep if exchanged else keep
        return (1 - keep) * jnp.tanh(new) + keep * h

    return jnp.stack(cell(p, x, step), 1)


def mixed(parts, act):
    return parts[0] * act(parts[1]) + parts[2]


def patches(xs):
    return [xs[:, i::4] for i in range(4)]


W, V = {"w": (4, 4)}, {"v": (4,)}
CONV = {"w": (4, 4, 3)}
PAIRS = {
    "parts of a projection": Pair(
        {"w": (4, 12)},
        lambda p, x: mixed((x @ p.w).chunk(3, -1), torch.sigmoid),
        lambda p, x: mixed(jnp.split(x @ p.w[...], 3, -1), sigmoid),
        lambda p, x: mixed(jnp.split(x @ p.w[...], 3, -1)[::-1], sigmoid),
        "in the order 2, 1, 0",
    ),
    "a projection cut by hand": Pair(
        {"w": (4, 8)},
        lambda p, x: (x @ p.w)[..., :4] * torch.tanh((x @ p.w)[..., 4:]),
        lambda p, x: (x @ p.w[...])[..., :4] * jnp.tanh((x @ p.w[...])[..., 4:]),
        lambda p, x: (x @ p.w[...])[..., :4] * sigmoid((x @ p.w[...])[..., 4:]),
        "the sigmoid in the place of tanh",
    ),
    "gates of a cell": Pair(
        {"w": (4, 8), "u": (4, 8)}, torch_cell, flax_cell,
        lambda p, x: flax_cell(p, x, turn=True), "the 2 parts of the sum (test_hints_blocks.py:",
    ),
    "what is kept in a cell": Pair(
        {"w": (4, 8), "u": (4, 8)}, torch_cell, flax_cell,
        lambda p, x: flax_cell(p, x, exchanged=True), "exchanged",
    ),
    "patches": Pair(
        {"w": (16, 4)},
        lambda p, x: torch.cat(patches(x), -1) @ p.w,
        lambda p, x: jnp.concatenate(patches(x), -1) @ p.w[...],
        lambda p, x: jnp.concatenate([patches(x)[i] for i in (0, 2, 1, 3)], -1) @ p.w[...],
        "4 parts put together in the order 0, 2, 1, 3",
    ),
    "a layer's scale": Pair(
        V,
        lambda p, x: x + p.v * torch.tanh(x),
        lambda p, x: x + p.v[...] * jnp.tanh(x),
        lambda p, x: x + jnp.tanh(x),
        "v left out, a factor",
    ),
    "a gain of 1 + w": Pair(
        V,
        lambda p, x: torch.tanh(x) * (1 + p.v) + x,
        lambda p, x: jnp.tanh(x) * (1 + p.v[...]) + x,
        lambda p, x: jnp.tanh(x) * p.v[...] + x,
        "a gain or a scale of w, where torch's is 1 + w",
    ),
    "an activation": Pair(
        W,
        lambda p, x: F.softplus(x @ p.w).cumsum(1) @ p.w,
        lambda p, x: jnp.cumsum(softplus(x @ p.w[...]), 1) @ p.w[...],
        lambda p, x: jnp.cumsum(x @ p.w[...], 1) @ p.w[...],
        "softplus left out",
    ),
    "a sign": Pair(
        V,
        lambda p, x: torch.exp(-torch.exp(p.v) * torch.sigmoid(x)),
        lambda p, x: jnp.exp(-jnp.exp(p.v[...]) * sigmoid(x)),
        lambda p, x: jnp.exp(jnp.exp(p.v[...]) * sigmoid(x)),
        "minus sign left out",
    ),
    "an epsilon in a function": Pair(
        V,
        lambda p, x: x + torch.sin(p.v * x) ** 2 / (p.v + 1e-4),
        lambda p, x: x + jnp.sin(p.v[...] * x) ** 2 / (p.v[...] + 1e-4),
        lambda p, x: x + jnp.sin(p.v[...] * x) ** 2 / p.v[...],
        "no epsilon of 0.0001",
    ),
    "a softmax's axis": Pair(
        W,
        lambda p, x: (x @ p.w).softmax(-1) @ p.w,
        lambda p, x: softmax(x @ p.w[...], -1) @ p.w[...],
        lambda p, x: softmax(x @ p.w[...], 1) @ p.w[...],
        "a softmax over another axis: 1, torch 2",
    ),
    "shares that sum to 1": Pair(
        W,
        lambda p, x: (lambda s: s / s.sum(-1, keepdim=True))((x @ p.w).softmax(-1) ** 2) @ p.w,
        lambda p, x: (lambda s: s / s.sum(-1, keepdims=True))(softmax(x @ p.w[...]) ** 2)
        @ p.w[...],
        lambda p, x: softmax(x @ p.w[...]) ** 2 @ p.w[...],
        "not divided by",
    ),
    "a residual": Pair(
        W,
        lambda p, x: (lambda y: x + y @ p.w)(torch.tanh(x) @ p.w),
        lambda p, x: (lambda y: x + y @ p.w[...])(jnp.tanh(x) @ p.w[...]),
        lambda p, x: (lambda y: y @ p.w[...])(jnp.tanh(x) @ p.w[...]),
        "input 0 not added",
    ),
    "dilation": Pair(
        CONV,
        lambda p, x: F.conv1d(x.mT, p.w, padding=2, dilation=2).mT,
        lambda p, x: conv(p, x, "SAME", dilation=2),
        lambda p, x: conv(p, x, "SAME"),
        "another dilation: 1, torch 2",
    ),
    "a stride beside SAME": Pair(
        CONV,
        lambda p, x: F.conv1d(x.mT, p.w, padding=1, stride=2).mT,
        lambda p, x: conv(p, x, [(1, 1)], stride=2),
        lambda p, x: conv(p, x, "SAME", stride=2),
        "SAME padding: shifted, another padding in front: 0, torch 1",
    ),
    "a causal convolution": Pair(
        CONV,
        lambda p, x: F.conv1d(x.mT, p.w, padding=2)[..., :-2].mT,
        lambda p, x: conv(p, x, [(2, 0)]),
        lambda p, x: conv(p, x, "SAME"),
        "SAME padding: shifted, another padding in front: 1, torch 2",
    ),
    "a mirrored kernel": Pair(
        CONV,
        lambda p, x: F.conv_transpose1d(x.mT, p.w, padding=1).mT,
        lambda p, x: conv(p, x, [(1, 1)], kernel=jnp.swapaxes(p.w[..., ::-1], 0, 1)),
        lambda p, x: conv(p, x, [(1, 1)], kernel=jnp.swapaxes(p.w[...], 0, 1)),
        "w mirrored",
    ),
    "square kernels": Pair(
        W,
        lambda p, x: torch.tanh(F.linear(torch.tanh(F.linear(x, p.w)), p.w)),
        lambda p, x: jnp.tanh(jnp.tanh(x @ p.w.T) @ p.w.T),
        lambda p, x: jnp.tanh(jnp.tanh(x @ p.w[...]) @ p.w[...]),
        "w untransposed",
    ),
    "axes of a kernel's norm": Pair(
        {"w": (4, 4), "v": (4, 1)},
        lambda p, x: x @ (p.v * p.w / p.w.norm(dim=1, keepdim=True)).T,
        lambda p, x: x @ (p.v[...] * p.w[...] / jnp.linalg.norm(p.w[...], axis=1)[:, None]).T,
        lambda p, x: x @ (p.v[...] * p.w[...] / jnp.linalg.norm(p.w[...], axis=0)).T,
        "a norm over another axis: [0], torch [1]",
    ),
    "a causal mask": Pair(
        {"w": (8, 8)},
        lambda p, x: torch.tril(p.w) @ x,
        lambda p, x: jnp.tril(p.w[...]) @ x,
        lambda p, x: jnp.tril(p.w[...], -1) @ x,
        "a causal mask off by one: its diagonal at -1, torch 0",
    ),
}  # fmt: skip


def compared(name, wrong=True, theirs=None):
    pair = PAIRS[name]
    theirs = Theirs(pair.shapes, pair.theirs) if theirs is None else theirs
    mine = Mine(pair.shapes, pair.wrong if wrong else pair.right)
    rules = [Rule(f"{key} -> {key}") for key in pair.shapes]
    with jax.numpy_rank_promotion("allow"):
        return compare(theirs, mine, X, rules=rules, **QUICK)


@pytest.mark.nightly(but=["a causal convolution", "a causal mask", "square kernels"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_mistake_that_explains_the_output_is_named(name):
    assert compared(name, wrong=False).ok
    report = compared(name)
    assert not report.ok and report.first is not None
    assert PAIRS[name].said in report.first.hint, report.first


def test_a_parameter_that_a_rule_skips():
    pair = PAIRS["a layer's scale"]
    mine = Mine({}, pair.wrong)
    report = compare(Theirs(pair.shapes, pair.theirs), mine, X, rules=[Rule.skip("v")], **QUICK)
    assert report.ok  # of ones
    theirs = Theirs(pair.shapes, pair.theirs)
    torch.nn.init.normal_(theirs.v)
    report = compare(theirs, mine, X, rules=[Rule.skip("v")], **QUICK)
    said = "v (a rule skips it) left out, a factor that torch multiplies with"
    assert report.first is not None and report.first.hint == said


@pytest.mark.nightly
def test_two_mistakes_at_once_get_no_hint():
    """Nothing is said that holds in part alone."""
    pair = PAIRS["a sign"]

    def wrong(p, x):
        return jnp.exp(jnp.exp(p.v[...])[None, None] * sigmoid(x)) * x

    mine = Mine(pair.shapes, wrong)
    report = compare(Theirs(pair.shapes, pair.theirs), mine, X, **QUICK)
    assert report.first is not None and not report.first.hint, report.first


def test_a_recording_runs_nothing_again(tmp_path):
    name = "a sign"
    theirs = Theirs(PAIRS[name].shapes, PAIRS[name].theirs)
    file = record(theirs, (X,), tmp_path / "sign.safetensors", dtypes=("float64",))
    report = compared(name, theirs=Recording(file))
    assert report.first is not None and not report.first.hint


def test_a_gradient_that_goes_straight_through():
    def through(p, x):
        y = torch.round(x @ p.w)
        return x @ p.w + (y - x @ p.w).detach()

    def right(p, x):
        y = x @ p.w[...]
        return y + jax.lax.stop_gradient(jnp.round(y) - y)

    theirs = Theirs(W, through)
    assert compare(theirs, Mine(W, right), X, **{**QUICK, "grads": True}).ok
    report = compare(
        theirs, Mine(W, lambda p, x: jnp.round(x @ p.w[...])), X, **{**QUICK, "grads": True}
    )
    assert report.first is not None and "stop" in report.first.hint, report
