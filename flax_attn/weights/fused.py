"""Fused projections: which names are query, key and value, and the possible layouts.

A fused weight stores query, key and value one after another, `[3, heads, width]`, or head by head,
`[heads, 3, width]`. Shapes do not determine which, so `suggest` proposes both if both fit.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import gcd, prod

from flax import nnx

from .described import head_counts
from .einops_layout import Size, axis_groups, sizes_of
from .known_layers import get_path

# Layouts to try, the likeliest first, by whether torch's weights have outputs or inputs first.
# h heads have k rows each, and k may be of unequal size per part; g groups have h heads per part.
SPLIT = {
    "out first": ("(n o) i -> n i o", "(n h k) i -> n i h k", "(n o) i -> n o i"),
    "in first": ("i (n o) -> n i o", "i (n h k) -> n i h k"),
    "either": ("(n o) -> n o", "(n h k) -> n h k"),
}
SPLIT_BY_HEADS = {
    "out first": (
        "(h n k) i -> n i h k",
        "(h n k) i -> n i (h k)",
        "(g n h k) i -> n i (g h) k",
        "(h n k) i -> n (h k) i",
    ),
    "in first": ("i (h n k) -> n i h k", "i (h n k) -> n i (h k)", "i (g n h k) -> n i (g h) k"),
    "either": ("(h n k) -> n h k", "(h n k) -> n (h k)", "(g n h k) -> n (g h) k"),
}
JOIN = {
    "out first": ("n o i -> i (n o)", "n o i -> n i o", "n o i -> (n o) i"),
    "in first": ("n i o -> i (n o)", "n i o -> n i o"),
    "either": ("n o -> (n o)", "n o -> n o"),
}
JOIN_BY_HEADS = {
    "out first": ("n (h k) i -> i (h n k)", "n (h k) i -> (h n k) i"),
    "in first": ("n i (h k) -> i (h n k)",),
    "either": ("n (h k) -> (h n k)",),
}
ROLES = ("q", "k", "v", "qk", "kv", "qkv")
_WORDS = {"query": "q", "queries": "q", "key": "k", "keys": "k"}
_WORDS |= {"value": "v", "values": "v", "val": "v"}
_LETTERS = re.compile(r"(w?)(q|k|v|qk|kv|qkv)(w|s|proj|lin|net)?")
_RUN = re.compile(r"(?:query|key|value)+")


def role(piece: str) -> str:
    """Returns the role that a component of a name indicates: "q", "kv", "qkv", ... or "".

    >>> [role(name) for name in ("W_query", "k_proj", "toV", "query_key_value", "Wqkv", "dense")]
    ['q', 'k', 'v', 'qkv', 'qkv', '']
    """
    return _role_and_rest(piece)[0]


def _role_and_rest(piece: str) -> tuple[str, str]:
    """Returns the role, and the rest of the name: `*_proj` for `q_proj`."""
    role_letters, rest = "", []
    for word in re.findall(r"[a-z]+|\d+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", piece).lower()):
        letters = _LETTERS.fullmatch(word)
        word_role = _WORDS.get(word, letters[2] if letters else "")
        if _RUN.fullmatch(word):
            word_role = "".join(part[0] for part in re.findall("query|key|value", word))
        around = letters.group(1, 3) if letters and word not in _WORDS else ("", "")
        rest.append(f"{around[0]}*{around[1] or ''}" if word_role else word)
        role_letters += word_role
    whole = re.sub(r"\*(_\*)+", "*", "_".join(rest))
    return (role_letters, whole) if role_letters in ROLES else ("", piece)


class Roles:
    """Query, key and value roles of names.

    The last component of a name that indicates a role sets it; it counts only if another name under
    the same owner has a different role.
    """

    def __init__(self, names: Sequence[str]):
        self._roles: dict[str, str] = {}
        neighbours: dict[str, set[str]] = {}
        owners: dict[str, str] = {}
        for name in names:
            owners[name], self._roles[name] = _last_role(name)
            neighbours.setdefault(owners[name], set()).add(self._roles[name])
        self._alone = {n for n in names if len(neighbours[owners[n]] - {""}) < 2}

    def may_meet(self, name: str, others: "Roles", other: str) -> bool:
        """Whether a name may map to one of the other side: a key maps to no query and no gate."""
        own_role, torch_role = self._roles[name], others._roles[other]
        conflict = (own_role and name not in self._alone) or (
            torch_role and other not in others._alone
        )
        return own_role == torch_role or not conflict

    def is_part(self, name: str) -> bool:
        """Whether a name is a single one of query, key and value."""
        return len(self._roles[name]) == 1 and name not in self._alone

    def whole(self, name: str) -> str:
        """Returns the parts that a fused name indicates; "" if none."""
        return self._roles[name] if len(self._roles[name]) > 1 else ""


def _last_role(name: str) -> tuple[str, str]:
    pieces = name.split(".")
    for i in reversed(range(len(pieces))):
        if letters := role(pieces[i]):
            return ".".join(pieces[:i]), letters
    return ".".join(pieces[:-1]), ""


def in_order(pieces: Sequence[str], whole: str) -> Iterator[list[int]]:
    """Yields the indices of query, key and value, in this order, among names of parts.

    Args:
      pieces: the components in which the names differ.
      whole: the parts that the fused name indicates, "" if none.

    >>> list(in_order(["dense", "v_proj", "k_proj", "q_proj", "q_norm", "k_norm"], "qkv"))
    [[3, 2, 1]]
    """
    roles = [_role_and_rest(piece) for piece in pieces]
    played = [i for i, (word_role, _) in enumerate(roles) if word_role]
    same_rest = [
        [i for i in played if roles[i][1] == rest] for rest in {roles[i][1]: 0 for i in played}
    ]
    for letters in (whole,) if whole else ("qkv", "kv"):
        for group in (*same_rest, played):  # names with equal rest (k_proj, v_proj) first, then any
            chosen = [i for i in group if roles[i][0] in letters and roles[i][0] != letters]
            chosen.sort(key=lambda i: letters.index(roles[i][0]))
            if "".join(roles[i][0] for i in chosen) == letters:
                yield chosen
                break


def fits(
    torch_shapes: Sequence[tuple[int, ...]],
    flax_shapes: Sequence[tuple[int, ...]],
    way: str,
    by_heads: bool,
    heads: Sequence[int],
) -> Iterator[tuple[str, dict[str, Size]]]:
    """Yields layouts from torch's shapes to Flax's, one of them several, with the axis sizes.

    Args:
      torch_shapes, flax_shapes: shapes of a rule's sources and targets.
      way: "out first" or "in first", the axis order of torch's weight.
      by_heads: whether the parts are stored head by head, or one after another.
      heads: candidate head counts.
    """
    if len(flax_shapes) > 1:
        known = SPLIT_BY_HEADS if by_heads else SPLIT
    else:
        known = JOIN_BY_HEADS if by_heads else JOIN
    for layout in (*known[way], *known["either"]):
        sizes = _solved(layout, torch_shapes, flax_shapes, heads)
        if sizes is not None:
            yield layout, _needed(layout, torch_shapes, len(flax_shapes), sizes)


def _solved(
    layout: str,
    torch_shapes: Sequence[tuple[int, ...]],
    flax_shapes: Sequence[tuple[int, ...]],
    heads: Sequence[int],
) -> dict[str, Size] | None:
    """Returns all axis sizes, a tuple where parts differ; None if the layout does not fit."""
    sides = [
        [re.findall(r"\w+", group) for group in axis_groups(side)] for side in layout.split("->")
    ]
    parts, whole = (
        (flax_shapes, torch_shapes[0]) if len(flax_shapes) > 1 else (torch_shapes, flax_shapes[0])
    )
    part, whole_shapes = (sides[1], sides[0]) if parts is flax_shapes else sides
    part = part[1:]  # without the braces' axis
    if len(whole_shapes) != len(whole) or any(len(part) != len(shape) for shape in parts):
        return None
    if any("g" in names for names in part):
        at = next(i for i, names in enumerate(part) if "g" in names)
        heads = (*heads, gcd(*(shape[at] for shape in parts)))
    for count in heads if any(len(names) > 1 for names in part) else (0,):
        each = [_axis_sizes(part, shape, count) for shape in parts]
        if None in each:
            continue
        sizes = {name: tuple(x[name] for x in each if x) for name in each[0] or ()}
        plain: dict[str, Size] = {k: v if len({*v}) > 1 else v[0] for k, v in sizes.items()}
        if _holds(whole_shapes, whole, plain, len(parts)) and not _one_head(whole_shapes, plain):
            return plain
    return None


def _axis_sizes(part: list[list[str]], shape: tuple[int, ...], count: int) -> dict[str, int] | None:
    """Returns the axis sizes of a part; the first of two axes in a bracket has size `count`."""
    sizes: dict[str, int] = {}
    for (first, *rest), size in zip(part, shape, strict=True):
        if rest and (count < 2 or size % count):
            return None
        sizes |= {first: count, rest[0]: size // count} if rest else {first: size}
    return sizes


def _one_head(groups: list[list[str]], sizes: Mapping[str, Size]) -> bool:
    """Whether there is a single head, so that the parts are stored one after another."""
    leads = (names[0] for names in groups if "n" in names and names[0] != "n")
    return any(sizes[name] == 1 for name in leads)


def _holds(
    groups: list[list[str]], shape: tuple[int, ...], sizes: Mapping[str, Size], parts: int
) -> bool:
    """Whether the parts together have this shape; unequal sizes must follow the braces' axis."""
    unequal = [name for name, size in sizes.items() if isinstance(size, tuple)]
    if len(unequal) > 1:
        return False
    if unequal and not any(["n", *unequal] == names[i : i + 2] for names in groups for i in (0, 1)):
        return False
    wide = {k: sum(v) if isinstance(v, tuple) else v for k, v in sizes.items()}
    wide["n"] = 1 if unequal else parts
    return all(prod(wide[x] for x in names) == n for names, n in zip(groups, shape, strict=True))


def _needed(
    layout: str, torch_shapes: Sequence[tuple[int, ...]], parts: int, sizes: Mapping[str, Size]
) -> dict[str, Size]:
    """Returns the sizes that a rule must specify: unequal parts, and undetermined axes."""
    rule_sizes: dict[str, Size] = {k: v for k, v in sizes.items() if isinstance(v, tuple)}
    for name in ("", *(name for name in ("g", "h", "k", "o") if name in sizes)):
        rule_sizes |= {name: sizes[name]} if name else {}
        try:
            all_sizes = sizes_of(layout, torch_shapes, parts, rule_sizes)
        except ValueError:
            continue
        if all(all_sizes.get(name) == size for name, size in sizes.items()):
            break
    return rule_sizes


def heads_of(module: nnx.Module, path: str) -> list[int]:
    """Returns the head counts of the Flax module at a path, and of the modules that contain it."""
    pieces = path.split(".")
    owners = (get_path(module, ".".join(pieces[:i])) for i in reversed(range(len(pieces))))
    return list(dict.fromkeys(n for owner in owners for n in head_counts(owner)))
