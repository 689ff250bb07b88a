"""Command-line options of `flax-attn bench` and how they are parsed."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .workload import BOTH, DTYPES, EXTRAS, FORWARD, PASSES

TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
NUMBER = re.compile(r"([1-9]\d*)(k?)", re.IGNORECASE)


def add_to(commands: Any) -> argparse.ArgumentParser:
    """Adds the subcommand `bench`."""
    parser = commands.add_parser(
        "bench",
        help="time attention against others, each proven equal first",
        description="Proves every competitor equal on the very shapes, then times them in turns. "
        "The ratios come first: a competitor's time over that of flax_attn; * marks the fastest. "
        "Without a preset it ends in about a minute on a small machine. Ctrl-C keeps what has been "
        "measured.",
    )
    add = parser.add_argument
    add(
        "--preset",
        metavar="NAME",
        help="book, decode, flash, layers, linear, memory, scale or window",
    )
    add("--variant", metavar="NAME", help="a whole layer of this library, as `parity` names it")
    add("--seq", metavar="LENGTHS", help="1k:32k (doubling) or 512,1024")
    add("--width", metavar="WIDTHS", help="of a head: 64,128")
    add("--heads", metavar="N", help="how many heads")
    add("--devices", metavar="NUMBERS", help="of --preset scale: 2,4,8; a CPU stands for them")
    add("--batch", metavar="B", help="how many batch entries")
    add("--dtype", metavar="DTYPES", help=f"{','.join(DTYPES)}; default float32")
    add(
        "--grad",
        action=argparse.BooleanOptionalAction,
        help="forward and backward alone, or forward alone; both by default",
    )
    masks = parser.add_mutually_exclusive_group()
    masks.add_argument("--causal", action="store_true", help="the causal mask alone")
    masks.add_argument("--full", action="store_true", help="no mask alone")
    add("--with", metavar="NAMES", help=f"{','.join(EXTRAS)}, each apart; default plain")
    add("--against", metavar="NAMES", help="competitors: jax.nn,flax.nnx,equinox,torch,... or none")
    add("--backend", metavar="NAMES", help='of this library: names, "auto" (default) or "all"')
    add("--rounds", metavar="N", help="how often each is timed, at most")
    add("--seconds", metavar="S", help="how long each row of competitors is timed, about")
    _add_outputs(add)
    return parser


def _add_outputs(add: Callable[..., Any]) -> None:
    """Adds the options for what is printed and written."""
    add(
        "--all-figures",
        action="store_true",
        help="print quartiles, rates, memory, errors and the rest too, in tables wider than 80 "
        "columns; files have every figure anyway",
    )
    add("--json", metavar="FILE", help="write every timing as JSON")
    add("--markdown", metavar="FILE", help="write the tables; between their marks, if there")
    add("--png", metavar="FILE", help="plot time, and beside it memory, against the length")
    add("--out", metavar="DIR", help="write all three into a folder")
    add("--together", metavar="FILES", help="JSONs of earlier runs of the same, to show the ranges")
    add("--compare", metavar="FILE", help="print the ratio of an older JSON's times to the new")


@dataclass(frozen=True)
class BenchOptions:
    """Parsed options, checked as far as possible without knowing the competitors."""

    preset: str = ""
    variant: str | None = None
    lengths: tuple[int, ...] | None = None
    widths: tuple[int, ...] | None = None
    heads: int | None = None
    devices: tuple[int, ...] | None = None
    batch: int | None = None
    dtypes: tuple[str, ...] = ("float32",)
    passes: tuple[str, ...] = PASSES
    masks: tuple[str, ...] | None = None
    extras: tuple[str, ...] = ("plain",)
    against: tuple[str, ...] | None = None
    backends: tuple[str, ...] = ("auto",)
    rounds: int | None = None
    seconds: float | None = None


def read_options(options: argparse.Namespace) -> BenchOptions:
    """Parses the options' values.

    Raises:
      ValueError: if a value cannot be parsed.
    """
    passes = {None: PASSES, True: (BOTH,), False: (FORWARD,)}[options.grad]
    masks = ("causal",) if options.causal else ("full",) if options.full else None
    return BenchOptions(
        preset=options.preset or "",
        variant=options.variant,
        lengths=None if options.seq is None else lengths(options.seq),
        widths=None if options.width is None else _counts("--width", options.width),
        heads=None if options.heads is None else _one_count("--heads", options.heads),
        devices=None if options.devices is None else _counts("--devices", options.devices),
        batch=None if options.batch is None else _one_count("--batch", options.batch),
        dtypes=("float32",) if options.dtype is None else dtypes(options.dtype),
        passes=passes,
        masks=masks,
        extras=extras(getattr(options, "with") or "plain"),
        against=None if options.against is None else _names(options.against),
        backends=("auto",) if options.backend is None else _names(options.backend),
        rounds=None if options.rounds is None else _one_count("--rounds", options.rounds),
        seconds=None if options.seconds is None else _seconds(options.seconds),
    )


def lengths(text: str) -> tuple[int, ...]:
    """Parses lengths from `512,1024` or, doubling, `1k:32k`.

    >>> lengths("1k:8k"), lengths("512,1k,700")
    ((1024, 2048, 4096, 8192), (512, 700, 1024))
    """
    if ":" not in text:
        return tuple(sorted(set(_counts("--seq", text))))
    ends = [_number(end) for end in text.split(":")]
    first, last = (ends[0] or 0, ends[1] or 0) if len(ends) == 2 else (0, 0)
    if not 0 < first <= last:
        raise ValueError(
            f"--seq takes lengths such as 512,1024 or a range such as 1k:32k; got {text!r}."
        )
    sizes = []
    while first <= last:
        sizes.append(first)
        first *= 2
    return tuple(sizes)


def dtypes(text: str) -> tuple[str, ...]:
    """Parses dtype names, including short ones such as `bf16`."""
    names = tuple(TYPES.get(name, name) for name in _names(text))
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"--dtype takes {', '.join(DTYPES)}; got {name!r}.")
    return names


def extras(text: str) -> tuple[str, ...]:
    """Parses the names of the extras used with the mask."""
    for name in _names(text):
        if name not in EXTRAS:
            raise ValueError(f"--with takes {', '.join(EXTRAS)}; got {name!r}.")
    return _names(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _number(text: str) -> int | None:
    match = NUMBER.fullmatch(text.strip())
    return int(match[1]) * (1024 if match[2] else 1) if match else None


def _counts(option: str, text: str) -> tuple[int, ...]:
    values = [_number(part) for part in text.split(",")]
    numbers = tuple(n for n in values if n is not None)
    if len(numbers) < len(values):
        raise ValueError(f"{option} takes whole numbers such as 512,1k; got {text!r}.")
    return numbers


def _one_count(option: str, text: str) -> int:
    counts = _counts(option, text)
    if len(counts) != 1:
        raise ValueError(f"{option} takes one whole number; got {text!r}.")
    return counts[0]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--seconds takes a number above 0; got {text!r}.")
    return seconds
