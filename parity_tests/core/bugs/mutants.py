"""Mutants as bugs: mistakes that a generator makes in the library, drawn by a seed."""

import random
from collections.abc import Sequence
from itertools import islice

from ...mutations import Mutation, mutants
from .bug import ROOT, Bug

LIBRARY = "flax_attn"
MANY = 100  # mutants that a file needs for `files` to draw it


def drawn(file: str, count: int, seed: int) -> list[Bug]:
    """`count` mutants of a file, by its path from the checkout, kinds in turn."""
    source, drawn = (ROOT / file).read_text("utf-8"), random.Random(f"{seed} {file}")
    by_kind: dict[str, list[Mutation]] = {}
    for mutation in mutants(source):
        by_kind.setdefault(mutation.kind, []).append(mutation)
    for known in by_kind.values():
        drawn.shuffle(known)
    turns = range(max(map(len, by_kind.values()), default=0))
    order = [known[i] for i in turns for known in by_kind.values() if i < len(known)]
    return [_bug(file, source, mutation) for mutation in order[:count]]


def _bug(file: str, source: str, mutation: Mutation) -> Bug:
    name = f"{file}:{mutation.line} {mutation.start}-{mutation.end} {mutation.new}"
    return Bug(name, file, f"{mutation}.", file, source, mutation.source)


def files(count: int, seed: int) -> Sequence[str]:
    """Files of the library that have many mutants, drawn by a seed."""
    known = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / LIBRARY).rglob("*.py")))
    many = [
        x for x in known if len(list(islice(mutants((ROOT / x).read_text("utf-8")), MANY))) == MANY
    ]
    return random.Random(seed).sample(many, count)
