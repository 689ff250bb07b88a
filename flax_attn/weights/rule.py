"""Rules: one reversible sentence each, from torch's names and layout to Flax's."""

import re
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from einops import rearrange

from ..errors import ParityError

_BRACES = re.compile(r"\{([^{}]*)\}")
_TOKEN = re.compile(r"[()]|~?(?:\.\.\.|[^\W\d_]\w*|\b1\b)")


@dataclass(frozen=True, init=False)
class Rule:
    """`"torch names -> flax names"` and, if the values change, an einops layout.

    Names may hold `*` (anything without a dot, as many on each side) and one `{a,b,c}` on a side:
    its arrays are stacked on, or split from, the layout's first axis. A name may also be the name
    of a module: everything in it moves, each value by its type. Without a layout a value is carried
    as its type asks where the types are a known pair, and as it is elsewhere.

    A layout is reversible: every axis once on each side. `...` stands for any number of axes, and
    `~axis` on one side alone for an axis whose order is reversed.

    Args:
      names: torch's names, an arrow, Flax's names.
      layout: an einops pattern such as `"o i -> i o"`; it must be reversible.
      sizes: axes that the layout cannot tell by itself, such as `h=12`.

    Raises:
      ParityError: if the sentence cannot be read.

    >>> Rule("{q,k,v}.weight -> qkv.kernel", "n o i -> i (n o)").names
    '{q,k,v}.weight -> qkv.kernel'
    >>> print(Rule("h.*.c_attn.weight -> blocks.*.{q,k,v}.kernel", "d (n h k) -> n d h k", h=4))
    Rule("h.*.c_attn.weight -> blocks.*.{q,k,v}.kernel", "d (n h k) -> n d h k", h=4)
    """

    names: str
    layout: str | None
    sizes: tuple[tuple[str, int], ...]
    kind: Literal["move", "skip", "tied"]

    def __init__(self, names: str, layout: str | None = None, **sizes: int):
        self._set(names, layout, sizes, "move")
        if names.count("->") != 1 or (layout is not None and layout.count("->") != 1):
            raise ParityError(
                f'A rule reads "torch -> flax"[, "a b -> b a"]; got {names!r}, {layout!r}.'
            )
        for side in names.split("->"):
            if len(_BRACES.findall(side)) > 1 or not side.strip():
                raise ParityError(
                    f"One {{a,b,c}} a side at most, and a name on each; got {names!r}."
                )
        if "{" in names and layout is None:
            raise ParityError(
                f"A rule with braces needs a layout, its first axis the braces'; got {names!r}."
            )
        _check_stars(names)
        check_layout(layout, names, sizes)

    @classmethod
    def skip(cls, names: str) -> "Rule":
        """The torch tensors of these names are not carried, on purpose; the report lists them."""
        if "->" in names or not names.strip():
            raise ParityError(f"Rule.skip takes torch's name alone; got {names!r}.")
        return cls._of(names, "skip")

    @classmethod
    def tied(cls, names: str) -> "Rule":
        """`"second -> first"`, two names of one tensor in torch, which Flax holds once."""
        if names.count("->") != 1 or not all(side.strip() for side in names.split("->")):
            raise ParityError(f'Rule.tied reads "second -> first"; got {names!r}.')
        _check_stars(names)
        return cls._of(names, "tied")

    @classmethod
    def _of(cls, names: str, kind: Literal["skip", "tied"]) -> "Rule":
        rule = object.__new__(cls)
        rule._set(names, None, {}, kind)
        return rule

    def _set(self, names: str, layout: str | None, sizes: dict[str, int], kind: str) -> None:
        for key, value in (("names", names), ("layout", layout), ("kind", kind)):
            object.__setattr__(self, key, value)
        object.__setattr__(self, "sizes", tuple(sorted(sizes.items())))

    @property
    def sides(self) -> tuple[str, str]:
        """Torch's names and Flax's names."""
        left, _, right = self.names.partition("->")
        return left.strip(), right.strip()

    def groups(self, names: list[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Which of `names` belong together, and the Flax names they go to.

        A name counts if it is the left side or lies in a module of that name.
        """
        left, right = (self.names, self.names) if self.kind == "skip" else self.sides
        alternatives = spread(left)
        pattern = re.compile(_regex(alternatives[0]))
        found = {}
        for name in names:
            match = pattern.fullmatch(name)
            if match:
                *wild, rest = match.groups()
                fill = [_fill(side, wild) + (rest or "") for side in alternatives]
                found[tuple(fill)] = tuple(
                    _fill(side, wild) + (rest or "") for side in spread(right)
                )
        return list(found.items())

    def __str__(self) -> str:
        extra = "".join(f", {k}={v}" for k, v in self.sizes)
        layout = "" if self.layout is None else f', "{self.layout}"'
        return (
            f'Rule{"" if self.kind == "move" else "." + self.kind}("{self.names}"{layout}{extra})'
        )


def spread(names: str) -> list[str]:
    """`"a.{b,c}"` as `["a.b", "a.c"]`."""
    parts = [part.split(",") if i % 2 else [part] for i, part in enumerate(_BRACES.split(names))]
    return ["".join(piece.strip() for piece in pieces) for pieces in product(*parts)]


def _regex(name: str) -> str:
    return re.escape(name).replace(r"\*", r"([^.]+)") + r"(\..+)?"


def _fill(name: str, wild: list[str]) -> str:
    for piece in wild:
        name = name.replace("*", piece, 1)
    return name


def _check_stars(names: str) -> None:
    left, _, right = names.partition("->")
    if spread(left)[0].count("*") != spread(right)[0].count("*"):
        raise ParityError(f"A rule has as many * on each side; got {names!r}.")


def check_layout(layout: str | None, names: str, sizes: dict[str, int]) -> None:
    """Raises ParityError unless a layout can be read and undone, and knows its sizes."""
    if layout is None:
        if sizes:
            raise ParityError(f"Sizes belong to a layout, which {names!r} lacks; got {sizes}.")
        return
    sides = layout.split("->")
    found = [_axes(side) for side in sides]
    if any(_unreadable(side) for side in sides) or re.search(r"\([^)]*\.\.\.", layout):
        raise ParityError(f'A layout reads "a (b c) ... -> ... c (a b)"; got {layout!r}.')
    if any(len(axes) != len(set(axes)) for axes in found) or {*found[0]} != {*found[1]}:
        raise ParityError(
            f"A layout must be reversible, each axis once on each side; got {layout!r}."
        )
    wrong = [f"{k}={v!r}" for k, v in sizes.items() if k not in found[0] or int(v) < 1]
    if wrong:
        raise ParityError(f"{layout!r} has no axis of such a size: {', '.join(wrong)}.")
    for side, axes in zip(names.split("->"), sides, strict=True):
        if len(spread(side)) > 1 and not re.match(r"[^\W\d]", axes.strip()):
            raise ParityError(
                f"The braces of {side.strip()!r} are its first axis, which {layout!r} lacks."
            )


def lay_out(
    arrays: list[np.ndarray], layout: str, parts: int, sizes: dict[str, int]
) -> list[np.ndarray]:
    """Stacks `arrays` (if several), rearranges, and splits into `parts` (if several)."""
    whole = arrays[0] if len(arrays) == 1 else np.stack(arrays)
    left, right = (side.strip() for side in expand(layout, whole.ndim).split("->"))
    mirrored = _mirrored(left) ^ _mirrored(right)
    left, right = left.replace("~", ""), right.replace("~", "")
    axes = _axes(left)
    used = {k: v for k, v in sizes.items() if k in axes}
    if mirrored:
        whole = rearrange(whole, f"{left} -> {' '.join(axes)}", **used)
        whole = np.flip(whole, tuple(i for i, axis in enumerate(axes) if axis in mirrored))
        turned = rearrange(whole, f"{' '.join(axes)} -> {right}")
    else:
        turned = rearrange(whole, f"{left} -> {right}", **used)
    if parts > 1 and len(turned) != parts:
        raise ValueError(f"{layout!r} gives {len(turned)} arrays for {parts} names")
    return [turned] if parts == 1 else list(turned)


def backwards(layout: str) -> str:
    """The layout that undoes `layout`."""
    left, _, right = layout.partition("->")
    return f"{right.strip()} -> {left.strip()}"


def expand(layout: str, rank: int) -> str:
    """`layout` with `...` spelt out for an array of `rank` axes.

    >>> expand("i o ... -> ~... i o", 4)
    'i o etc0 etc1 -> ~etc0 ~etc1 i o'
    """
    count = rank - (len(_groups(layout.partition("->")[0])) - 1)
    if "..." not in layout or count < 0:
        return layout
    extra = [f"etc{i}" for i in range(count)]
    layout = layout.replace("~...", " ".join(f"~{axis}" for axis in extra))
    return layout.replace("...", " ".join(extra))


def axis_sizes(
    layout: str, shape: tuple[int, ...], parts: int, given: dict[str, int]
) -> dict[str, int]:
    """The size of every axis of a layout, from the shape of what it is applied to."""
    left, _, right = (side.strip() for side in expand(layout, len(shape)).partition("->"))
    known = dict(given)
    if parts > 1:
        known.setdefault(right.split()[0], parts)
    groups = [_axes(group) for group in _groups(left)]
    if len(groups) != len(shape):
        raise ValueError(f"{layout!r} names {len(groups)} axes, the array has shape {shape}")
    for names, size in zip(groups, shape, strict=True):
        free = [name for name in names if name not in known]
        rest = int(np.prod([known[name] for name in names if name in known]))
        if len(free) > 1 or rest == 0 or size % rest or (not free and rest != size):
            raise ValueError(f"{layout!r} does not fit shape {shape} with {known}")
        known.update({name: size // rest for name in free})
    return known


def _groups(side: str) -> list[str]:
    return re.findall(r"\([^)]*\)|\S+", side)


def _axes(side: str) -> list[str]:
    """The names of a side's axes in order; `...` counts as one, 1 as none."""
    return [name for name in re.findall(r"\w+|\.\.\.", side) if name != "1"]


def _mirrored(side: str) -> set[str]:
    return set(re.findall(r"~(\w+)", side))


def _unreadable(side: str) -> bool:
    flat = re.sub(r"\([^()]*\)", "", side)  # what is left holds no bracket, or they do not match
    return bool(_TOKEN.sub("", side).strip() or re.search(r"[()]", flat))
