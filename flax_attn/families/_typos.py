"""Finds the known name that a mistyped one stands for."""

from collections.abc import Iterable

SHORT = 5  # names with fewer letters may have one typo, others two
LONG = 8  # names with as many letters may have the first one wrong


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that `name` is a typo of, or None.

    A typo omits, adds or replaces a letter, or swaps two. It does not change a number: `cohere2` is
    not a typo of `cohere`. Nor does it change the first letter of a name of fewer than 8.

    >>> nearest_name("lamma", ["gemma", "llama"]), nearest_name("cohere2", ["cohere"])
    ('llama', None)
    """
    distances = {
        each: distance(name.lower(), each.lower()) for each in known if _may_be(name, each)
    }
    best = min(distances, key=lambda each: distances[each], default=None)
    return best if best is not None and distances[best] <= 1 + (len(best) >= SHORT) else None


def distance(a: str, b: str) -> int:
    """Number of letters that are omitted, added, replaced or swapped with the next.

    >>> distance("hidden_sise", "hidden_size"), distance("llaam", "llama")
    (1, 1)
    """
    before, last = list[int](), [*range(len(b) + 1)]
    for i, x in enumerate(a):
        row = [i + 1]
        for j, y in enumerate(b):
            row.append(min(last[j] + (x != y), last[j + 1] + 1, row[j] + 1))
            if i and j and x == b[j - 1] and a[i - 1] == y:
                row[-1] = min(row[-1], before[j - 1] + 1)
        before, last = last, row
    return last[-1]


def _may_be(name: str, known: str) -> bool:
    digits = ["".join(filter(str.isdigit, word)) for word in (name, known)]
    same_start = name[:1].lower() == known[:1].lower() or len(known) >= LONG
    return same_start and digits[0] == digits[1] and abs(len(name) - len(known)) <= 2
