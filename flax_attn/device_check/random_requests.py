"""Seeded random requests to attention, over masks, scores, sizes and dtypes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import dropout, masks, scores
from ..masks import CAUSAL, FULL, Mask
from ..masks.stored_keys import StoredKeys
from ..scores import IDENTITY, Score

Random = np.random.Generator
DTYPES = ("bfloat16", "float32", "bfloat16", "float16")
# B, T, S, N, K, H, h: independent sizes differ where a kernel allows it.
SIZES = (
    (2, 384, 384, 8, 2, 64, 64),
    (1, 640, 640, 4, 4, 128, 128),
    (3, 250, 250, 6, 3, 64, 64),  # not a multiple of a block
    (2, 128, 512, 4, 1, 128, 128),
    (1, 320, 320, 2, 2, 256, 256),
    (2, 192, 448, 6, 2, 96, 64),
    (4, 1, 700, 8, 4, 128, 128),  # a decoding step
    (1, 2048, 2048, 4, 2, 64, 64),  # so long that its times stand for longer ones
    (1, 2048, 2048, 2, 2, 128, 128),
)
SMALL = ((2, 48, 48, 4, 2, 16, 16), (1, 17, 40, 3, 1, 8, 12), (2, 1, 70, 4, 2, 16, 16))


@dataclass(frozen=True)
class DrawnRequest:
    """One call of `attend`.

    Attributes:
      words: one-line description.
      sizes: B, T, S, N, K, H, h.
      dtype: of q, k and v.
      mask, score, options: arguments of `attend`; the options are sinks and dropout.
      seed: of the inputs.
    """

    words: str
    sizes: tuple[int, ...]
    dtype: str
    mask: Mask
    score: Score
    options: Mapping[str, Any]
    seed: int

    def arrays(self) -> dict[str, np.ndarray]:
        """Normal q, k, v and cotangent, and sinks if requested, rounded to the dtype."""
        draw = np.random.default_rng(self.seed).standard_normal
        B, T, S, N, K, H, h = self.sizes
        shapes = {"q": (B, T, N, H), "k": (B, S, K, H), "v": (B, S, K, h)}
        shapes |= {"cotangent": (B, T, N, h)}
        shapes |= {"sinks": (N,)} if self.options.get("sinks") else {}
        return {name: draw(shape).astype(jnp.dtype(self.dtype)) for name, shape in shapes.items()}

    def rules(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of `attend`, with the sinks among these arrays."""
        sinks = {"sinks": jnp.asarray(arrays["sinks"])} if "sinks" in arrays else {}
        return {"mask": self.mask, "score": self.score, **self.options, **sinks}


def draw_request(i: int, small: bool = False, seed: int = 0) -> DrawnRequest:
    """Returns the i-th request of a seed; the first ones use each mask once, without a score.

    >>> print(draw_request(1).words)
    CAUSAL, float32, B 1, T 640, S 640, N 4, K 4, H 128, h 128
    """
    drawn = np.random.default_rng((seed, i))
    table = SMALL if small else SIZES
    mask_names, score_names = list(MASKS), list(SCORES)
    mask_name = mask_names[i % len(mask_names)]
    if "Documents" in mask_name:
        table = [sizes for sizes in table if sizes[1] == sizes[2]]  # T = S
    sizes = table[i % len(table)]
    plain = i < len(mask_names) or drawn.random() < 0.4
    score_name = "" if plain else score_names[drawn.integers(len(score_names))]
    dtype = DTYPES[(i + i // len(mask_names)) % len(DTYPES)]
    options: dict[str, Any] = {"sinks": True} if not plain and drawn.random() < 0.3 else {}
    if not plain and drawn.random() < 0.2:
        options["dropout"] = dropout.Dropout(0.25, jax.random.key(i))
    score = SCORES[score_name](drawn, sizes) if score_name else IDENTITY
    axes = zip("B T S N K H h".split(), sizes, strict=True)
    words = [mask_name, score_name, *options, dtype, *(f"{name} {n}" for name, n in axes)]
    mask = MASKS[mask_name](drawn, sizes)
    return DrawnRequest(", ".join(filter(None, words)), sizes, dtype, mask, score, options, i)


def _segments(drawn: Random, sizes: tuple[int, ...]) -> Mask:
    """Four packed documents given by ids; queries are the last tokens."""
    B, T, S = sizes[:3]
    ids = np.sort(drawn.integers(0, 4, (B, S)), axis=1)
    return masks.Segments(q_ids=ids[:, S - T :], kv_ids=ids) & masks.Causal("end")


def _packed(drawn: Random, sizes: tuple[int, ...]) -> masks.Documents:
    """Packed documents given by lengths, which may be 0, and padding."""
    B, T = sizes[:2]
    cuts = np.sort(drawn.integers(0, T + 1, (B, 4)), axis=1)
    return masks.Documents(np.diff(cuts, prepend=0, axis=1))


def _lengths(drawn: Random, sizes: tuple[int, ...]) -> Mask:
    return masks.Lengths(drawn.integers(1, sizes[2] + 1, sizes[0]))


def _stored(drawn: Random, sizes: tuple[int, ...]) -> Mask:
    """A chunk of tokens beside a cache that holds others, as many as fit."""
    B, T, S = sizes[:3]
    before = drawn.integers(0, S - T + 1, (B, 1))
    return StoredKeys(None, (before + np.arange(1, T + 1)).astype(np.int32))


def _dense(drawn: Random, sizes: tuple[int, ...]) -> Mask:
    B, T, S = sizes[:3]
    return masks.Dense(drawn.random((B, 1, T, S)) < 0.7)


MASKS: Mapping[str, Callable[[Random, tuple[int, ...]], Mask]] = {
    "FULL": lambda drawn, sizes: FULL,
    "CAUSAL": lambda drawn, sizes: CAUSAL,
    "Causal(end)": lambda drawn, sizes: masks.Causal("end"),
    "Window(63, 0, end)": lambda drawn, sizes: masks.Window(63, 0, "end"),
    "Window(20, 30, end)": lambda drawn, sizes: masks.Window(20, 30, "end"),
    "Causal(end) & Chunked(100)": lambda drawn, sizes: masks.Causal("end") & masks.Chunked(100),
    "Causal(end) & Segments": _segments,
    "CAUSAL & Documents": lambda drawn, sizes: CAUSAL & _packed(drawn, sizes),
    "Documents": _packed,
    "Prefix(33) | CAUSAL": lambda drawn, sizes: masks.Prefix(33) | CAUSAL,
    "Lengths": _lengths,
    "Causal(end) & Lengths": lambda drawn, sizes: masks.Causal("end") & _lengths(drawn, sizes),
    "CAUSAL & ~Lengths": lambda drawn, sizes: CAUSAL & ~_lengths(drawn, sizes),
    "StoredKeys": _stored,
    "Dense": _dense,
    "MaskFn": lambda drawn, sizes: masks.MaskFn(
        lambda b, n, q, k: (abs(q - k) < 9) | (k % 3 == n % 3)  # near keys, and a third of all
    ),
}
SCORES: Mapping[str, Callable[[Random, tuple[int, ...]], Score]] = {
    "Softcap(20)": lambda drawn, sizes: scores.Softcap(20.0),
    "Alibi": lambda drawn, sizes: scores.Alibi(2.0 ** -np.arange(1, sizes[3] + 1)),
    "Additive": lambda drawn, sizes: scores.Additive(
        drawn.standard_normal((1, sizes[3], sizes[1], sizes[2])).astype(np.float32)
    ),
    "ScoreFn": lambda drawn, sizes: scores.ScoreFn(
        lambda logits, b, n, q, k: logits - 0.01 * (n + 1) * abs(q - k)
    ),
}
