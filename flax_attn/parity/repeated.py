"""Summarises repeated layers: names that differ only in a layer index are reported together."""

import re
from collections.abc import Iterable, Mapping, Sequence

NUMBER = re.compile(r"(?<![^.])\d+(?![^. ])")
MIN_REPEATED = 3  # minimum number of names that count as repeated layers


def together(names: Iterable[str]) -> list[str]:
    """Names in order, with three or more that differ only in their numbers merged into one.

    >>> together(["wte", "h.0.drop (torch)", "h.1.drop (torch)", "h.2.drop (torch)", "h.0.up"])
    ['wte', 'h.*.drop (torch)', 'h.0.up']
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(NUMBER.sub("*", name), []).append(name)
    each = ([kind] if len(of) >= MIN_REPEATED else of for kind, of in kinds.items())
    return [name for some in each for name in some]


def of_layers(errors: Mapping[str, float], wrong: Sequence[str] = ()) -> list[str]:
    """One line per list of repeated layers: whether all are equal, and the largest error.

    Args:
      errors: by the name of the compared value.
      wrong: names of the values at fault.

    >>> of_layers({f"h.{i}.up": i * 1e-16 for i in range(4)} | {"norm": 1.0})
    ['h.0 ... h.3: equal, worst h.3 3.0e-16']
    >>> of_layers({f"h.{i}.up": 1e-16 for i in range(4)} | {"h.2.up": 0.5}, ["h.2.up"])
    ['h.0 ... h.3: equal but for h.2, worst of the others h.0 1.0e-16']
    """
    lists: dict[str, dict[str, dict[str, float]]] = {}
    for name, error in errors.items():
        if (number := NUMBER.search(name)) and name[number.end() :].startswith("."):
            layers = lists.setdefault(name[: number.start()], {})
            layers.setdefault(number.group(), {})[name[number.end() :]] = error
    return [
        _of_list(start, layers, wrong)
        for start, layers in lists.items()
        if len(layers) >= MIN_REPEATED and set.intersection(*map(set, layers.values()))
    ]


def _of_list(start: str, layers: Mapping[str, Mapping[str, float]], wrong: Sequence[str]) -> str:
    numbers = sorted(layers, key=int)
    faulty = [n for n in numbers if any(x.startswith(f"{start}{n}.") for x in wrong)]
    worst = {n: max(layers[n].values()) for n in numbers if n not in faulty}
    text = f"{start}{numbers[0]} ... {start}{numbers[-1]}: "
    text += f"equal but for {', '.join(start + n for n in faulty)}" if faulty else "equal"
    if not worst:
        return f"{start}{numbers[0]} ... {start}{numbers[-1]}: all different"
    at = max(worst, key=lambda n: worst[n])
    return f"{text}, worst{' of the others' * bool(faulty)} {start}{at} {worst[at]:.1e}"
