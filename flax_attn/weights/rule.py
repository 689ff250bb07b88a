"""Rules: each maps torch's names and layout to Flax's, and can be reversed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, cast

import numpy as np
from einops import rearrange

from ..errors import ParityError

_BRACES = re.compile(r"\{([^{}]*)\}")
_TOKEN = re.compile(r"[()]|~?(?:\.\.\.|[^\W\d_]\w*|\b1\b)")
Size = int | tuple[int, ...]  # of an axis, or of each part of an axis whose parts are unequal


@dataclass(frozen=True, init=False)
class Rule:
    """`"torch names -> flax names"` and, if the values change, an einops layout.

    Names may hold `*` (anything without a dot, as many on each side) and one `{a,b,c}` on a side:
    its arrays are stacked on, or split from, the layout's first axis. A name may also be the name
    of a module: everything in it moves, each value by its type. Without a layout a value is carried
    as its type asks where the types are a known pair, and as it is elsewhere, and braces on both
    sides are that many rules: `"attn.{q,k} -> {query,key}"`. Where Flax has layers stacked, as
    `nnx.vmap` makes them, a rule names one by its number all the same: `"h.*.fc -> layers.*.up"`.

    A layout is reversible: every axis once on each side. `...` stands for any number of axes, and
    `~axis` on one side alone for an axis whose order is reversed.

    The arrays of braces may be unequal along one axis, whose sizes are then a tuple. Where all are
    one array, that axis stands in a bracket right after the braces' axis: `(n o)`. What stands
    before the two repeats them, what stands after is the unit in which the sizes count.

    Args:
      names: torch's names, an arrow, Flax's names.
      layout: an einops pattern such as `"o i -> i o"`; it must be reversible.
      sizes: axes that do not follow from the layout, such as `h=12`, and the sizes of unequal
        parts, such as `o=(24, 8, 8)`.

    Raises:
      ParityError: if the rule cannot be parsed.

    >>> Rule("{q,k,v}.weight -> qkv.kernel", "n o i -> i (n o)").names
    '{q,k,v}.weight -> qkv.kernel'
    >>> print(Rule("h.*.c_attn.weight -> blocks.*.{q,k,v}.kernel", "d (n h k) -> n d h k", h=4))
    Rule("h.*.c_attn.weight -> blocks.*.{q,k,v}.kernel", "d (n h k) -> n d h k", h=4)

    Grouped-query attention with a fused projection, 24 rows for the query and 8 each for key and
    value; Falcon's, where each of k groups holds 3 query heads, a key and a value, of 4 rows each;
    and DeepSeek's `kv_b_proj`, where each head holds 6 rows for the key and 5 for the value:

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
                    f"One {{a,b,c}} a side at most, and a name on each; got {names!r}."
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
        """Leaves out the torch tensors of these names; the report lists them."""
        if "->" in names or not names.strip():
            raise ParityError(f"Rule.skip takes torch's name alone; got {names!r}.")
        return cls._of(names, "skip")

    @classmethod
    def tied(cls, names: str) -> "Rule":
        """`"second -> first"`: two names of one torch tensor, which Flax holds once."""
        if names.count("->") != 1 or not all(side.strip() for side in names.split("->")):
            raise ParityError(f'Rule.tied reads "second -> first"; got {names!r}.')
        _check_stars(names)
        return cls._of(names, "tied")

    @classmethod
    def shifted(cls, names: str, by: float) -> "Rule":
        """`"torch -> flax"`, `by` added to every value: -1 where a file holds `1 + gain`."""
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

    @property
    def sides(self) -> tuple[str, str]:
        """Torch's names and Flax's names."""
        left, _, right = self.names.partition("->")
        return left.strip(), right.strip()

    def groups(self, names: list[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Which of `names` belong together, and the Flax names they go to.

        A name counts if it is the left side or lies in a module of that name.
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

    def inside(self, source: str, target: str) -> "Rule":
        """The same of a module that torch has at `source` and Flax at `target`.

        >>> print(Rule.skip("norm").inside("h.*", "blocks.*"))
        Rule.skip("h.*.norm")
        """
        first, second = self.sides
        ends = (source, target if self.kind == "move" else source)
        sides = [f"{end}.{side}" for end, side in zip(ends, (first, second), strict=True) if side]
        moved = object.__new__(type(self))
        moved._set(" -> ".join(sides), self.layout, dict(self.sizes), self.kind)
        object.__setattr__(moved, "shift", self.shift)
        return moved

    def __str__(self) -> str:
        if self.shift:
            return f'Rule.shifted("{self.names}", by={self.shift})'
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


def _filled_name(name: str, wild: list[str]) -> str:
    for piece in wild:
        name = name.replace("*", piece, 1)
    return name


def _check_stars(names: str) -> None:
    left, _, right = names.partition("->")
    if spread(left)[0].count("*") != spread(right)[0].count("*"):
        raise ParityError(f"A rule has as many * on each side; got {names!r}.")


def check_layout(layout: str | None, names: str, sizes: Mapping[str, Size]) -> None:
    """Raises ParityError unless a layout can be read and undone, and knows its sizes."""
    if layout is None:
        if sizes:
            raise ParityError(f"Sizes belong to a layout, which {names!r} lacks; got {sizes}.")
        return
    sides = layout.split("->")
    orders = [_axes(side) for side in sides]
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
    """Raises ParityError if an axis of unequal parts has no place for them, or another number."""
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


def lay_out(
    arrays: list[np.ndarray], layout: str, parts: int, sizes: Mapping[str, Size]
) -> list[np.ndarray]:
    """Stacks `arrays` (if several), rearranges, and splits into `parts` (if several)."""
    if any(isinstance(size, tuple) for size in sizes.values()):
        return _lay_out_parts(arrays, layout, parts, sizes)
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


def _lay_out_parts(
    arrays: list[np.ndarray], layout: str, parts: int, sizes: Mapping[str, Size]
) -> list[np.ndarray]:
    """`lay_out` where the parts are unequal along one axis: each is laid out by itself."""
    axis, each, inner = _parts(layout, len(arrays), sizes)
    left, right = layout.split("->")
    if len(arrays) == 1:
        where, before, after = _bracket(left, axis, arrays[0].ndim, sizes)
        opened = _at(arrays[0], where, before, sum(part[axis] for part in each), after)
        cuts = np.split(opened, np.cumsum([part[axis] for part in each])[:-1], where + 1)
        arrays = [_merged(cut, where) for cut in cuts]
    laid = [lay_out([x], inner, 1, part)[0] for x, part in zip(arrays, each, strict=True)]
    if parts > 1:
        return laid
    where, before, after = _bracket(right, axis, laid[0].ndim, sizes)
    opened = [_at(x, where, before, part[axis], after) for x, part in zip(laid, each, strict=True)]
    return [_merged(np.concatenate(opened, where + 1), where)]


def _parts(
    layout: str, arrays: int, sizes: Mapping[str, Size]
) -> tuple[str, list[dict[str, int]], str]:
    """The axis of unequal parts, the sizes of every part, and the layout of one part alone."""
    axis, each = next((k, v) for k, v in sizes.items() if isinstance(v, tuple))
    braces = layout.split("->")[0 if arrays > 1 else 1].split()[0]
    others = {k: v for k, v in sizes.items() if isinstance(v, int) and k != braces}
    inner = re.sub(rf"(?<![\w~]){braces}(?!\w)\s*", "", layout)
    return axis, [{**others, axis: size} for size in each], inner


def _at(x: np.ndarray, where: int, *sizes: int) -> np.ndarray:
    """`x` with one axis opened into several."""
    return x.reshape(*x.shape[:where], *sizes, *x.shape[where + 1 :])


def _merged(x: np.ndarray, where: int) -> np.ndarray:
    """`x` with three axes made one."""
    one = int(np.prod(x.shape[where : where + 3], dtype=int))
    return x.reshape(*x.shape[:where], one, *x.shape[where + 3 :])


def _bracket(side: str, axis: str, rank: int, sizes: Mapping[str, Size]) -> tuple[int, int, int]:
    """Which axis of an array holds the unequal parts; how many lie before and after them there."""
    groups = [_axes(group) for group in axis_groups(expand(side, rank))]
    where = next(i for i, names in enumerate(groups) if axis in names)
    at = groups[where].index(axis)
    before, after = groups[where][: at - 1], groups[where][at + 1 :]
    return where, _product(before, sizes), _product(after, sizes)


def _product(names: list[str], sizes: Mapping[str, Size]) -> int:
    return int(np.prod([sizes[name] for name in names], dtype=int))


def backwards(layout: str) -> str:
    """The layout that undoes `layout`."""
    left, _, right = layout.partition("->")
    return f"{right.strip()} -> {left.strip()}"


def expand(layout: str, rank: int) -> str:
    """`layout` with `...` spelt out for an array of `rank` axes.

    >>> expand("i o ... -> ~... i o", 4)
    'i o etc0 etc1 -> ~etc0 ~etc1 i o'
    """
    count = rank - (len(axis_groups(layout.partition("->")[0])) - 1)
    if "..." not in layout or count < 0:
        return layout
    extra = [f"etc{i}" for i in range(count)]
    layout = layout.replace("~...", " ".join(f"~{axis}" for axis in extra))
    return layout.replace("...", " ".join(extra))


def sizes_of(
    layout: str, shapes: Sequence[tuple[int, ...]], parts: int, fixed: Mapping[str, Size]
) -> dict[str, Size]:
    """The size of every axis of a layout, from the shapes of the arrays that it is applied to.

    Args:
      layout: of a rule.
      shapes: of one array, or of all arrays of the braces.
      parts: how many arrays it becomes.
      fixed: sizes that are known.

    Raises:
      ValueError: with the sizes there are, if they do not fit.

    >>> sizes_of("(n o) i -> n i o", [(40, 18)], 3, {"o": (24, 8, 8)})
    {'o': (24, 8, 8), 'i': 18}
    """
    ragged = {k: v for k, v in fixed.items() if isinstance(v, tuple)}
    plain = {k: v for k, v in fixed.items() if isinstance(v, int)}
    if not ragged:
        if len({*shapes}) > 1:
            listing = " ".join(str(list(shape)) for shape in shapes)
            raise ValueError(
                f"{layout!r} takes parts of one shape, these are {listing}: give the axis that "
                "differs the size of each part, as in o=(24, 8, 8)"
            )
        whole = shapes[0] if len(shapes) == 1 else (len(shapes), *shapes[0])
        return {**axis_sizes(layout, whole, parts, plain)}
    axis, each, inner = _parts(layout, len(shapes), fixed)
    if len(shapes) == 1:
        each = [{**each[0], axis: sum(ragged[axis])}]
    known: dict[str, int] = {}
    for shape, part in zip(shapes, each, strict=True):
        try:
            known |= axis_sizes(inner, shape, 1, {**known, **part})
        except ValueError:
            raise ValueError(_misfit(layout, shapes, fixed)) from None
    return {**known, **ragged}


def _misfit(layout: str, shapes: Sequence[tuple[int, ...]], fixed: Mapping[str, Size]) -> str:
    listing = ", ".join(
        f"{k}={v}" + (f" ({sum(v)} in all)" if isinstance(v, tuple) and len(shapes) == 1 else "")
        for k, v in fixed.items()
    )
    return f"{layout!r} with {listing} does not fit {' '.join(str(list(x)) for x in shapes)}"


def axis_sizes(
    layout: str, shape: tuple[int, ...], parts: int, fixed: dict[str, int]
) -> dict[str, int]:
    """The size of every axis of a layout, from the shape of what it is applied to."""
    left, _, right = (side.strip() for side in expand(layout, len(shape)).partition("->"))
    known = dict(fixed)
    if parts > 1:
        known.setdefault(right.split()[0], parts)
    groups = [_axes(group) for group in axis_groups(left)]
    if len(groups) != len(shape):
        raise ValueError(f"{layout!r} names {len(groups)} axes, the array has shape {shape}")
    for names, size in zip(groups, shape, strict=True):
        free = [name for name in names if name not in known]
        rest = int(np.prod([known[name] for name in names if name in known]))
        if len(free) > 1 or rest == 0 or size % rest or (not free and rest != size):
            raise ValueError(f"{layout!r} does not fit shape {shape} with {known}")
        known.update({name: size // rest for name in free})
    return known


def axis_groups(side: str) -> list[str]:
    """`"(n o) i"` as `["(n o)", "i"]`."""
    return re.findall(r"\([^)]*\)|\S+", side)


def _axes(side: str) -> list[str]:
    """The names of a side's axes in order; `...` counts as one, 1 as none."""
    return [name for name in re.findall(r"\w+|\.\.\.", side) if name != "1"]


def _mirrored(side: str) -> set[str]:
    return set(re.findall(r"~(\w+)", side))


def _unreadable(side: str) -> bool:
    flat = re.sub(r"\([^()]*\)", "", side)  # what is left holds no bracket, or they do not match
    return bool(_TOKEN.sub("", side).strip() or re.search(r"[()]", flat))
