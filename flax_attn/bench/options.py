"""Command-line options of `flax-attn bench` and how they are parsed."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from .attention import EXTRAS
from .task import DTYPES

TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
NUMBER = re.compile(r"([1-9]\d*)(k?)", re.IGNORECASE)


def add_to(commands: Any) -> argparse.ArgumentParser:
    """Adds the subcommand `bench`."""
    parser = commands.add_parser(
        "bench",
        help="time attention against others, each proven equal first",
        description="Proves every competitor equal on the very shapes, then times them in turns. "
        "A table says which is faster, by how much (a competitor's time over that of flax_attn) "
        "and how sure that is. Without a preset it ends in about a minute on a small machine. "
        "Ctrl-C keeps what has been measured.",
    )
    add = parser.add_argument
    add("--preset", metavar="NAME", default="", help=PRESETS)
    add("--variant", metavar="NAME", help="a whole layer of this library, as `parity` names it")
    add("--seq", metavar="LENGTHS", type=lengths, help="1k:32k (doubling) or 512,1024")
    add("--width", metavar="WIDTHS", type=_counts, help="of a head: 64,128")
    add("--heads", metavar="N", type=_one_count, help="how many heads")
    add("--devices", metavar="NUMBERS", type=_counts, help="2,4,8; a CPU stands for them")
    add("--batch", metavar="B", type=_one_count, help="how many batch entries")
    add("--dtype", metavar="DTYPES", type=dtypes, help=f"{','.join(DTYPES)}; default float32")
    add(
        "--grad",
        action=argparse.BooleanOptionalAction,
        help="forward and backward alone, or forward alone; both by default",
    )
    masks = parser.add_mutually_exclusive_group()
    masks.add_argument("--causal", action="store_true", help="the causal mask alone")
    masks.add_argument("--full", action="store_true", help="no mask alone")
    add("--with", metavar="NAMES", type=extras, help=f"{','.join(EXTRAS)}; default plain")
    add("--against", metavar="NAMES", type=_names, help="jax.nn,flax.nnx,equinox,torch,... or none")
    add("--backend", metavar="NAMES", type=_names, help='of this library; "auto" or "all"')
    add("--rounds", metavar="N", type=_one_count, help="how often each is timed, at most")
    add("--seconds", metavar="S", type=_seconds, help="how long each race is timed, about")
    _add_outputs(add)
    return parser


PRESETS = "book, decode, flash, layers, linear, memory, scale or window"


def _add_outputs(add: Callable[..., Any]) -> None:
    """Adds the options for what is printed and written."""
    add(
        "--all",
        "--all-figures",
        action="store_true",
        help="print memory, quartiles, rates, errors and the rest too, in lines wider than 80 "
        "columns; files have every figure anyway",
    )
    add("--json", metavar="FILE", help="write every timing as JSON")
    add("--markdown", metavar="FILE", help="write the tables; between their marks, if there")
    add("--png", metavar="FILE", help="plot time, and beside it memory, against the length")
    add("--out", metavar="DIR", help="write all three into a folder")
    add("--together", metavar="FILES", help="JSONs of earlier runs of the same, to show the ranges")
    add("--compare", metavar="FILE", help="print the ratio of an older JSON's times to the new")


def lengths(text: str) -> tuple[int, ...]:
    """Parses lengths from `512,1024` or, doubling, `1k:32k`.

    >>> lengths("1k:8k"), lengths("512,1k,700")
    ((1024, 2048, 4096, 8192), (512, 700, 1024))
    """
    if ":" not in text:
        return tuple(sorted(set(_counts(text))))
    ends = [_number(end) for end in text.split(":")]
    first, last = (ends[0] or 0, ends[1] or 0) if len(ends) == 2 else (0, 0)
    if not 0 < first <= last:
        raise _refused("lengths such as 512,1024 or a range such as 1k:32k", text)
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
            raise _refused(", ".join(DTYPES), name)
    return names


def extras(text: str) -> tuple[str, ...]:
    """Parses the names of the extras used with the mask."""
    for name in _names(text):
        if name not in EXTRAS:
            raise _refused(", ".join(EXTRAS), name)
    return _names(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _number(text: str) -> int | None:
    match = NUMBER.fullmatch(text.strip())
    return int(match[1]) * (1024 if match[2] else 1) if match else None


def _counts(text: str) -> tuple[int, ...]:
    values = [_number(part) for part in text.split(",")]
    numbers = tuple(n for n in values if n is not None)
    if len(numbers) < len(values):
        raise _refused("whole numbers such as 512,1k", text)
    return numbers


def _one_count(text: str) -> int:
    counts = _counts(text)
    if len(counts) != 1:
        raise _refused("one whole number", text)
    return counts[0]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise _refused("a number above 0", text)
    return seconds


def _refused(takes: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"takes {takes}; got {text!r}.")
