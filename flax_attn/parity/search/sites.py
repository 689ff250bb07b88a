"""Groups of operations that one mistake changes together: those of one source line."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..sides.tape import Node, Ref

# Periods of alternating operations on one line, such as the gates of a recurrent cell; and maximum
# number of operations to try one by one.
STRIDES, SINGLE = (2, 3, 4), 6
LINE = 5  # parts of a node's site that its line has: path, file, lines and operation


def subsets(nodes: Sequence[Node], labels: Mapping[int, str]) -> Iterator[tuple[str, list[Node]]]:
    """Yields groups of operations to be changed alike, with words for the group."""
    sites: dict[tuple[Any, ...], list[Node]] = {}
    lines: dict[tuple[Any, ...], list[Node]] = {}
    for node in nodes:
        site = node.site or ("", node.number)
        sites.setdefault(site, []).append(node)
        lines.setdefault(site[:LINE], []).append(node)
    for site, group in sorted(sites.items(), key=lambda item: -item[1][-1].number):
        # A line that runs on other sizes each time, such as that of an expert with its tokens.
        line = lines[site[:LINE]]
        if len(line) > len(group) and line[-1] is group[-1]:
            yield "", line
        yield from _of_site(group, labels)


def _of_site(nodes: list[Node], labels: Mapping[int, str]) -> Iterator[tuple[str, list[Node]]]:
    """All operations of one line, those of a parameter, alternating ones, and each alone."""
    yield "", nodes
    if len(nodes) == 1:
        return
    by_name: dict[str, list[Node]] = {}
    for node in nodes:
        names = [labels.get(x.value, "") for x in node.args if isinstance(x, Ref)]
        by_name.setdefault(re.sub(r"\d+|_reverse", "", " ".join(names)), []).append(node)
    if 1 < len(by_name) <= SINGLE:
        yield from (("", few) for few in by_name.values())
    for stride in STRIDES:
        if len(nodes) % stride == 0 and len(nodes) > stride:
            yield from (
                (f", of {stride} in turn the {nth(i)}", nodes[i::stride]) for i in range(stride)
            )
    if len(nodes) <= SINGLE:
        yield from ((f", the {nth(i)} of {len(nodes)}", [x]) for i, x in enumerate(nodes))


def nth(i: int) -> str:
    """Formats an index as an ordinal.

    >>> nth(0), nth(1), nth(3)
    ('first', 'second', '4th')
    """
    return ("first", "second", "third")[i] if i < 3 else f"{i + 1}th"
