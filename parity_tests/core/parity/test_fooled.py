"""Wrong ports that might pass and right ports that might fail, one row each.

What a function of arrays hides from a trace, buffers, integers and one object as both sides are in
test_concrete.py and test_leaves.py.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, compare, port

torch = pytest.importorskip("torch", reason="originals are torch's")
X, Y = np.random.RandomState(0).standard_normal((2, 3, 7))
VALUES = {"grads": False}  # without gradients, which see most of it
NARROW = {"dtypes": ("float64", "float32")}
STATE = {"calls": 0, "y": np.tanh(X)}


tanh, drop, linear = torch.tanh, torch.nn.Dropout(0.5), torch.nn.Linear(7, 7)


class Two(torch.nn.Module):
    """tanh between two linear layers, or the first alone."""

    def __init__(self, tied=False, alone=False, zero=False):
        super().__init__()
        self.a, self.alone = torch.nn.Linear(7, 7, bias=False), alone
        self.b = self.a if tied else torch.nn.Linear(7, 7, bias=False)
        self.b.weight.data *= 1 - zero

    def forward(self, x):
        return self.a(x) if self.alone else torch.tanh(self.b(self.a(x)))


class Mine(nnx.Module):
    def __init__(self, tied=False, alone=False, zero=False):
        make = lambda: nnx.Linear(7, 7, use_bias=False, rngs=nnx.Rngs(0))  # noqa: E731
        self.a, self.alone, self.zero = make(), alone, zero
        self.b = self.a if tied else make()

    def __call__(self, x):
        return 0 * x if self.zero else self.a(x) if self.alone else jnp.tanh(self.b(self.a(x)))


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.n = 0

    def forward(self, x):
        self.n += 1
        return torch.tanh(x) / self.n


class MineCounts(nnx.Module):
    def __init__(self):
        self.n = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.n[...] += 1
        return jnp.tanh(x) / self.n[...]


class CallsJax(torch.nn.Module):
    def forward(self, x):
        with jax.enable_x64(True):
            return torch.from_numpy(np.array(jnp.tanh(x.numpy())))


def counts(x):
    STATE["calls"] += 1
    return jnp.tanh(x) / STATE["calls"]


def publishes(x):
    STATE["y"] = torch.tanh(x).detach().numpy()
    return torch.tanh(x)


def calls_torch(x):
    call = lambda x: torch.tanh(torch.from_numpy(np.array(x))).numpy()  # noqa: E731
    return jax.pure_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def custom(primal, forward, backward):
    function = jax.custom_vjp(primal)
    function.defvjp(lambda x: (forward(x), x), lambda x, g: (g * backward(x),))
    return function


def slope(x):
    return 1 - jnp.tanh(x) ** 2


def read(x):
    """The result for X, whatever it is given."""
    return jnp.asarray(STATE["y"]).astype(x.dtype)


def heads(library, *order):
    return lambda x: library.tanh(x)[:, :6].reshape(3, 2, 3)[:, np.array(order)].reshape(3, 6)


def huge(library, last):
    join = torch.cat if library is torch else jnp.concatenate
    return lambda x: join([1e10 * library.tanh(x), last(x)], -1)


def backwards_sum(x):
    return sum(x[:, i] for i in reversed(range(7)))


def scanned(x):
    return jax.lax.scan(lambda total, row: (total + row,) * 2, 0 * x[0], x)[1]


def both(library, *names):
    return lambda x: tuple(getattr(library, name)(x) for name in names)


def row(first, second, *inputs, says="", **options):
    """One comparison; without words that warn, a wrong port must not be equal."""
    return first, second, inputs or (X,), {"dtypes": ("float64",), "eager": False} | options, says


WRONG = {
    "zeros": row(lambda x: torch.relu(x - 9), jnp.zeros_like, says="nothing is proven"),
    "one number": row(
        lambda x: torch.softmax(x, 0), jax.nn.softmax, np.ones((4, 4)), **VALUES, says="every elem"
    ),
    "NaN": row(lambda x: torch.log(-x.abs()), lambda x: x * jnp.nan),
    "infinities": row(
        lambda x: torch.exp(x + 1e3), lambda x: jnp.exp(2 * x + 1e3), says="nothing is proven"
    ),
    "no rows": row(tanh, jnp.sin, X[:0], says="nothing is proven"),
    "saturation": row(lambda x: torch.tanh(1e4 * x), jnp.sign, says="neither side reads input 0"),
    "a mask": row(lambda x: torch.tanh(x).masked_fill(x > 9, 0), jnp.tanh, says="masked_fill"),
    "a parameter": row(Two(alone=True), Mine(alone=True), says="does not test b.kernel"),
    "zero weights": row(Two(zero=True), Mine(zero=True), weights="given"),
    "own weights": row(Two(), Mine(), weights="as_is"),
    "tied in torch": row(Two(tied=True), Mine()),
    "tied in Flax": row(Two(), Mine(tied=True)),
    "another order": row(both(torch, "tanh", "sin"), both(jnp, "sin", "tanh")),
    "an output more": row(both(torch, "tanh"), both(jnp, "tanh", "sin")),
    "an output less": row(both(torch, "tanh", "sin"), both(jnp, "tanh")),
    "one output twice": row(both(torch, "tanh", "tanh"), both(jnp, "tanh", "sin")),
    "a row for all": row(lambda x: torch.sum(x, 0, True), lambda x: x.sum(0)),
    "heads": row(heads(torch, 0, 1), heads(jnp, 1, 0)),
    "axes": row(lambda x: x + torch.sum(x, -1), lambda x: x + x.sum(-1)[:, None], X[:, :3]),
    "equal inputs": row(lambda x, y: torch.sub(x, 2 * y), lambda x, y: y - 2 * x, X, X),
    "counts": row(Counts(), jnp.tanh, says="changes n in torch alone"),
    "counts in Flax": row(tanh, MineCounts(), says="changes n in Flax alone"),
    "counts outside": row(tanh, counts, eager=True),
    "in place": row(lambda x: torch.tanh(x.mul_(2)), lambda x: jnp.tanh(2 * x)),
    "memory": row(tanh, read),
    "memory of values": row(tanh, read, **VALUES, says="no output of Flax depends on input 0"),
    "memory of a constant": row(tanh, read, constants=("0",), says="depends on input 0"),
    "what torch leaves": row(publishes, read, **VALUES, says="no output of Flax depends"),
    "calls torch": row(tanh, calls_torch, **VALUES, says="calls back out of JAX"),
    "calls it forwards": row(tanh, custom(calls_torch, calls_torch, slope), says="calls back out"),
    "torch calls JAX": row(CallsJax(), jnp.tanh, **VALUES, says="CallsJax of torch names JAX"),
    "a dtype": row(tanh, lambda x: x if x.dtype == jnp.float32 else jnp.tanh(x), **NARROW),
    "float32": row(tanh, lambda x: jnp.tanh(x.astype(jnp.float32)).astype(x.dtype)),
    "a rounded constant": row(lambda x: torch.mul(x, 0.1), lambda x: float(np.float32(0.1)) * x),
    "a tiny constant": row(tanh, lambda x: jnp.tanh(x) + 1e-9),
    "small beside huge": row(huge(torch, torch.tanh), huge(jnp, jnp.sin)),
    "random": row(tanh, lambda x: jnp.tanh(x) * (1 + 1e-6 * random.random())),
    "no dropout": row(drop, nnx.Dropout(0.0, rngs=nnx.Rngs(0)), train=True),
    "another rate": row(drop, nnx.Dropout(0.4, rngs=nnx.Rngs(0)), train=True),
    "stopped": row(tanh, lambda x: jnp.tanh(jax.lax.stop_gradient(x))),
    "detached": row(lambda x: torch.tanh(x).detach(), jnp.tanh),
    "backward by hand": row(tanh, custom(jnp.tanh, jnp.tanh, jnp.ones_like)),
    "forward by hand": row(tanh, custom(jnp.tanh, jnp.sin, slope)),
    "forward without gradients": row(tanh, custom(jnp.sin, jnp.tanh, slope), eager=True),
}
RIGHT = {
    "a tuple for a list": row(lambda x: [torch.tanh(x)], both(jnp, "tanh")),
    "its own jit": row(tanh, jax.jit(lambda x: jnp.tanh(x))),
    "in place on a copy": row(lambda x: torch.clone(x).tanh_(), jnp.tanh),
    "another order of a sum": row(lambda x: torch.sum(x, -1), backwards_sum),
    "a scan": row(lambda x: torch.cumsum(x, 0), scanned),
    "booleans": row(torch.where, jnp.where, X > 0, X, Y),
    "equal maxima": row(lambda x: torch.amax(x, -1), lambda x: x.max(-1), np.round(X)),
    "float32 inputs": row(tanh, jnp.tanh, np.float32(X), **NARROW),
    "weights of its own": row(
        linear, port(linear, nnx.Linear(7, 7, rngs=nnx.Rngs(0))), weights="as_is"
    ),
    "tied on both": row(Two(tied=True), Mine(tied=True)),
}


# Those that were called equal before a note was there.
FOOLED = ["one number", "a mask", "memory of values", "memory of a constant", "what torch leaves"]
FOOLED += ["calls torch", "calls it forwards", "torch calls JAX"]


@pytest.mark.nightly(but=[*FOOLED, "a tuple for a list"])
@pytest.mark.parametrize("name", [*WRONG, *RIGHT])
def test_only_a_right_port_is_equal_without_a_note(name):
    first, second, inputs, options, words = {**WRONG, **RIGHT}[name]
    STATE["calls"] = 0
    try:
        report = compare(first, second, *inputs, **options)
    except ParityError as refused:
        assert name in WRONG and words in str(refused), refused
    else:
        assert words in str(report) if words else report.ok == (name in RIGHT), report
