"""Suggestions for unknown names in error messages."""

from collections.abc import Iterable
from difflib import get_close_matches

MAX_NAMES = 10
MIN_SIMILARITY = 0.7  # lowest similarity ratio of a suggestion, at most 1


def did_you_mean(name: str, known: Iterable[str], what: str) -> str:
    """The end of a sentence: the most similar names, or a list of known ones.

    Args:
      name: the unknown name.
      known: the valid names.
      what: introduction of the list, as in "the presets are".

    Example:
      >>> did_you_mean("bok", ["book", "flash"], "the presets are")
      'did you mean book?'
      >>> did_you_mean("nosuch", ["book", "flash"], "the presets are")
      'the presets are book, flash.'
    """
    names = list(dict.fromkeys(known))
    by_letters = {known_name.lower(): known_name for known_name in reversed(names)}
    nearest_names = get_close_matches(name, names, 3, MIN_SIMILARITY)
    nearest_names = nearest_names or [
        by_letters[x] for x in get_close_matches(name.lower(), by_letters, 3, MIN_SIMILARITY)
    ]
    if nearest_names:
        return f"did you mean {' or '.join(nearest_names)}?"
    return f"{what} {listed(names)}."


def listed(names: Iterable[str], most: int = MAX_NAMES) -> str:
    """The first `most` names, and the number of remaining ones.

    >>> listed("abc"), listed("abcdefghijklmn")
    ('a, b, c', 'a, b, c, d, e, f, g, h, i, j and 4 more')
    """
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
