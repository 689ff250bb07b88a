"""Presets: workloads, competitors and limits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from . import published, scale
from .settings import Settings
from .workload import DELTA, LAYER, Workload, platform

FAST = ("jax.nn", "flax.nnx", "torch", "tokamax")


@dataclass(frozen=True)
class Preset:
    """A named set of workloads.

    Attributes:
      title: one-sentence description.
      lengths, widths, masks: values to sweep.
      shape: maps a length and a width to heads and batch size.
      against: the competitors, or None for all; torch.compile takes seconds per shape to start.
      settings: the limits.
      forward: whether the forward pass is also run alone.
      window, layer: as in `Workload`.
      steps: maps lengths, heads and width to workloads, for decoding steps.
      models: maps lengths to workloads, for layers of published models.
      heads: numbers of heads to sweep, in place of the one from `shape`.
      devices: numbers of devices to shard the length over.
    """

    title: str
    lengths: tuple[int, ...]
    widths: tuple[int, ...]
    masks: tuple[str, ...]
    shape: Callable[[int, int], tuple[int, int]]
    settings: Settings
    against: tuple[str, ...] | None = None
    forward: bool = True
    window: int | None = None
    layer: str | None = None
    steps: Callable[[Sequence[int], int, int], list[Workload]] | None = None
    models: Callable[[Sequence[int]], list[Workload]] | None = None
    heads: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()

    def workloads(
        self,
        lengths: Sequence[int] | None = None,
        widths: Sequence[int] | None = None,
        masks: Sequence[str] | None = None,
        dtypes: Sequence[str] = ("float32",),
        heads: int | None = None,
        batch: int | None = None,
        extras: Sequence[str] = ("plain",),
    ) -> list[Workload]:
        """Returns the workloads, longest last; arguments override the preset's values."""
        if self.models is not None:
            return self.models(lengths or self.lengths)
        if self.devices:
            width = (widths or self.widths)[0]
            heads = heads or self.shape(0, width)[0]
            return scale.workloads(lengths or self.lengths, heads, width, self.devices)
        if self.steps is not None:
            width = (widths or self.widths)[0]
            return self.steps(lengths or self.lengths, heads or self.shape(0, width)[0], width)
        workloads = []
        counts = (heads,) if heads else self.heads or (None,)
        kinds = product(dtypes, masks or self.masks, extras, widths or self.widths, counts)
        for dtype, mask, extra, width, count in kinds:
            for length in lengths or self.lengths:
                shape = self.shape(length, width)
                work = Workload(
                    length, width, count or shape[0], batch or shape[1], dtype, mask, extra
                )
                workloads.append(replace(work, window=self.window, layer=self.layer))
        return workloads


def presets() -> dict[str, Preset]:
    """Returns all presets, sized for the platform that JAX uses; "" is the default one."""
    small = platform() == "cpu"
    return {
        "": SHORT,
        "flash": _flash(*((128, 8192) if small else (2048, 16384))),
        "window": _window(2 if small else 16),
        "memory": MEMORY,
        "book": BOOK,
        "decode": DECODE,
        "layers": LAYERS,
        "linear": LINEAR,
        "scale": SCALE,
    }


def _flash(features: int, tokens: int) -> Preset:
    """As in FlashAttention's benchmarks: the same features and tokens at every length."""
    return Preset(
        "Attention over lengths, head widths and masks, the number of tokens kept",
        lengths=(256, 512, 1024, 2048, 4096, 8192, 16384),
        widths=(64, 128, 256),
        masks=("causal", "full"),
        shape=lambda length, width: (max(1, features // width), max(1, tokens // length)),
        settings=Settings(rounds=11, seconds=3.0, call=2.5),
        against=FAST,
    )


def _window(heads: int) -> Preset:
    return Preset(
        "A sliding window of 256 keys over growing lengths: the time grows as T, not as T x T",
        lengths=(1024, 2048, 4096, 8192, 16384, 32768),
        widths=(64,),
        masks=("window",),
        shape=lambda length, width: (heads, 1),
        settings=Settings(rounds=11, seconds=4.0, call=2.0),
        against=FAST,
        window=256,
    )


def _steps(lengths: Sequence[int], heads: int, width: int) -> list[Workload]:
    """Full caches at all lengths; partial, windowed, int8, latent and batched ones at one each."""
    few = heads // 4 if heads % 4 == 0 else 1
    one = [Workload(n, width, heads, stored=n) for n in lengths]
    grouped = [replace(w, kv_heads=few) for w in one[1:] or one]
    w = next((w for w in one if w.length == 8192), one[-1])
    shorter = next((w for w in one if w.length == 2048), one[0])
    batches = [replace(shorter, batch=batch) for batch in (8, 64)]
    batches += [replace(x, kv_heads=few) for x in batches]
    others = [
        replace(w, stored=max(1, 1000 * w.length // 8192)),
        replace(w, window=max(2, w.length // 8), mask="window"),
        replace(w, store="int8"),
        replace(w, kv_heads=few, store="int8"),
        replace(w, store="latent"),
    ]
    return [*one, *grouped, *others, *batches]


SHORT = Preset(
    "Attention of queries, keys and values",
    lengths=(256, 1024, 2048),
    widths=(64,),
    masks=("causal",),
    shape=lambda length, width: (4, max(1, 2048 // length)),
    settings=Settings(rounds=11, seconds=1.5),
    against=("jax.nn", "flax.nnx", "equinox", "torch", "torch.eager", "tokamax"),
)
MEMORY = Preset(
    "Temporary memory of the compiled program, one head, forward and backward",
    lengths=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
    widths=(64,),
    masks=("causal",),
    shape=lambda length, width: (1, 1),
    settings=Settings(timed=False),
    against=("jax.nn", "flax.nnx", "equinox", "tokamax"),
    forward=False,
)
BOOK = Preset(
    "Whole layers: nine torch implementations of one function, and those in JAX",
    lengths=(1024,),
    widths=(64,),
    masks=("causal",),
    shape=lambda length, width: (12, 8),
    settings=Settings(rounds=9, seconds=60.0, call=30.0),
    layer=LAYER,
)
DECODE = Preset(
    "A step of decoding: one token through a whole layer, with a cache of keys and values",
    lengths=(512, 2048, 8192, 32768),
    widths=(64,),
    masks=("causal",),
    shape=lambda length, width: (12, 1),
    settings=Settings(rounds=25, seconds=4.0, call=float("inf"), sets=1),
    against=("flax.nnx", "torch"),
    steps=_steps,
)
LAYERS = Preset(
    "Layers of published models at their own widths, forward and backward",
    lengths=(512, 1024, 2048, 4096),
    widths=(64,),
    masks=("causal",),
    shape=lambda length, width: (1, 1),
    settings=Settings(rounds=7, seconds=40.0, call=60.0, sets=1),
    against=("flax.nnx", "torch", "torch.eager"),
    models=published.workloads,
)
LINEAR = Preset(
    "The gated delta rule: chunks, steps, torch's chunked forms, and softmax attention beside them",
    lengths=(1024, 2048, 4096, 8192, 16384, 32768),
    widths=(64, 128),
    masks=("causal",),
    shape=lambda length, width: (8, 1),
    settings=Settings(rounds=7, seconds=15.0, call=30.0, sets=1),
    against=("torch",),
    layer=DELTA,
    heads=(8, 16),
)
SCALE = Preset(
    "Attention over several devices: memory, blocks and bytes, of each device",
    lengths=(8192, 32768, 131072),
    widths=(64,),
    masks=("causal",),
    shape=lambda length, width: (8, 1),
    settings=Settings(timed=False),
    against=(),
    devices=(2, 4, 8),
)
