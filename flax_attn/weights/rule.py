"""Rules: each maps torch's names and layout to Flax's, and is reversible."""

import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import product
from typing import Literal, cast

import numpy as np

from ..errors import ParityError
from .einops_layout import Size, axes_of

_BRACES = re.compile(r"\{([^{}]*)\}")
_TOKEN = re.compile(r"[()]|~?(?:\.\.\.|[^\W\d_]\w*|\b1\b)")


@dataclass(frozen=True, init=False)
class Rule:
    """`"torch names -> flax names"` and, if the values change, an einops layout.

    Names may contain `*` (anything without a dot, equally many on each side) and one `{a,b,c}` per
    side: its arrays are stacked on, or split from, the layout's first axis. A name may also be that
    of a module: all its values are moved, each by its type. Without a layout, values of known pairs
    of types are converted accordingly, others are copied unchanged, and braces on both sides expand
    to one rule each: `"attn.{q,k} -> {query,key}"`. If Flax stacks layers, as created by
    `nnx.vmap`, a rule still names each layer by its number: `"h.*.fc -> layers.*.up"`.

    A layout is reversible: every axis occurs once on each side. `...` matches any number of axes;
    `~axis`, on one side only, reverses the order along an axis.

    The arrays of braces may differ in size along one axis, whose sizes are then a tuple. In the
    layout of the single array, that axis directly follows the braces' axis in parentheses: `(n o)`.
    Axes before the two repeat them; axes after them are the unit of the sizes.

    Args:
      names: torch's names, an arrow, Flax's names.
      layout: an einops pattern such as `"o i -> i o"`; it must be reversible.
      sizes: axis sizes that the shapes do not determine, such as `h=12`, and the sizes of unequal
        parts, such as `o=(24, 8, 8)`.

    Raises:
      ParityError: if the rule cannot be parsed.

    >>> Rule("{q,k,v}.weight -> qkv.kernel", "n o i -> i (n o)").names
    '{q,k,v}.weight -> qkv.kernel'
    >>> print(Rule("h.*.c_attn.weight -> blocks.*.{q,k,v}.kernel", "d (n h k) -> n d h k", h=4))
    Rule("h.*.c_attn.weight -> blocks.*.{q,k,v}.kernel", "d (n h k) -> n d h k", h=4)

    Grouped-query attention with a fused projection, 24 rows for the query and 8 each for key and
    value; Falcon's, where each of k groups has 3 query heads, a key and a value, of 4 rows each;
    and DeepSeek's `kv_b_proj`, where each head has 6 rows for the key and 5 for the value:

    >>> print(Rule("qkv.weight -> {q,k,v}.kernel", "(n o) i -> n i o", o=(24, 8, 8)))
    Rule("qkv.weight -> {q,k,v}.kernel", "(n o) i -> n i o", o=(24, 8, 8))
    >>> names = "query_key_value.weight -> {q,k,v}.kernel"
    >>> falcon = Rule(names, "(k n o h) i -> n i (k o h)", o=(3, 1, 1), h=4)
    >>> latent = Rule("kv_b_proj.weight -> {k,v}.kernel", "(h n o) i -> n i (h o)", o=(6, 5))
    """

    names: str
    layout: str | None
    sizes: tuple[tuple[str, Size], ...]
    kind: Literal["move", "skip", "tied"]
    shift: float = 0.0
    may_miss: bool = False

    def __init__(self, names: str, layout: str | None = None, **sizes: int | Sequence[int]):
        known = {k: _plain(v) for k, v in sizes.items()}
        self._set(names, layout, known, "move")
        if names.count("->") != 1 or (layout is not None and layout.count("->") != 1):
            raise ParityError(
                f'A rule reads "torch -> flax"[, "a b -> b a"]; got {names!r}, {layout!r}.'
            )
        for side in names.split("->"):
            if len(_BRACES.findall(side)) > 1 or not side.strip():
                raise ParityError(
                    f"One {{a,b,c}} a side at most, and a name on each; got {names!r}. Write a "
                    "rule for the weights and another for the biases."
                )
        left, right = map(spread, self.sides)
        if layout is None and len(left) != len(right):
            raise ParityError(
                f"A rule of {len(left)} names onto {len(right)} needs a layout, its first axis the "
                f"braces'; got {names!r}."
            )
        _check_stars(names)
        check_layout(layout, names, known)

    @classmethod
    def skip(cls, names: str) -> "Rule":
        """Returns a rule that skips the torch tensors of these names; the report lists them."""
        if "->" in names or not names.strip():
            raise ParityError(f"Rule.skip takes torch's name alone; got {names!r}.")
        return cls._of(names, "skip")

    @classmethod
    def optional(
        cls, names: str, layout: str | None = None, **sizes: int | Sequence[int]
    ) -> "Rule":
        """Returns a `Rule(...)` for one of several ways in which files store a tensor.

        It may match nothing, and ignores tensors whose shapes its layout does not fit.

        >>> print(Rule.optional("attention.query -> q_proj"))
        Rule.optional("attention.query -> q_proj")
        """
        return cls(names, layout, **sizes).made_optional()

    @classmethod
    def tied(cls, names: str) -> "Rule":
        """Returns a rule for two names of one torch tensor, which Flax has once.

        `names` reads `"second -> first"`.
        """
        if names.count("->") != 1 or not all(side.strip() for side in names.split("->")):
            raise ParityError(f'Rule.tied reads "second -> first"; got {names!r}.')
        _check_stars(names)
        return cls._of(names, "tied")

    @classmethod
    def shifted(cls, names: str, by: float) -> "Rule":
        """Returns a rule that adds `by` to every value: -1 if a file stores `1 + gain`."""
        rule = cls(names)
        if isinstance(by, bool) or not isinstance(by, int | float) or not np.isfinite(by):
            raise ParityError(f"Rule.shifted adds a finite number; got {by!r}.")
        object.__setattr__(rule, "shift", float(by))
        return rule

    @classmethod
    def _of(cls, names: str, kind: Literal["skip", "tied"]) -> "Rule":
        rule = object.__new__(cls)
        rule._set(names, None, {}, kind)
        return rule

    def _set(self, names: str, layout: str | None, sizes: Mapping[str, Size], kind: str) -> None:
        for key, value in (("names", names), ("layout", layout), ("kind", kind)):
            object.__setattr__(self, key, value)
        object.__setattr__(self, "sizes", tuple(sorted(sizes.items())))
        object.__setattr__(self, "shift", 0.0)
        object.__setattr__(self, "may_miss", False)

    @property
    def sides(self) -> tuple[str, str]:
        """Torch's names and Flax's names."""
        left, _, right = self.names.partition("->")
        return left.strip(), right.strip()

    def groups(self, names: list[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Returns groups of matching `names`, each with the Flax names it maps to.

        A name matches if it is the left side, or is inside a module of that name.
        """
        left, right = map(spread, (self.names,) * 2 if self.kind == "skip" else self.sides)
        together = self.layout is not None or self.kind == "skip"
        sides = [(left, right)] if together else [*zip(zip(left), zip(right), strict=True)]
        groups = {}
        for sources, targets in sides:
            pattern = re.compile(_regex(sources[0]))
            for match in filter(None, map(pattern.fullmatch, names)):
                *wild, rest = match.groups()
                fill = tuple(_filled_name(side, wild) + (rest or "") for side in sources)
                groups[fill] = tuple(_filled_name(side, wild) + (rest or "") for side in targets)
        return list(groups.items())

    def made_optional(self) -> "Rule":
        """Returns a copy that may match nothing."""
        rule = copy(self)
        object.__setattr__(rule, "may_miss", True)
        return rule

    def renamed(self, names: str) -> "Rule":
        """Returns a copy with other names, `"torch -> flax"`, and the same layout."""
        rule = copy(self)
        object.__setattr__(rule, "names", names)
        return rule

    def inside(self, source: str, target: str) -> "Rule":
        """Returns the rule for a submodule, at `source` in torch and at `target` in Flax.

        >>> print(Rule.skip("norm").inside("h.*", "blocks.*"))
        Rule.skip("h.*.norm")
        """
        first, second = self.sides
        ends = (source, target if self.kind == "move" else source)
        sides = [f"{end}.{side}" for end, side in zip(ends, (first, second), strict=True) if side]
        return self.renamed(" -> ".join(sides))

    def __str__(self) -> str:
        if self.shift:
            return f'Rule.shifted("{self.names}", by={self.shift})'
        extra = "".join(f", {k}={v}" for k, v in self.sizes)
        layout = "" if self.layout is None else f', "{self.layout}"'
        kind = "optional" if self.may_miss and self.kind == "move" else self.kind
        return f'Rule{"" if kind == "move" else "." + kind}("{self.names}"{layout}{extra})'


def spread(names: str) -> list[str]:
    """Expands braces: `"a.{b,c}"` becomes `["a.b", "a.c"]`."""
    parts = [part.split(",") if i % 2 else [part] for i, part in enumerate(_BRACES.split(names))]
    return ["".join(piece.strip() for piece in pieces) for pieces in product(*parts)]


def _regex(name: str) -> str:
    return re.escape(name).replace(r"\*", r"([^.]+)") + r"(\..+)?"


def _filled_name(name: str, wild: list[str]) -> str:
    for piece in wild:
        name = name.replace("*", piece, 1)
    return name


def _check_stars(names: str) -> None:
    left, _, right = names.partition("->")
    if spread(left)[0].count("*") != spread(right)[0].count("*"):
        raise ParityError(f"A rule has as many * on each side; got {names!r}.")


def check_layout(layout: str | None, names: str, sizes: Mapping[str, Size]) -> None:
    """Raises ParityError unless a layout is valid, reversible and has axes of these sizes."""
    if layout is None:
        if sizes:
            raise ParityError(f"Sizes belong to a layout, which {names!r} lacks; got {sizes}.")
        return
    sides = layout.split("->")
    orders = [axes_of(side) for side in sides]
    if any(_unreadable(side) for side in sides) or re.search(r"\([^)]*\.\.\.", layout):
        raise ParityError(f'A layout reads "a (b c) ... -> ... c (a b)"; got {layout!r}.')
    if any(len(axes) != len(set(axes)) for axes in orders) or {*orders[0]} != {*orders[1]}:
        raise ParityError(
            f"A layout must be reversible, each axis once on each side; got {layout!r}."
        )
    wrong = [f"{k}={v!r}" for k, v in sizes.items() if k not in orders[0] or not _is_size(v)]
    if wrong:
        raise ParityError(f"{layout!r} has no axis of such a size: {', '.join(wrong)}.")
    for side, axes in zip(names.split("->"), sides, strict=True):
        if len(spread(side)) > 1 and not re.match(r"[^\W\d]", axes.strip()):
            raise ParityError(
                f"The braces of {side.strip()!r} are its first axis, which {layout!r} lacks."
            )
    _check_parts(layout, names, sizes)


def _plain(size: int | Sequence[int]) -> Size:
    if isinstance(size, list | tuple):
        return tuple(int(v) if isinstance(v, np.integer) else v for v in size)
    return int(size) if isinstance(size, np.integer) else cast(int, size)


def _is_size(value: object) -> bool:
    parts = value if isinstance(value, tuple) and value else (value,)
    return all(isinstance(v, int) and v >= 1 for v in parts)


def _check_parts(layout: str, names: str, sizes: Mapping[str, Size]) -> None:
    """Raises ParityError if sizes of unequal parts do not fit the layout or the braces."""
    ragged = {k: v for k, v in sizes.items() if isinstance(v, tuple)}
    if not ragged:
        return
    (axis, parts), listing = (
        next(iter(ragged.items())),
        ", ".join(f"{k}={v}" for k, v in ragged.items()),
    )
    if len(ragged) > 1:
        raise ParityError(f"One axis alone may have unequal parts; got {listing}.")
    counts = [len(spread(side)) for side in names.split("->")]
    if {*counts} - {1} != {len(parts)}:
        few = " and ".join(str(count) for count in counts if count > 1) or "no"
        raise ParityError(
            f"{listing} has {len(parts)} parts, and {names!r} has {few} names in braces."
        )
    sides = layout.split("->")
    braces = [side.split()[0] for side, count in zip(sides, counts, strict=True) if count > 1]
    place = rf"\([^()]*(?<![\w~]){braces[0]}\s+~?{axis}(?!\w)[^()]*\)"
    single = [side for side, count in zip(sides, counts, strict=True) if count == 1]
    known = sizes.get(braces[0], len(parts))
    if len({*braces}) > 1 or axis in braces or known != len(parts):
        raise ParityError(f"{listing} are sizes of the braces' parts; {layout!r} has other braces.")
    if not all(re.search(place, side) for side in single):
        raise ParityError(
            f"Unequal parts lie in one bracket, the braces' axis right before theirs: "
            f"({braces[0]} {axis}) has a place for {listing}, {layout!r} has none."
        )


def _unreadable(side: str) -> bool:
    flat = re.sub(r"\([^()]*\)", "", side)  # any parenthesis left is unmatched
    return bool(_TOKEN.sub("", side).strip() or re.search(r"[()]", flat))
