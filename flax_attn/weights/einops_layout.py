"""Layouts: applies the einops pattern of a rule to arrays, and infers its axis sizes."""

import re
from collections.abc import Mapping, Sequence

import numpy as np
from einops import rearrange

Size = int | tuple[int, ...]  # size of an axis, or of each part along it if they differ


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
    axes = axes_of(left)
    used = {k: v for k, v in sizes.items() if k in axes}
    if mirrored:
        whole = rearrange(whole, f"{left} -> {' '.join(axes)}", **used)
        whole = np.flip(whole, tuple(i for i, axis in enumerate(axes) if axis in mirrored))
        rearranged = rearrange(whole, f"{' '.join(axes)} -> {right}")
    else:
        rearranged = rearrange(whole, f"{left} -> {right}", **used)
    if parts > 1 and len(rearranged) != parts:
        raise ValueError(f"{layout!r} gives {len(rearranged)} arrays for {parts} names")
    return [rearranged] if parts == 1 else list(rearranged)


def _lay_out_parts(
    arrays: list[np.ndarray], layout: str, parts: int, sizes: Mapping[str, Size]
) -> list[np.ndarray]:
    """Applies `lay_out` to each part alone, for parts of unequal size along one axis."""
    axis, each, inner = _parts(layout, len(arrays), sizes)
    left, right = layout.split("->")
    if len(arrays) == 1:
        where, before, after = _bracket(left, axis, arrays[0].ndim, sizes)
        opened = _at(arrays[0], where, before, sum(part[axis] for part in each), after)
        cuts = np.split(opened, np.cumsum([part[axis] for part in each])[:-1], where + 1)
        arrays = [_merged(cut, where) for cut in cuts]
    rearranged_parts = [
        lay_out([x], inner, 1, part)[0] for x, part in zip(arrays, each, strict=True)
    ]
    if parts > 1:
        return rearranged_parts
    where, before, after = _bracket(right, axis, rearranged_parts[0].ndim, sizes)
    opened = [
        _at(x, where, before, part[axis], after)
        for x, part in zip(rearranged_parts, each, strict=True)
    ]
    return [_merged(np.concatenate(opened, where + 1), where)]


def _parts(
    layout: str, arrays: int, sizes: Mapping[str, Size]
) -> tuple[str, list[dict[str, int]], str]:
    """Returns the axis of unequal parts, the sizes of every part, and the layout of one part."""
    axis, each = next((k, v) for k, v in sizes.items() if isinstance(v, tuple))
    braces = layout.split("->")[0 if arrays > 1 else 1].split()[0]
    others = {k: v for k, v in sizes.items() if isinstance(v, int) and k != braces}
    inner = re.sub(rf"(?<![\w~]){braces}(?!\w)\s*", "", layout)
    return axis, [{**others, axis: size} for size in each], inner


def _at(x: np.ndarray, where: int, *sizes: int) -> np.ndarray:
    """Splits one axis of `x` into several."""
    return x.reshape(*x.shape[:where], *sizes, *x.shape[where + 1 :])


def _merged(x: np.ndarray, where: int) -> np.ndarray:
    """Merges three axes of `x`, from `where` on."""
    one = int(np.prod(x.shape[where : where + 3], dtype=int))
    return x.reshape(*x.shape[:where], one, *x.shape[where + 3 :])


def _bracket(side: str, axis: str, rank: int, sizes: Mapping[str, Size]) -> tuple[int, int, int]:
    """Returns the array axis of the unequal parts, and the sizes before and after them in it."""
    groups = [axes_of(group) for group in axis_groups(expand(side, rank))]
    where = next(i for i, names in enumerate(groups) if axis in names)
    at = groups[where].index(axis)
    before, after = groups[where][: at - 1], groups[where][at + 1 :]
    return where, _product(before, sizes), _product(after, sizes)


def _product(names: list[str], sizes: Mapping[str, Size]) -> int:
    return int(np.prod([sizes[name] for name in names], dtype=int))


def backwards(layout: str) -> str:
    """Returns the inverse of a layout."""
    left, _, right = layout.partition("->")
    return f"{right.strip()} -> {left.strip()}"


def expand(layout: str, rank: int) -> str:
    """Expands the `...` of a layout for an array of `rank` axes.

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
    """Returns the size of every axis of a layout, from the shapes of its input arrays.

    Args:
      layout: a rule's layout.
      shapes: shape of one array, or of all arrays in the braces.
      parts: number of output arrays.
      fixed: known sizes.

    Raises:
      ValueError: listing the sizes, if they do not fit.

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
                + (f", or write {parts} rules, one for each" if parts > 1 else "")
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
    """Returns the size of every axis of a layout, from the shape of its single input."""
    left, _, right = (side.strip() for side in expand(layout, len(shape)).partition("->"))
    known = dict(fixed)
    if parts > 1:
        known.setdefault(right.split()[0], parts)
    groups = [axes_of(group) for group in axis_groups(left)]
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
    """Splits `"(n o) i"` into `["(n o)", "i"]`."""
    return re.findall(r"\([^)]*\)|\S+", side)


def axes_of(side: str) -> list[str]:
    """Returns the axis names of a side in order; `...` counts as one, 1 as none."""
    return [name for name in re.findall(r"\w+|\.\.\.", side) if name != "1"]


def _mirrored(side: str) -> set[str]:
    return set(re.findall(r"~(\w+)", side))
