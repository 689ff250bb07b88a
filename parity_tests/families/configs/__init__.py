"""Two small configs of each family, in both spellings, with all sizes different."""

from typing import Any

from . import (
    decoders,
    encoders,
    hybrids,
    images,
    latents,
    likenesses,
    more_texts,
    older,
    partly,
    texts,
    towers,
)
from .small import Small as Small

WORDS = (decoders, likenesses, older, partly, latents, texts, more_texts, hybrids)
KINDS = (*WORDS, encoders, towers, images)
CONFIGS = [small for kind in KINDS for small in kind.CONFIGS]
NAMES = tuple(dict.fromkeys(small.name for small in CONFIGS))
BOTH = [(small, spelling) for small in CONFIGS for spelling in ("new", "old")]


def place(small: Small) -> int:
    """Which config of its family it is, from 0."""
    return [x for x in CONFIGS if x.name == small.name].index(small)


def titled(value: Any) -> str | None:
    """The id of a parameter of a test."""
    return f"{value.name}-{place(value)}" if isinstance(value, Small) else None
