"""Gate order of torch's GRU and LSTM, and gates recognised by parameter names.

Torch stores the rows of all gates in one weight, `r z n` for a GRU and `i f g o` for an LSTM; a
user's own module may have a Param for each, whose name may or may not indicate the gate.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ORDER = {"RNN": "", "GRU": "rzn", "LSTM": "ifgo"}
_GATE_WORDS = {
    "RNN": {},
    "GRU": {"reset": "r", "update": "z", "u": "z", "new": "n", "candidate": "n", "c": "n"},
    "LSTM": {"input": "i", "in": "i", "forget": "f", "cell": "g", "candidate": "g", "c": "g"},
}
_GATE_WORDS["LSTM"] |= {"output": "o", "out": "o"}
_INPUT = re.compile(r"[wb]?(x|i|in|inputs?|ih|i2h|xh|x2h)")
_HIDDEN = re.compile(r"[wbu]?(h|hh|h2h|hidden|state|recurrent|rec)")
_LETTER = re.compile(r"([wbu]?[xih]?)(\w)")  # W_ir, xr, Wxr
_BOOKS = {"w": "ih", "u": "hh"}  # textbook names of the weights, used if no word is clearer
_RECURRENT_ROLE = re.compile(r"(weight|bias)_(ih|hh).*")


class Gates(NamedTuple):
    """Names that are the gates of one weight, or the single name of a whole weight.

    Attributes:
      places: indices of the names, in torch's gate order if the names indicate it.
      rest: the name without the gate.
      named: whether the names indicate the gates.
    """

    places: tuple[int, ...]
    rest: str
    named: bool


def role_of(name: str) -> tuple[str, str] | None:
    """Splits a recurrent parameter's name into weight or bias, and ih or hh; None for others.

    >>> role_of("gru.bias_hh_l0_reverse")
    ('bias', 'hh')
    """
    match = _RECURRENT_ROLE.fullmatch(name.rpartition(".")[2])
    return (match[1], match[2]) if match else None


def gates(names: Sequence[str], kind: str) -> list[Gates]:
    """Returns the candidates for one torch weight: each name alone, and groups of its gates.

    Args:
      names: names in the order of their definition.
      kind: "RNN", "GRU" or "LSTM".

    >>> gates(["h_new", "h_reset", "h_update"], "GRU")[-1]
    Gates(places=(1, 2, 0), rest='h_*', named=True)
    >>> gates(["a", "b", "c"], "GRU")[-1]
    Gates(places=(0, 1, 2), rest='*', named=False)
    """
    order, options = ORDER[kind], [Gates((i,), name, True) for i, name in enumerate(names)]
    together: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        pieces = name.split(".")
        for i in range(len(pieces) if order else 0):
            key = ".".join([*pieces[:i], "{}", *pieces[i + 1 :]])
            together.setdefault(key, []).append(place)
    for key, places in together.items():
        at = key.split(".").index("{}")
        pieces = [names[place].split(".")[at] for place in places]
        in_torch_order = _in_torch_order(pieces, kind)
        options += [
            Gates(tuple(places[i] for i in chosen), key.replace("{}", rest), True)
            for rest, chosen in in_torch_order.items()
        ]
        if not in_torch_order and len(places) == len(order):
            options.append(Gates(tuple(places), key.replace("{}", "*"), False))
    return options


def _in_torch_order(pieces: Sequence[str], kind: str) -> dict[str, list[int]]:
    """Maps the rest of the names to the indices of all gates in torch's order."""
    every = [[_gate_named(piece, kind, last) for piece in pieces] for last in (True, False)]
    same_rest = {
        rest: [gate if r == rest else "" for gate, r in gates_and_rests]
        for gates_and_rests in every
        for _, rest in gates_and_rests
    }
    mixed = {"*": [gate for gate, _ in every[0]]}  # such as "candidate" with "reset_gate"
    for options in (same_rest, mixed):
        whole = {
            rest: [letters.index(gate) for gate in ORDER[kind]]
            for rest, letters in options.items()
            if sorted(filter(None, letters)) == sorted(ORDER[kind])
        }
        if whole:
            return whole
    return {}


def _gate_named(piece: str, kind: str, last: bool) -> tuple[str, str]:
    """Returns the gate named by the last or first matching word, and the rest of the component."""
    words = _split_words(piece)
    for i in reversed(range(len(words))) if last else range(len(words)):
        before, gate = "", _GATE_WORDS[kind].get(words[i], words[i])
        if gate == words[i] and (parts := _LETTER.fullmatch(gate)):
            before, gate = parts[1], _GATE_WORDS[kind].get(parts[2], parts[2])
        if len(gate) == 1 and gate in ORDER[kind]:
            return gate, "_".join([*words[:i], f"{before}*", *words[i + 1 :]])
    return "", piece


def side(rest: str) -> str:
    """Returns "ih" if a name without its gate indicates the input, "hh" the hidden state, or "".

    >>> [side(name) for name in ("gru.x.*.kernel", "gru.hidden_*.bias", "gru.W_i*", "gru.a.kernel")]
    ['ih', 'hh', 'ih', '']
    """
    pieces = [
        [word.strip("*") for word in _split_words(piece) if word != "*"]
        for piece in reversed(rest.split("."))
    ]
    for word in (word for words in pieces for word in words):
        for name, pattern in (("ih", _INPUT), ("hh", _HIDDEN)):
            if pattern.fullmatch(word):
                return name
    return next(
        (_BOOKS[words[0]] for words in pieces if len(words) == 1 and words[0] in _BOOKS), ""
    )


def shared(names: Iterable[str], others: Iterable[str]) -> int:
    """Returns the longest common prefix, in components, of any two names from both groups."""
    pairs = ((one.split("."), two.split(".")) for one in names for two in list(others))
    return max((_first_pieces(one, two) for one, two in pairs), default=0)


def _first_pieces(one: Sequence[str], two: Sequence[str]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b),
        min(len(one), len(two)),
    )


def _split_words(piece: str) -> list[str]:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", piece).lower()
    return re.findall(r"[a-z]+(?:2[a-z]+)?\*?|\d+|\*", words)
