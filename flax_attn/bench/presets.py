"""Presets: what is compared, and within which limits.

A preset reads the options that it takes from the command line, and has values of its own for those
that are not given.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from .._internal.nearest import did_you_mean
from . import attention, book, decode, linear, published, scale, twins
from .attention import Attention
from .book import Book
from .competitor import Competitor
from .decode import Step
from .linear import Recurrence
from .race import Settings
from .scale import Sharded
from .task import BOTH, FORWARD, PASSES, Task, platform
from .twins import Twin

FAST = ("jax.nn", "flax.nnx", "torch", "tokamax")
TIMED = ("against", "rounds", "seconds")
SIZES = ("variant", "seq", "width", "heads", "batch", "dtype", "grad", "no-grad", *TIMED)
ATTENTION = (*SIZES, "causal", "full", "with", "backend")


@dataclass(frozen=True)
class Preset:
    """What a run compares.

    Attributes:
      title: one-sentence description.
      takes: the options that it reads; all others are refused.
      tasks: maps options to the tasks, longest last.
      competitors: maps options to all competitors that there are.
      settings: the limits.
      against: the families compared unless others are named, or None for all; torch.compile takes
        seconds per shape to start.
    """

    title: str
    takes: tuple[str, ...]
    tasks: Callable[[Namespace], list[Task]]
    competitors: Callable[[Namespace], list[Competitor]]
    settings: Settings
    against: tuple[str, ...] | None = None


def chosen(options: Namespace) -> Preset:
    """Returns the preset of the options.

    Raises:
      ValueError: if there is no such preset or variant, or the preset does not take an option.
    """
    if options.preset not in PRESETS:
        raise ValueError(_no_such("preset", options.preset, filter(None, PRESETS)))
    preset, name = PRESETS[options.preset], f"--preset {options.preset}"
    name = name if options.preset else "bench without a preset"
    if options.variant is not None and "variant" in preset.takes:
        names = twins.variants()
        if options.variant not in names:
            raise ValueError(_no_such("variant", options.variant, names))
        preset = PRESETS["book"] if not options.preset else replace(preset, against=None)
        preset, name = replace(preset, takes=SIZES), "--variant"
    for option in _set(options):
        if option not in preset.takes:
            takes = ", ".join(f"--{x}" for x in preset.takes)
            raise ValueError(f"{name} does not take --{option}; it takes {takes}.")
    return preset


def _set(options: Namespace) -> list[str]:
    """Names of the options that choose what is run, as far as they are given."""
    values: Mapping[str, Any] = vars(options)
    names = [name for name in dict.fromkeys((*ATTENTION, "devices")) if values.get(name)]
    return [*names, "no-grad"] if options.grad is False else names


def _no_such(option: str, name: str, known: Iterable[str]) -> str:
    return f"--{option} does not take {name!r}: {did_you_mean(name, known, 'it takes')}"


def _passes(options: Namespace) -> tuple[str, ...]:
    return {None: PASSES, True: (BOTH,), False: (FORWARD,)}[options.grad]


def _one_width(options: Namespace) -> int:
    (width, *more) = options.width or (64,)
    if more:
        raise ValueError(f"--preset {options.preset} takes one width; got {1 + len(more)}.")
    return width


def _sweep(
    seq: Sequence[int],
    shape: Callable[[int, int], tuple[int, int]],
    widths: Sequence[int] = (64,),
    masks: Sequence[str] = ("causal",),
    window: int | None = None,
    layer: bool = False,
    forward: bool = True,
) -> Callable[[Namespace], list[Task]]:
    """Tasks of attention, or of a layer if one is named or asked for, over sizes.

    Args:
      seq, widths, masks, window: the values to sweep.
      shape: maps a length and a width to heads and batch size.
      layer: whether whole layers are compared without being named.
      forward: whether the forward pass is also run alone.
    """

    def tasks(options: Namespace) -> list[Task]:
        whole = layer or options.variant is not None
        only = ("causal",) if options.causal or whole else ("full",) if options.full else masks
        passes = _passes(options) if forward else _passes(options)[-1:]
        extras = getattr(options, "with") or ("plain",)
        kinds = product(options.dtype or ("float32",), only, extras, options.width or widths)
        every: list[Task] = []
        for dtype, mask, extra, width in kinds:
            for length, which in product(options.seq or seq, passes):
                heads, batch = shape(length, width)
                sizes = (length, width, options.heads or heads, options.batch or batch)
                if not whole:
                    keys = window if mask == "window" else None
                    task = Attention(*sizes, dtype, which, mask=mask, extra=extra, window=keys)
                    every.append(task)
                elif options.variant in (None, *book.OWN):
                    every.append(Book(*sizes, dtype, which))
                else:
                    every.append(Twin(*sizes, dtype, which, layer=options.variant))
        return every

    return tasks


def _functions(options: Namespace) -> list[Competitor]:
    """Functions of q, k and v, or layers if one is named."""
    if options.variant is not None:
        return _layers(options)
    known = attention.names_of_backends()
    names = options.backend or ("auto",)
    for name in names:
        if name not in (*known, "all"):
            raise ValueError(_no_such("backend", name, [*known, "all"]))
    names = known if "all" in names else names
    return [*attention.flax_attn_competitors(names), *attention.others()]


def _layers(options: Namespace) -> list[Competitor]:
    if options.variant in (None, *book.OWN):
        return book.competitors(options.variant)
    return twins.competitors(options.variant)


def _steps(options: Namespace) -> list[Task]:
    """Full caches at all lengths; partial, windowed, int8, latent and batched ones at one each."""
    heads, width = options.heads or 12, _one_width(options)
    few = heads // 4 if heads % 4 == 0 else 1
    one = [Step(n, width, heads, stored=n) for n in options.seq or (512, 2048, 8192, 32768)]
    grouped = [replace(task, kv_heads=few) for task in one[1:] or one]
    task = next((task for task in one if task.length == 8192), one[-1])
    shorter = next((task for task in one if task.length == 2048), one[0])
    batches = [replace(shorter, batch=batch) for batch in (8, 64)]
    batches += [replace(x, kv_heads=few) for x in batches]
    others = [
        replace(task, stored=max(1, 1000 * task.length // 8192)),
        replace(task, window=max(2, task.length // 8)),
        replace(task, store="int8"),
        replace(task, kv_heads=few, store="int8"),
        replace(task, store="latent"),
    ]
    return [*one, *grouped, *others, *batches]


def _doubled(first: int, last: int) -> tuple[int, ...]:
    return tuple(first << i for i in range((last // first).bit_length()))


def _published(options: Namespace) -> list[Task]:
    lengths = options.seq or _doubled(512, 4096)
    every = product(published.MODELS, lengths, _passes(options))
    return [published.layer(*each) for each in every]


def _recurrences(options: Namespace) -> list[Task]:
    heads = (options.heads,) if options.heads else (8, 16)
    kinds = product(options.dtype or ("float32",), options.width or (64, 128), heads)
    lengths = options.seq or _doubled(1024, 32768)
    return [
        Recurrence(length, width, count, options.batch or 1, dtype, which)
        for dtype, width, count in kinds
        for length, which in product(lengths, _passes(options))
    ]


def _sharded(options: Namespace) -> list[Task]:
    sizes = _one_width(options), options.heads or 8
    every = product(options.seq or (8192, 32768, 131072), _passes(options))
    return [Sharded(length, *sizes, which=which) for length, which in every]


def devices_of(options: Namespace) -> tuple[int, ...]:
    """Numbers of devices of `--preset scale`; ValueError for one alone, which is always there."""
    devices = options.devices or (2, 4, 8)
    if min(devices) < 2:
        raise ValueError("--devices takes numbers from 2 on; one device is always there.")
    return devices


def _flash_shape(length: int, width: int) -> tuple[int, int]:
    """As in FlashAttention's benchmarks: the same features and tokens at every length."""
    features, tokens = (128, 8192) if platform() == "cpu" else (2048, 16384)
    return max(1, features // width), max(1, tokens // length)


PRESETS = {
    "": Preset(
        "Attention of queries, keys and values",
        ATTENTION,
        _sweep((256, 1024, 2048), lambda length, width: (4, max(1, 2048 // length))),
        _functions,
        Settings(rounds=11, seconds=1.5),
        ("jax.nn", "flax.nnx", "equinox", "torch", "torch.eager", "tokamax"),
    ),
    "flash": Preset(
        "Attention over lengths, head widths and masks, the number of tokens kept",
        ATTENTION,
        _sweep(_doubled(256, 16384), _flash_shape, (64, 128, 256), ("causal", "full")),
        _functions,
        Settings(rounds=11, seconds=3.0, call=2.5),
        FAST,
    ),
    "window": Preset(
        "A sliding window of 256 keys over growing lengths: the time grows as T, not as T x T",
        ATTENTION,
        _sweep(
            _doubled(1024, 32768),
            lambda length, width: (2 if platform() == "cpu" else 16, 1),
            masks=("window",),
            window=256,
        ),
        _functions,
        Settings(rounds=11, seconds=4.0, call=2.0),
        FAST,
    ),
    "memory": Preset(
        "Temporary memory of the compiled program, one head, forward and backward",
        ATTENTION,
        _sweep(_doubled(1024, 65536), lambda length, width: (1, 1), forward=False),
        _functions,
        Settings(timed=False),
        ("jax.nn", "flax.nnx", "equinox", "tokamax"),
    ),
    "book": Preset(
        "Whole layers: nine torch implementations of one function, and those in JAX",
        SIZES,
        _sweep((1024,), lambda length, width: (12, 8), layer=True),
        _layers,
        Settings(rounds=9, seconds=60.0, call=30.0),
    ),
    "decode": Preset(
        "A step of decoding: one token through a whole layer, with a cache of keys and values",
        ("seq", "width", "heads", "no-grad", *TIMED),
        _steps,
        lambda options: decode.competitors(),
        Settings(rounds=25, seconds=4.0, call=float("inf"), sets=1),
        ("flax.nnx", "torch"),
    ),
    "layers": Preset(
        "Layers of published models at their own widths, forward and backward",
        ("seq", "grad", "no-grad", *TIMED),
        _published,
        lambda options: published.competitors(),
        Settings(rounds=7, seconds=40.0, call=60.0, sets=1),
        ("flax.nnx", "torch", "torch.eager"),
    ),
    "linear": Preset(
        "The gated delta rule: chunks, steps, torch's chunked forms, and softmax attention",
        ("seq", "width", "heads", "batch", "dtype", "grad", "no-grad", *TIMED),
        _recurrences,
        lambda options: linear.competitors(),
        Settings(rounds=7, seconds=15.0, call=30.0, sets=1),
        ("torch",),
    ),
    "scale": Preset(
        "Attention over several devices: memory, blocks and bytes, of each device",
        ("seq", "width", "heads", "devices", "grad", "no-grad"),
        _sharded,
        lambda options: scale.competitors(devices_of(options)),
        Settings(timed=False),
        (),
    ),
}
