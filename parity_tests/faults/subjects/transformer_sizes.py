"""The trial's sizes: one set where no two agree, one where every matrix is square and T == S."""

from dataclasses import dataclass

import numpy as np

from flax_attn.parity import draw

CAP, BASE, RATE = 5.0, 10_000.0, 0.3
LAYER_EPS, RMS_EPS = 1e-5, 1e-6


@dataclass(frozen=True)
class Sizes:
    """B sequences of T tokens behind M remembered ones; N heads on K of width h; L layers."""

    B: int
    T: int
    M: int
    N: int
    K: int
    h: int
    D: int
    F: int
    V: int
    L: int = 2

    @property
    def S(self) -> int:
        """Keys: the memory and the tokens."""
        return self.M + self.T

    @property
    def G(self) -> int:
        """Query heads to each key head."""
        return self.N // self.K

    def inputs(self) -> dict[str, np.ndarray]:
        """Token ids with repeats, a memory, and which keys are there; key 0 always is."""
        ids = draw.stream(0, "tokens").randint(0, self.V, (self.B, self.T))
        ids[:, -1] = ids[:, 0]
        there = draw.stream(0, "there").uniform(size=(self.B, self.S)) < 0.7
        there[:, 0] = True
        there[0, -1], there[1, -1] = True, False
        memory = draw.normal(0, "memory", (self.B, self.M, self.D))
        return {"tokens": ids, "memory": memory, "there": there}

    def step_inputs(self) -> dict[str, np.ndarray]:
        """One new vector each, a ring of S slots, how many tokens came before: some overflow."""
        ring = (self.B, self.S, self.K, self.h)
        before = np.arange(self.B) * 6 + 2
        return {
            "x": draw.normal(0, "x", (self.B, 1, self.D)),
            "cache_k": draw.normal(0, "cache_k", ring),
            "cache_v": draw.normal(0, "cache_v", ring),
            "before": before,
        }


APART = Sizes(B=4, T=7, M=8, N=6, K=3, h=10, D=20, F=28, V=13)
SQUARE = Sizes(B=3, T=5, M=0, N=4, K=4, h=6, D=24, F=24, V=24)
