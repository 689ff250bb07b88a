"""A workload: the sizes, mask and dtype that all competitors share, its inputs and its costs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..masks import CAUSAL, FULL, Mask, Window
from ..scores import Softcap

FORWARD, BOTH = "fwd", "fwd+bwd"
PASSES = (FORWARD, BOTH)
EXTRAS = ("plain", "softcap", "sinks")
DTYPES = ("float32", "bfloat16", "float16")
MAX_PROVEN_WEIGHTS = (
    2**25
)  # weights that are proven one by one; of more, some rows, and all of a smaller one
SHORT_LENGTH, SHORT_HEADS = 1024, 2
COTANGENT = "cotangent"
LAYER = "multi_head"  # the layer whose implementations are compared
DELTA = "gated delta rule"  # the recurrence whose forms are compared
GATED = ("q", "k", "v", "g", "beta")  # what it takes
PROJECTIONS = ("query", "key", "value", "out")


@dataclass(frozen=True)
class Workload:
    """One attention, or one whole layer of width `heads * width`, and what it is run on.

    Attributes:
      length: T, and S.
      width: H, and h: of one head.
      heads: N.
      batch: B.
      dtype: of inputs and weights.
      mask: "causal", "full" or "window", which is causal too.
      extra: "softcap", logits capped at 50, or "sinks", one a head from -1 to 1; else "plain".
      window: how many keys a query of a window sees, its own included.
      layer: None for the function of q, k and v; `DELTA`; for a whole layer `LAYER` or another.
      stored: for a step of decoding, the tokens in the longest row once its token is written, of a
        cache with room for `length`; 0 for no step. Row b of B holds a share of (b + 1) / B.
      kv_heads: K of a step, 0 for N.
      model_width: D of a published layer, 0 for `heads * width`.
      store: of a step, "int8", or "latent" for keys and values from one latent; else "".
      devices: over how many the length goes; 0 for attention that is not asked for that.
      seed: of the inputs and weights.

    >>> causal = Workload(length=1024, width=64, heads=2)
    >>> causal.pairs, causal.flops("fwd")
    (524800, 268697600)
    """

    length: int
    width: int = 64
    heads: int = 8
    batch: int = 1
    dtype: str = "float32"
    mask: str = "causal"
    extra: str = "plain"
    window: int | None = None
    layer: str | None = None
    stored: int = 0
    kv_heads: int = 0
    store: str = ""
    seed: int = 0
    model_width: int = 0
    devices: int = 0

    @property
    def rule(self) -> Mask:
        """The mask as `attend` takes it."""
        if self.window is not None:
            return Window(self.window - 1, 0)
        return CAUSAL if self.mask == "causal" else FULL

    @property
    def options(self) -> dict[str, Any]:
        """What `attend` takes beside the mask."""
        if self.extra == "softcap":
            return {"score": Softcap(50.0)}
        return {"sinks": jnp.linspace(-1.0, 1.0, self.heads)} if self.extra == "sinks" else {}

    @property
    def describe_mask(self) -> str:
        """The mask and what comes with it, in words."""
        mask = self.mask if self.window is None else f"window {self.window}"
        return mask if self.extra == "plain" else f"{mask}, {self.extra}"

    @property
    def pairs(self) -> int:
        """The query-key pairs of a head that are visible."""
        if self.mask == "full":
            return self.length**2
        keys = min(self.length, self.window or self.length)
        return keys * (keys + 1) // 2 + (self.length - keys) * keys

    @property
    def cells(self) -> int:
        """The query-key pairs of all heads and batch entries, hidden ones too."""
        return self.batch * self.heads * self.length**2

    @property
    def features(self) -> int:
        """The model width D of a layer."""
        return self.model_width or self.heads * self.width

    def flops(self, which: str) -> int:
        """`2 B N pairs (H + h)`, and 2.5 times as much backward; a layer's projections 1 and 2."""
        if self.layer not in (None, LAYER):
            return 0  # another function, whose operations nobody has counted
        attention = 2 * self.batch * self.heads * self.pairs * 2 * self.width
        tokens = self.batch * self.length
        projections = 4 * 2 * tokens * self.features**2 if self.layer else 0
        if which == FORWARD:
            return attention + projections
        return attention * 7 // 2 + projections * 3

    def bytes(self, which: str) -> int:
        """What must be moved at least: q, k, v, o; backward these, and as many gradients."""
        tensor = self.batch * self.length * self.features * jnp.dtype(self.dtype).itemsize
        return tensor * (4 if which == FORWARD else 12)

    def arrays(self, draw_index: int = 0) -> dict[str, np.ndarray]:
        """Normal inputs, weights (of a layer) and a cotangent, rounded to the dtype; by name.

        They are read-only: every competitor is given the same.
        """
        return dict(_arrays(self, draw_index))

    def drawn(self, draw_index: int) -> dict[str, np.ndarray]:
        """The arrays of `arrays`, drawn anew."""
        draw = np.random.default_rng((self.seed, draw_index)).standard_normal
        tokens = (self.batch, self.length)
        shapes: dict[str, tuple[int, ...]] = {}
        if self.stored:
            D, kv = self.features, (self.kv_heads or self.heads) * self.width
            shapes = {"x": (self.batch, self.stored, D)}
            shapes |= {"query.weight": (D, D), "key.weight": (D, kv)}
            shapes |= {"value.weight": (D, kv), "out.weight": (D, D)}
        elif self.layer in (None, DELTA):
            heads = (*tokens, self.heads, self.width)
            shapes = dict.fromkeys(("q", "k", "v", COTANGENT), heads)
            if self.layer == DELTA:
                shapes |= dict.fromkeys(("g", "beta"), heads[:-1])
        else:
            D = self.features
            shapes = {"x": (*tokens, D), COTANGENT: (*tokens, D)}
            names = PROJECTIONS if self.layer == LAYER else ()
            shapes |= {f"{name}.weight": (D, D) for name in names}
            shapes |= {f"{name}.bias": (D,) for name in names}
        kind = jnp.dtype(self.dtype)
        arrays = {name: draw(shape, np.float32) for name, shape in shapes.items()}
        if self.layer == DELTA:
            arrays |= {name: _unit(arrays[name]) for name in ("q", "k")}
            arrays["g"] = -np.float32(0.1) * np.logaddexp(arrays["g"], np.float32(0))
            arrays["beta"] = np.reciprocal(1 + np.exp(-arrays["beta"]))
        return {
            name: (x * len(x) ** -0.5 if name.endswith("weight") else x).astype(kind)
            for name, x in arrays.items()
        }

    def cut(self, whole: int | None = None) -> "Workload":
        """The same on so few weights that all of them can be proven."""
        if self.cells <= (MAX_PROVEN_WEIGHTS if whole is None else whole):
            return self
        heads = min(self.heads, SHORT_HEADS)
        return replace(self, batch=1, heads=heads, length=min(self.length, SHORT_LENGTH))

    def rows(self) -> np.ndarray:
        """The queries that are proven on this very shape: all, or the ends and some between."""
        if self.cells <= MAX_PROVEN_WEIGHTS:
            return np.arange(self.length)
        draw = np.random.default_rng(self.seed).integers
        return np.unique([0, 1, self.length // 2, self.length - 1, *draw(self.length, size=12)])

    def only(self, arrays: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
        """`arrays` with a cotangent that asks for `rows` alone, so that only these matter."""
        cotangent = np.zeros_like(arrays[COTANGENT])
        cotangent[:, rows] = arrays[COTANGENT][:, rows]
        return {**arrays, COTANGENT: cotangent}

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def __str__(self) -> str:
        sizes = f"B {self.batch}, T {self.length}, N {self.heads}, H {self.width}"
        if self.stored:
            kind = "".join(f", {x}" for x in (self.window and self.describe_mask, self.store) if x)
            stored = f", {self.stored} stored" if self.stored < self.length else ""
            heads = f"N {self.heads}, K {self.kv_heads or self.heads}"
            return f"B {self.batch}, {self.length} slots{stored}, {heads}{kind}"
        devices = f", {self.devices} devices" if self.devices else ""
        return f"{sizes}, {self.describe_mask}, {self.dtype}{devices}"


@lru_cache(maxsize=2)  # which takes a second for some million numbers
def _arrays(w: Workload, draw_index: int) -> Mapping[str, np.ndarray]:
    arrays = w.drawn(draw_index)
    for x in arrays.values():
        x.flags.writeable = False
    return arrays


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def platform() -> str:
    """Where JAX computes: "cpu", "gpu" or "tpu"."""
    return jax.devices()[0].platform
