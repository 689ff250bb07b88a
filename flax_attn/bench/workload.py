"""Workload: sizes, mask and dtype shared by all competitors, with its inputs and costs."""

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
# Above this many attention weights, some rows and a smaller workload are verified instead.
MAX_PROVEN_WEIGHTS = 2**25
SHORT_LENGTH, SHORT_HEADS = 1024, 2
COTANGENT = "cotangent"
LAYER = "multi_head"  # the layer whose implementations are compared
DELTA = "gated delta rule"  # the recurrence whose forms are compared
GATED = ("q", "k", "v", "g", "beta")  # its inputs
PROJECTIONS = ("query", "key", "value", "out")


@dataclass(frozen=True)
class Workload:
    """Sizes, mask and dtype of one attention, or of one layer of width `heads * width`.

    Attributes:
      length: T and S.
      width: H and h, the width of one head.
      heads: N.
      batch: B.
      dtype: of inputs and weights.
      mask: "causal", "full" or "window", which is causal too.
      extra: "softcap", logits capped at 50; "sinks", one per head from -1 to 1; else "plain".
      window: number of visible keys per query of a window, including its own.
      layer: None for attention of q, k and v; `DELTA`; for a whole layer, `LAYER` or another name.
      stored: for a decoding step, number of tokens in the longest row including the new one, in a
        cache of `length` slots; 0 for no step. Row b of B has a share of (b + 1) / B.
      kv_heads: K of a decoding step, 0 for N.
      model_width: D of a published layer, 0 for `heads * width`.
      store: of a decoding step, "int8", or "latent" for keys and values from one latent; else "".
      devices: number of devices the length is sharded over; 0 outside `--preset scale`.
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
        """The `mask` argument of `attend`."""
        if self.window is not None:
            return Window(self.window - 1, 0)
        return CAUSAL if self.mask == "causal" else FULL

    @property
    def options(self) -> dict[str, Any]:
        """The other keyword arguments of `attend`."""
        if self.extra == "softcap":
            return {"score": Softcap(50.0)}
        return {"sinks": jnp.linspace(-1.0, 1.0, self.heads)} if self.extra == "sinks" else {}

    @property
    def describe_mask(self) -> str:
        """Describes the mask and the extra in words."""
        mask = self.mask if self.window is None else f"window {self.window}"
        return mask if self.extra == "plain" else f"{mask}, {self.extra}"

    @property
    def pairs(self) -> int:
        """Number of visible query-key pairs per head."""
        if self.mask == "full":
            return self.length**2
        keys = min(self.length, self.window or self.length)
        return keys * (keys + 1) // 2 + (self.length - keys) * keys

    @property
    def cells(self) -> int:
        """Number of query-key pairs over all heads and batch entries, including masked ones."""
        return self.batch * self.heads * self.length**2

    @property
    def features(self) -> int:
        """The model width D of a layer."""
        return self.model_width or self.heads * self.width

    def flops(self, which: str) -> int:
        """FLOPs: `2 B N pairs (H + h)`; backward adds 2.5 times that, and 2 for projections."""
        if self.layer not in (None, LAYER):
            return 0  # FLOPs of other layers are not counted
        attention = 2 * self.batch * self.heads * self.pairs * 2 * self.width
        tokens = self.batch * self.length
        projections = 4 * 2 * tokens * self.features**2 if self.layer else 0
        if which == FORWARD:
            return attention + projections
        return attention * 7 // 2 + projections * 3

    def bytes(self, which: str) -> int:
        """Minimum bytes moved: q, k, v, o; backward adds these and as many gradients."""
        tensor = self.batch * self.length * self.features * jnp.dtype(self.dtype).itemsize
        return tensor * (4 if which == FORWARD else 12)

    def arrays(self, draw_index: int = 0) -> dict[str, np.ndarray]:
        """Normal inputs, layer weights and a cotangent by name, rounded to the dtype.

        Read-only, since all competitors share them.
        """
        return dict(_arrays(self, draw_index))

    def drawn(self, draw_index: int) -> dict[str, np.ndarray]:
        """Draws the arrays of `arrays` without caching."""
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
        """Returns a workload with few enough attention weights to verify all of them."""
        if self.cells <= (MAX_PROVEN_WEIGHTS if whole is None else whole):
            return self
        heads = min(self.heads, SHORT_HEADS)
        return replace(self, batch=1, heads=heads, length=min(self.length, SHORT_LENGTH))

    def rows(self) -> np.ndarray:
        """Query indices verified at this shape: all, or the ends and some between."""
        if self.cells <= MAX_PROVEN_WEIGHTS:
            return np.arange(self.length)
        draw = np.random.default_rng(self.seed).integers
        return np.unique([0, 1, self.length // 2, self.length - 1, *draw(self.length, size=12)])

    def only(self, arrays: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
        """`arrays` with the cotangent zeroed outside `rows`, so that only these matter."""
        cotangent = np.zeros_like(arrays[COTANGENT])
        cotangent[:, rows] = arrays[COTANGENT][:, rows]
        return {**arrays, COTANGENT: cotangent}

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain values."""
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


@lru_cache(maxsize=2)  # drawing some million numbers takes a second
def _arrays(w: Workload, draw_index: int) -> Mapping[str, np.ndarray]:
    arrays = w.drawn(draw_index)
    for x in arrays.values():
        x.flags.writeable = False
    return arrays


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def platform() -> str:
    """The platform that JAX uses: "cpu", "gpu" or "tpu"."""
    return jax.devices()[0].platform
