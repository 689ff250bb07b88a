"""Plain functions between two submodules, which no tap sees."""

import jax
import jax.numpy as jnp

from .attention import F
from .fault import Strange
from .pair import B, D, Pair, T, embedding, linear, normal, tokens, torch

G = "between taps"
X = normal("x", B, T, D)
W = 13
IDS = tokens(B, T, below=17)
TWO = {"up": linear(D, W), "down": linear(W, D)}
THREE = {"gate": linear(D, W), **TWO}


def pair(parts, theirs, ours, *inputs):
    return Pair(parts, theirs, ours, inputs or (X,))


def two(theirs, right, wrong, parts=TWO):
    """Something between `up` and `down`."""

    def port(m, share, x):
        y = m.up(x)
        return m.down(share(right(y), wrong(y)))

    return pair(parts, lambda m, x: m.down(theirs(m.up(x))), port)


def three(theirs, right, wrong):
    """Something of what `gate` and `up` give, in this order, before `down`."""

    def port(m, share, x):
        gate, up = m.gate(x), m.up(x)
        return m.down(share(right(gate, up), wrong(gate, up)))

    return pair(THREE, lambda m, x: m.down(theirs(m.gate(x), m.up(x))), port)


def residual(right, wrong):
    """A sum of the input and of `mix` before `out`; `right` and `wrong` on either side's arrays."""

    def port(m, share, x):
        y = m.mix(x)
        return m.out(share(right(x, y), wrong(x, y)))

    parts = {"mix": linear(D, D), "out": linear(D, 9)}
    return pair(parts, lambda m, x: m.out(right(x, m.mix(x))), port)


def normed(y):
    """L2 over the last axis, as F.normalize has it."""
    return y / jnp.maximum(jnp.sqrt((y**2).sum(-1, keepdims=True)), 1e-12)


def _gate_and_up():
    """One projection for both halves; the port takes the second half as the gate."""

    def original(m, x):
        gate, up = m.both(x).chunk(2, dim=-1)
        return m.down(F.silu(gate) * up)

    def port(m, share, x):
        gate, up = jnp.split(m.both(x), 2, axis=-1)
        return m.down(share(jax.nn.silu(gate) * up, jax.nn.silu(up) * gate))

    return pair({"both": linear(D, 2 * W), "down": linear(W, D)}, original, port)


def _every_other():
    """The same, of which the port takes every other number as the gate."""

    def original(m, x):
        gate, up = m.both(x).chunk(2, dim=-1)
        return m.down(torch.sigmoid(gate) * up)

    def port(m, share, x):
        y = m.both(x)
        gate, up = (
            share(a, b)
            for a, b in zip(jnp.split(y, 2, -1), (y[..., ::2], y[..., 1::2]), strict=True)
        )
        return m.down(jax.nn.sigmoid(gate) * up)

    return pair({"both": linear(D, 2 * W), "down": linear(W, D)}, original, port)


def _positions(offset):
    """Learnt positions added by hand, from the third row of the table on."""

    def original(m, ids):
        return m.out(m.embed(ids) + m.positions.weight[torch.arange(T) + 2])

    def port(m, share, ids):
        table, rows = m.positions.embedding[...], jnp.arange(T)
        return m.out(m.embed(ids) + share(table[rows + 2], table[rows + offset]))

    parts = {"embed": embedding(17, D), "positions": embedding(T + 3, D), "out": linear(D, 9)}
    return pair(parts, original, port, IDS)


def _last_or_mean():
    def port(m, share, x):
        y = m.up(x)
        return m.down(share(y.mean(1), y[:, -1]))

    return pair(TWO, lambda m, x: m.down(m.up(x).mean(1)), port)


def _joined():
    """Two halves joined in the other order."""

    def original(m, x):
        return m.out(torch.cat([m.left(x), m.right(x)], dim=-1))

    def port(m, share, x):
        left, right = m.left(x), m.right(x)
        joined = jnp.concatenate([left, right], -1)
        return m.out(share(joined, jnp.concatenate([right, left], -1)))

    parts = {"left": linear(D, W), "right": linear(D, W), "out": linear(2 * W, 9)}
    return pair(parts, original, port)


def _token_shift():
    """Each token mixed with the one before it; the port with the one behind it."""

    def original(m, x):
        y = m.up(x)
        return m.down(y + F.pad(y, (0, 0, 1, -1)))

    def port(m, share, x):
        y = m.up(x)
        none = jnp.zeros_like(y[:, :1])
        before = jnp.concatenate([none, y[:, :-1]], 1)
        behind = jnp.concatenate([y[:, 1:], none], 1)
        return m.down(y + share(before, behind))

    return pair(TWO, original, port)


def _torch_has_more():
    """Torch's activation is a submodule, Flax's a plain function, and the wrong one."""
    from flax import nnx

    from .pair import Part

    parts = {
        "up": linear(D, W),
        "act": Part(torch.nn.Softplus, lambda rngs, share: None),
        "down": linear(W, D),
    }

    def port(m, share, x):
        y = m.up(x)
        return m.down(share(nnx.softplus(y), nnx.elu(y)))

    return pair(parts, lambda m, x: m.down(m.act(m.up(x))), port)


UP_DOWN, MIX_OUT = "between up and down", "between mix and out"
FAULTS = [
    Strange(
        "the activation on the wrong half",
        G,
        three(
            lambda gate, up: F.silu(gate) * up,
            lambda gate, up: jax.nn.silu(gate) * up,
            lambda gate, up: gate * jax.nn.silu(up),
        ),
        UP_DOWN,
    ),
    Strange(
        "the gate without its sigmoid",
        G,
        three(
            lambda gate, up: torch.sigmoid(gate) * up,
            lambda gate, up: jax.nn.sigmoid(gate) * up,
            lambda gate, up: gate * up,
        ),
        UP_DOWN,
    ),
    Strange(
        "GELU by erf, where torch has tanh",
        G,
        two(
            lambda y: F.gelu(y, approximate="tanh"),
            lambda y: jax.nn.gelu(y, approximate=True),
            lambda y: jax.nn.gelu(y, approximate=False),
        ),
        UP_DOWN,
        "GELU",
    ),
    Strange(
        "ReLU not squared",
        G,
        two(lambda y: F.relu(y) ** 2, lambda y: jax.nn.relu(y) ** 2, jax.nn.relu),
        UP_DOWN,
        "ReLU",
    ),
    Strange(
        "a norm missing", G, two(lambda y: F.normalize(y, dim=-1), normed, lambda y: y), UP_DOWN
    ),
    Strange(
        "the residual doubled", G, residual(lambda x, y: x + y, lambda x, y: x + x + y), MIX_OUT
    ),
    Strange("no residual", G, residual(lambda x, y: x + y, lambda x, y: y), MIX_OUT),
    Strange(
        "the branch not scaled before it is added",
        G,
        residual(lambda x, y: x + 0.5 * y, lambda x, y: x + y),
        MIX_OUT,
    ),
    Strange("the second half taken as the gate", G, _gate_and_up(), "between both and down"),
    Strange("every other number taken as the gate", G, _every_other(), "between both and down"),
    Strange(
        "positions from the first row, not the third", G, _positions(0), "between embed and out"
    ),
    Strange("the last token for the mean of all", G, _last_or_mean(), UP_DOWN),
    Strange("two halves joined in the other order", G, _joined(), "between right and out"),
    Strange("the next token for the one before", G, _token_shift(), UP_DOWN),
    Strange(
        "another activation, torch's a submodule", G, _torch_has_more(), UP_DOWN, "act|Softplus"
    ),
]
