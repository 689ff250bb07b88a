"""An encoder of padded sentences: torch packs them for `nn.GRU`, Flax scans and holds the state."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch.nn.utils.rnn import pack_padded_sequence

from flax_attn.parity import Rule

from ...port import Port


class Theirs(torch.nn.Module):
    """Words to vectors, a GRU to each sentence's end, and a projection of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 4)
        self.gru = torch.nn.GRU(4, 7, batch_first=True)
        self.out = torch.nn.Linear(7, 3)

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.embed(words), lengths, batch_first=True, enforce_sorted=False
        )
        _, last = self.gru(packed)
        return self.out(last[0])  # B D


class Gates(nnx.Module):
    """Reset, update and new: one Linear each."""

    def __init__(self, inputs: int, width: int, *, rngs: nnx.Rngs):
        self.reset = nnx.Linear(inputs, width, rngs=rngs)
        self.update = nnx.Linear(inputs, width, rngs=rngs)
        self.new = nnx.Linear(inputs, width, rngs=rngs)


class GRU(nnx.Module):
    """h = (1 - z) n + z h, with torch's gates: r is applied after the product with h.

    `nnx.GRUCell` has no bias on the side of h, which torch has within r.
    """

    def __init__(self, inputs: int, width: int, *, rngs: nnx.Rngs):
        self.width = width
        self.of_x = Gates(inputs, width, rngs=rngs)
        self.of_h = Gates(width, width, rngs=rngs)

    def new(self, x: jax.Array, h: jax.Array, r: jax.Array) -> jax.Array:
        return jnp.tanh(self.of_x.new(x) + r * self.of_h.new(h))

    def step(self, h: jax.Array, x: jax.Array) -> jax.Array:
        r = jax.nn.sigmoid(self.of_x.reset(x) + self.of_h.reset(h))
        z = jax.nn.sigmoid(self.of_x.update(x) + self.of_h.update(h))
        return (1 - z) * self.new(x, h, r) + z * h

    def __call__(self, x: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(h: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, t = at
            h = jnp.where((t < lengths)[:, None], self.step(h, x), h)
            return h, h

        start = jnp.zeros((x.shape[0], self.width), x.dtype)
        last, states = jax.lax.scan(step, start, (x.swapaxes(0, 1), jnp.arange(x.shape[1])))
        return states.swapaxes(0, 1), last  # B T H, B H: what torch returns, without its axis 1


class Encoder(nnx.Module):
    """The same encoder; names are torch's."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(11, 4, rngs=rngs)
        self.embed.dtype = None  # or it casts to the dtype its table was built in, for ever
        self.gru = GRU(4, 7, rngs=rngs)
        self.out = nnx.Linear(7, 3, rngs=rngs)

    def __call__(self, words: jax.Array, lengths: jax.Array) -> jax.Array:
        return self.out(self.gru(self.embed(words), lengths)[1])  # B D


def rules() -> tuple[Rule, ...]:
    """Torch stacks the gates on the first axis, in this order."""
    gates = "reset,update,new"
    return tuple(
        Rule(f"gru.{kind}_{side}_l0 -> gru.of_{of}.{{{gates}}}.{name}", layout)
        for side, of in (("ih", "x"), ("hh", "h"))
        for kind, name, layout in (
            ("weight", "kernel", "(g o) i -> g i o"),
            ("bias", "bias", "(g o) -> g o"),
        )
    )


def sentences() -> tuple[np.ndarray, np.ndarray]:
    """Five padded sentences of words, and their lengths, unsorted."""
    words = np.random.RandomState(0).randint(0, 11, (5, 6))
    return words, np.array([4, 6, 1, 5, 2])


PORTS = [Port("encoder of sentences", Theirs, Encoder, lambda seed: sentences(), rules())]
