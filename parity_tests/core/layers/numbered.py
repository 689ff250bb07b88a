"""Random calls of every layer that is told which tokens are real, or where they stand.

A call is drawn from a seed: a layer, a mask, a score, a rotary, padding at the ends and between,
positions that jump, tie or fall, and how a cache cuts the tokens. Whatever a layer is given beside
a row's own tokens, it gives what each row gives alone.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flax_attn as fa
from flax_attn import CAUSAL, FULL, Rotary, Rules, frozen
from flax_attn.families._scores import Temperature
from flax_attn.layers import _recurrent as recurrent
from parity_tests.core import layer_facts

T, D = 9, layer_facts.D
COUNTS = (6, 4, 6)  # how many tokens of each row are real
HEADS = (D, 4, 2, 8)
SHORT, LONG = np.linspace(1.0, 2.0, 4), np.linspace(3.0, 5.0, 4)

# How each layer is built. All have one output a token but "class", which has that of the first.
LAYERS = layer_facts.NUMBERED
OTHERS = layer_facts.NOT_NUMBERED
ROTARY = ("grouped", "gated", "exclusive", "shared", "residual", "latent", "indexed", "later")
ROTARY += ("differential", "entmax", "selective", "sigmoid")
SCORED = tuple(name for name in ROTARY if name != "differential")
CACHED = ("grouped", "gated", "exclusive", "shared", "residual", "latent", "later", "cross", "t5")
CACHED += ("indexed", "differential")
RECURRENT = ("gated delta", "kimi delta", "lightning", "mamba", "mamba2", "rg_lru", "convolution")
MASKED = tuple(x for x in LAYERS if x not in ("longformer", *RECURRENT))


def even_or_early(b, n, q, k):
    return (k % 2 == 0) | (q < 3)


def by_place(logits, b, n, q, k):
    return logits + jnp.sin(0.7 * q) * jnp.cos(1.3 * k)


@frozen
class Thirds(fa.Mask):
    """A user's class: keys of the first third of each six positions."""

    reads = "position"

    def __call__(self, b, n, q, k):
        return k % 6 < 4


# Masks by what they read. `CAUSAL &` is put before each, or `CAUSAL |` before a prefix.
MASKS = {
    "all": FULL,
    "window": fa.Window(2, 0),
    "both sides": fa.Window(1, 2),
    "not near": ~fa.Window(1, 0) | fa.Window(0, 0),
    "behind": fa.Causal(-1) | fa.Window(0, 0),
    "end": fa.Causal("end"),
    "function": fa.MaskFn(even_or_early),
    "chunks": fa.Chunked(4),
    "not chunks": ~fa.Chunked(3) | fa.Window(0, 0),
    "prefix": fa.Prefix(3),
    "class of a user": Thirds(),
    "function of positions": fa.MaskFn(even_or_early, reads="position"),
}
OF_POSITIONS = ("chunks", "not chunks", "prefix", "class of a user", "function of positions")
SCORES = {
    "none": fa.IDENTITY,
    "cap": fa.Softcap(2.0),
    "alibi": fa.Alibi(np.linspace(0.1, 0.9, 4)),
    "t5": fa.T5Bias(np.linspace(-1.0, 1.0, 32).reshape(8, 4), buckets=8, max_distance=9),
    "function": fa.ScoreFn(by_place),
    "temperature": Temperature(2, 0.7),
    "function of positions": fa.ScoreFn(by_place, reads="position"),
}
ROTARIES = {
    "none": None,
    "plain": Rotary(),
    "yarn": Rotary(scaling=fa.Yarn(4.0, 16)),
    "longrope": Rotary(scaling=fa.LongRope(SHORT, LONG, 5, factor=2.0)),
    "dynamic": Rotary(scaling=fa.DynamicScaling(3.0, 4)),
}
OF_LENGTH = ("longrope", "dynamic")  # keys in a cache keep the rates of the length they came at


class Program(NamedTuple):
    """One call, in words that the tables above explain."""

    seed: int
    layer: str
    mask: str
    score: str
    rotary: str
    padding: str
    positions: str

    def build(self) -> nnx.Module:
        """The layer, all its parameters drawn."""
        parts: dict[str, Any] = {}
        if self.layer in ROTARY:
            parts["rotary"] = ROTARIES[self.rotary]
        if self.layer in SCORED:
            score = SCORES[self.score]
            heads = 3 if self.layer in ("latent", "indexed") else 4
            parts["rules"] = Rules(score=with_heads(score, heads))
        kind = {"param_dtype": jnp.float64}
        layer = LAYERS[self.layer](**parts, **kind, rngs=nnx.Rngs(self.seed))
        draw = np.random.default_rng(self.seed).normal
        state = nnx.state(layer, nnx.Param)
        nnx.update(layer, jax.tree.map(lambda x: jnp.asarray(draw(size=x.shape) / 2), state))
        layer.eval()
        return layer

    def masked(self) -> dict[str, Any]:
        """The mask of the call, where the layer takes one."""
        if self.layer not in MASKED:
            return {}
        mask = MASKS[self.mask]
        if self.mask == "prefix":
            return {"mask": CAUSAL | mask}
        return {"mask": mask if self.mask in ("both sides", "end") else CAUSAL & mask}

    def valid(self) -> np.ndarray:
        """Which tokens are real, `COUNTS` of each row."""
        draw, rows = np.random.default_rng(self.seed), []
        for count in COUNTS:
            first = {"left": T - count, "right": 0}.get(self.padding, draw.integers(T - count + 1))
            real = np.arange(first, first + count)
            if self.padding == "between":
                real = draw.choice(T, count, replace=False)
            rows.append(np.isin(np.arange(T), real))
        return np.stack(rows)

    def places(self, lengths: tuple[int, ...] = (T,)) -> np.ndarray | None:
        """Positions of rows that hold documents of these lengths."""
        draw = np.random.default_rng(self.seed + 1)
        if self.positions == "none":
            return None
        if self.positions == "restart":
            return np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
        steps = {"jump": (1, 4), "tie": (0, 3), "fall": (-3, 3), "below zero": (-2, 3)}
        moved = draw.integers(*steps[self.positions], size=(len(COUNTS), sum(lengths)))
        start = -4 if self.positions == "below zero" else 0
        at = moved.cumsum(-1) + start
        return (at if start else np.abs(at)).astype(np.int32)


def with_heads(score: fa.scores.Score, heads: int) -> fa.scores.Score:
    """A score of four heads as one of fewer."""
    if isinstance(score, fa.Alibi):
        return replace(score, slopes=score.slopes[:heads])
    return replace(score, table=score.table[:, :heads]) if isinstance(score, fa.T5Bias) else score


def program(seed: int) -> Program:
    """The program of a seed; each layer comes once in as many seeds as there are layers."""
    draw = np.random.default_rng(seed)

    def pick(table: Any) -> str:
        return str(draw.choice(list(table)))

    layer = list(LAYERS)[seed % len(LAYERS)]
    kinds = ["none", "none", "jump", "tie", "fall", "below zero"]
    return Program(
        seed,
        layer,
        pick(MASKS),
        pick(SCORES),
        pick(ROTARIES),
        pick(["left", "right", "ends", "between"]),
        "none" if layer == "longformer" else pick(kinds),
    )


def extra(layer: nnx.Module, x: Any, drawn: int, **numbers: Any) -> dict[str, Any]:
    """What else a layer is given: an earlier layer's keys and values, rows of embeddings."""
    if isinstance(layer, fa.CrossLayerAttention):
        parts = {"rotary": layer.rotary, "param_dtype": jnp.float64}
        first = fa.SharedKeyValueAttention(*HEADS, **parts, rngs=nnx.Rngs(drawn))
        return {"keys_and_values": first.keys_and_values_of(x, **numbers)}
    if isinstance(layer, fa.DisentangledAttention):
        draw = np.random.default_rng(drawn).normal
        return {"rel_embeddings": jnp.asarray(draw(size=(layer.embeddings, D)))}
    if isinstance(layer, fa.LongformerAttention):
        return {"global_tokens": x[..., 0] > 1}  # as the token itself says
    return {}


def is_recurrent(layer: nnx.Module) -> bool:
    return isinstance(layer, recurrent.Recurrent)
