"""Maps a checkpoint's tensors to a layer's Params, or reports every problem at once."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx

from .._internal.nearest import listed
from ..errors import CheckpointError
from .described import Source
from .dtypes import DTYPES, holds
from .entry import Entry
from .float8 import unread_format
from .known_layers import flax_path, flax_state, get_path, kind_of, unstacked
from .mapping import Draft, nearest
from .move import Move, Stack
from .rule import Rule
from .suggest import propose

Cast = Literal["exact", "widen", "narrow"]
CASTS = ("exact", "widen", "narrow")
MAX_TENSORS = 10_000  # tensors below one prefix; a layer has a handful
MAX_PREFIXES = 200  # of names that are tried after a layer did not fit
MAX_PROBLEMS = 12  # problems listed in one error
_PLAIN = re.compile(r"[\w./-]+")  # names without the braces, stars and arrows of a rule's syntax


def under(path: object, entries: Mapping[str, Entry], prefix: str) -> dict[str, Entry]:
    """Returns the tensors below a prefix, named without the prefix and its dot.

    Raises:
      CheckpointError: if there are none, or far more than a layer has.
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
    prefix: str = "",
    scaled: Collection[str] = (),
) -> list[Move | Stack]:
    """Returns moves that use every tensor once and fill every Param once, with checked shapes.

    Args:
      path: path of the checkpoint, for errors.
      entries: the layer's tensors, named as in its torch module.
      module: the layer; only its shapes and dtypes are used.
      rules: the part of the mapping that names and types do not determine.
      read: reads a tensor, to compare those that `Rule.tied` names.
      cast: allowed dtype conversions.
      partial: whether Params may stay unfilled.
      prefix: the start of the tensors' names in the checkpoint, for errors.
      scaled: tensors that are read times a scale, so that no `cast` is needed.

    Raises:
      CheckpointError: lists every problem, and proposed rules.
    """
    sources = _sources(entries, module, rules, read)
    draft = Draft(sources, module, rules, partial=partial)
    few = len(draft.unplaced) + len(draft.unfilled) <= 200
    is_expressible = few and all(map(_PLAIN.fullmatch, entries))
    proposed = propose(draft) if draft.problems and is_expressible else []
    problems = [*draft.problems, *_dtype_problems(draft, cast, scaled)]
    if not problems:
        return draft.moves
    if prefixes := _prefixes(entries, module, rules, read):
        others = f" ({len(prefixes) - 1} more prefixes fit)" if len(prefixes) > 1 else ""
        longer = listed([name for name in entries if name.startswith(f"{prefixes[0]}.")], 4)
        why = f"Its tensors do not fit the layer: they have longer names, {longer}."
        whole = ".".join(filter(None, (prefix, prefixes[0])))
        raise CheckpointError(path, None, why, f"Pass prefix={whole!r}{others}.")
    if error := unread_format(path, entries, f"{prefix}." if prefix else ""):
        raise error
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


def _prefixes(
    entries: Mapping[str, Entry],
    module: nnx.Module,
    rules: Sequence[Rule],
    read: Callable[[str], np.ndarray],
) -> list[str]:
    """The starts of names below which every tensor has its place in the layer, first ones first."""
    most = 2 * len(flax_state(module)) + 2  # tensors of a layer, its buffers included
    below: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        parts = name.split(".")
        for i in range(1, len(parts)):
            below.setdefault(".".join(parts[:i]), {})[".".join(parts[i:])] = entry
    few = [(prefix, part) for prefix, part in below.items() if len(part) <= most]

    def fits(prefix: str, part: Mapping[str, Entry]) -> bool:
        sources = _sources(part, module, rules, lambda name: read(f"{prefix}.{name}"))
        return not Draft(sources, module, rules).problems

    return [prefix for prefix, part in few[:MAX_PREFIXES] if fits(prefix, part)]


def _sources(
    entries: Mapping[str, Entry],
    module: nnx.Module,
    rules: Sequence[Rule],
    read: Callable[[str], np.ndarray],
) -> list[Source]:
    """Describes the tensors; a checkpoint has no kinds, so those of the target layers are used."""
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
    """Guesses the kind of an unplaced tensor for proposals: a matrix `weight` is a Linear's."""
    owner, _, role = name.rpartition(".")
    weight = entries.get(f"{owner}.weight" if owner else "weight")
    is_linear = role in ("weight", "bias") and weight is not None and len(weight.shape) == 2
    return "Linear" if is_linear else "Parameter"


def _tied_names(
    entries: Mapping[str, Entry], rules: Sequence[Rule], read: Callable[[str], np.ndarray]
) -> dict[str, str]:
    """Maps each tied name to its first name, if both tensors are bitwise equal."""
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


def _dtype_problems(draft: Draft, cast: Cast, scaled: Collection[str]) -> list[str]:
    """Describes the dtype conversions that `cast` does not allow."""
    problems = []
    for move in draft.moves:
        for target in move.targets:
            want = draft.state[target].get_value().dtype
            for name in move.sources:
                have = DTYPES[draft.sources[name].dtype]
                if not may_become(have, want, "narrow" if name in scaled else cast):
                    mismatch = f"{name} is {have.name} and {target} is {np.dtype(want).name}"
                    problems.append(f"{mismatch}: {_advice(have, want)}.")
    return problems


def may_become(have: np.dtype, want: np.dtype, cast: Cast) -> bool:
    """Whether `cast` allows the conversion of one dtype to another."""
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
