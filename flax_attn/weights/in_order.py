"""Pairs layers of equal kind and shape by their order if names do not distinguish them.

Both sides nearly always define layers in the order in which they are called. Similar names are more
reliable, so the order is used only if no name is clearly more similar than all others.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from flax import nnx

MIN_MARGIN = 0.1  # minimum margin of the most similar name over the next

Likeness = Mapping[tuple[str, str], float]  # (torch's name, Flax's name) that fit -> similarity


def paired_in_order(
    likeness: Likeness, torch_names: Iterable[str], flax_names: Iterable[str]
) -> dict[str, str]:
    """Pairs torch's names with Flax's by order, within groups that names do not distinguish.

    Args:
      likeness: similarity of all pairs of names that fit.
      torch_names, flax_names: all names, in the order of their definition.

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
    """Whether each name is clearly most similar to one layer, each to a different one."""
    nearest = {name: max(layers, key=lambda it: likeness[name, it]) for name in names}
    return len({*nearest.values()}) == len(names) and all(
        likeness[name, nearest_names]
        >= MIN_MARGIN + max(likeness[name, it] for it in layers - {nearest_names})
        for name, nearest_names in nearest.items()
    )


def defined(module: nnx.Module, what: type = nnx.Module) -> list[str]:
    """Returns the paths of all nodes of type `what`, in the order of their creation."""
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
