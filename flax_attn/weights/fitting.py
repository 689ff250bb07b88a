"""A checkpoint's tensors onto a layer's Params: the whole mapping, or every problem at once."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..errors import CheckpointError
from .described import Source
from .dtypes import DTYPES, holds
from .entry import Entry
from .known_layers import flax_path, get_path, kind_of, unstacked
from .mapping import Draft, nearest
from .move import Move, Stack
from .rule import Rule
from .suggest import propose

Cast = Literal["exact", "widen", "narrow"]
CASTS = ("exact", "widen", "narrow")
MAX_TENSORS = 10_000  # tensors below one prefix; a layer has a handful
MAX_PROBLEMS = 12  # problems
_PLAIN = re.compile(r"[\w./-]+")  # a rule reads braces, stars and arrows as its own


def under(path: object, entries: Mapping[str, Entry], prefix: str) -> dict[str, Entry]:
    """The tensors whose names begin with a prefix and a dot, named without them.

    Raises:
      CheckpointError: if there is none, or far more than a layer has.
    """
    dot = f"{prefix}." if prefix else ""
    names = [name for name in entries if name.startswith(dot)]
    if not names:
        hint = f"It has {nearest(dot, entries)}."
        raise CheckpointError(path, None, f"No tensor's name begins with {dot!r}.", hint)
    if len(names) > MAX_TENSORS:
        why = f"{len(names)} tensors are too many for a layer."
        raise CheckpointError(path, None, why, "Give the prefix of the layer that is meant.")
    return {name.removeprefix(dot): entries[name] for name in names}


def fit(
    path: object,
    entries: Mapping[str, Entry],
    module: nnx.Module,
    rules: Sequence[Rule],
    read: Callable[[str], np.ndarray],
    cast: Cast,
    partial: bool = False,
) -> list[Move | Stack]:
    """What goes where: every tensor used once, every Param filled once, shapes and dtypes right.

    Args:
      path: of the checkpoint, for errors.
      entries: the layer's tensors, named as in its torch module.
      module: the layer; its shapes and dtypes are looked at.
      rules: what names and types do not say.
      read: reads a tensor, to compare those that `Rule.tied` names.
      cast: which dtypes of a tensor may become which of a Param.
      partial: whether Params may be filled by nothing.

    Raises:
      CheckpointError: with every problem at once, and the rules that may be meant.
    """
    sources = _sources(entries, module, rules, read)
    draft = Draft(sources, module, rules, partial=partial)
    few = len(draft.unplaced) + len(draft.unfilled) <= 200
    is_expressible = few and all(map(_PLAIN.fullmatch, entries))
    proposed = propose(draft) if draft.problems and is_expressible else []
    problems = [*draft.problems, *_dtype_problems(draft, cast)]
    if not problems:
        return draft.moves
    lines = [
        "Its tensors do not fit the layer:",
        *(f"  - {one}" for one in problems[:MAX_PROBLEMS]),
    ]
    more = len(problems) - MAX_PROBLEMS
    lines += [f"  - and {more} problems more"] * (more > 0)
    hint = "".join(["\nyou may mean:"] * bool(proposed) + [f"\n  {rule}" for rule in proposed])
    if draft.unplaced and not proposed and is_expressible:
        hint += f"\nwhat is no weight of the layer is left out by {Rule.skip(draft.unplaced[0])}"
    raise CheckpointError(path, None, "\n".join(lines), hint)


def _sources(
    entries: Mapping[str, Entry],
    module: nnx.Module,
    rules: Sequence[Rule],
    read: Callable[[str], np.ndarray],
) -> list[Source]:
    """The tensors with the kinds of the layers that they go to: a checkpoint does not tell any."""
    targets: dict[str, str] = {}
    for rule in rules:
        if rule.kind == "move" and rule.layout is None:
            for here, to in rule.groups([name for name in entries if name not in targets]):
                targets.setdefault(here[0], to[0])
    tied = _tied_names(entries, rules, read)
    sources = []
    for name, entry in entries.items():
        path, _ = unstacked(module, flax_path(module, targets.get(name, name)))
        owner, _, role = path.rpartition(".")
        layer = get_path(module, owner)
        kind = _likely_kind(name, entries) if layer is None else kind_of(layer, role)
        sources.append(Source(name, kind, entry.shape, entry.dtype, tied.get(name, "")))
    return sources


def _likely_kind(name: str, entries: Mapping[str, Entry]) -> str:
    """What a tensor without a place would be, for proposals: a matrix `weight` is a Linear's."""
    owner, _, role = name.rpartition(".")
    weight = entries.get(f"{owner}.weight" if owner else "weight")
    is_linear = role in ("weight", "bias") and weight is not None and len(weight.shape) == 2
    return "Linear" if is_linear else "Parameter"


def _tied_names(
    entries: Mapping[str, Entry], rules: Sequence[Rule], read: Callable[[str], np.ndarray]
) -> dict[str, str]:
    """The first name of each tensor that a rule ties to it, if the two are the same bits."""
    tied: dict[str, str] = {}
    for rule in rules:
        for (second,), (first,) in rule.groups(list(entries)) if rule.kind == "tied" else ():
            if first not in entries or second == first:
                continue
            one, two = entries[first], entries[second]
            same_type = (one.dtype, one.shape) == (two.dtype, two.shape)
            if same_type and read(first).tobytes() == read(second).tobytes():
                tied[second] = tied.get(first, first)
    return tied


def _dtype_problems(draft: Draft, cast: Cast) -> list[str]:
    """Where a tensor would have to become of another dtype than was asked for."""
    problems = []
    for move in draft.moves:
        for target in move.targets:
            want = draft.state[target].get_value().dtype
            for name in move.sources:
                have = DTYPES[draft.sources[name].dtype]
                if not may_become(have, want, cast):
                    mismatch = f"{name} is {have.name} and {target} is {np.dtype(want).name}"
                    problems.append(f"{mismatch}: {_advice(have, want)}.")
    return problems


def may_become(have: np.dtype, want: np.dtype, cast: Cast) -> bool:
    """Whether values of one dtype may be given in another."""
    if have == want:
        return True
    if cast == "exact" or not _both(jnp.floating, have, want):
        return False
    return cast == "narrow" or holds(want, have)


def _advice(have: np.dtype, want: np.dtype) -> str:
    if not _both(jnp.floating, have, want):
        return "only floating tensors are ever cast"
    word = "widen" if holds(want, have) else "narrow"
    return f'build the layer with param_dtype={have.name}, or say cast="{word}"'


def _both(kind: type, *dtypes: np.dtype) -> bool:
    return all(jnp.issubdtype(dtype, kind) for dtype in dtypes)
