"""Layers of one kind and shape whose names do not tell which is which: paired in order.

Both sides define their layers in the order in which they are called, nearly always. Names that are
alike say more, so the order is asked only where no name is clearly nearer than all others.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from flax import nnx

MIN_MARGIN = 0.1  # by how much the likest name must be nearer than the next

Likeness = Mapping[tuple[str, str], float]  # of a name of torch's and one of Flax's that fit


def paired_in_order(
    likeness: Likeness, torch_names: Iterable[str], flax_names: Iterable[str]
) -> dict[str, str]:
    """Torch's names and Flax's, of those that fit each other as well and that no name tells apart.

    Args:
      likeness: of every two names that fit.
      theirs, ours: all names, in the order in which they are defined.

    >>> both = [("a.norm", "one"), ("a.norm", "two"), ("norm", "one"), ("norm", "two")]
    >>> paired_in_order(dict.fromkeys(both, 0.2), ["a.norm", "norm"], ["one", "two"])
    {'a.norm': 'one', 'norm': 'two'}
    >>> paired_in_order(dict(zip(both, (0.9, 0.2, 0.2, 0.9))), ["a.norm", "norm"], ["one", "two"])
    {}
    """
    fits: dict[str, set[str]] = {}
    for mine, it in likeness:
        fits.setdefault(mine, set()).add(it)
    groups: dict[frozenset[str], list[str]] = {}
    for mine in torch_names:
        if mine in fits:
            groups.setdefault(frozenset(fits[mine]), []).append(mine)
    order = list(flax_names)
    pairs: dict[str, str] = {}
    for layers, names in groups.items():
        if 1 < len(names) == len(layers) and not _is_unambiguous(likeness, names, layers):
            pairs |= zip(names, sorted(layers, key=order.index), strict=True)
    return pairs


def _is_unambiguous(likeness: Likeness, names: list[str], layers: frozenset[str]) -> bool:
    """Whether each name is clearly the likest of one layer, each of another."""
    nearest = {name: max(layers, key=lambda it: likeness[name, it]) for name in names}
    return len({*nearest.values()}) == len(names) and all(
        likeness[name, nearest_names]
        >= MIN_MARGIN + max(likeness[name, it] for it in layers - {nearest_names})
        for name, nearest_names in nearest.items()
    )


def defined(module: nnx.Module, what: type = nnx.Module) -> list[str]:
    """The path of every module, or of what else is asked for, in the order they were made in."""
    paths: list[str] = []

    def walk(node: Any, path: str, above: tuple[int, ...]) -> None:
        if path and isinstance(node, what):
            paths.append(path)
        for name, child in _children_in_order(node):
            if id(child) not in above:
                walk(child, f"{path}.{name}" if path else name, (*above, id(node)))

    walk(module, "", ())
    return paths


def _children_in_order(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, nnx.Variable):
        return []
    if isinstance(node, nnx.Module | nnx.List | nnx.Dict):
        return [(k, v) for k, v in vars(node).items() if not k.startswith("_pytree__")]
    named = node.items() if isinstance(node, dict) else ()
    return [(str(i), x) for i, x in (enumerate(node) if isinstance(node, list | tuple) else named)]
