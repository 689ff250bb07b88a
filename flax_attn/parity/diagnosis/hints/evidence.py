"""What a hint may look at: Flax's value and torch's at one tap, and all that torch recorded."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ...sides.match import Layout, hidden, point_of
from ...sides.run import Call, Run

# What Flax's value may be: a sentence, and an array in torch's layout, or a function of how much of
# the fault there is (0: none, 1: all of it) that gives one, or None where it is all or nothing.
Guess = tuple[str | Callable[[float], str], np.ndarray | Callable[[float], np.ndarray | None]]
Guesses = Iterator[Guess]
Values = Iterator[tuple[str, np.ndarray]]


def times(factor: float) -> str:
    """A factor as it is printed, never as a mere 1.

    >>> times(1.25), times(1 - 2e-12)
    ('1.25', '1 - 2e-12')
    """
    text, more = f"{factor:.8g}", factor - 1
    return text if text != "1" else f"1 {'-' if more < 0 else '+'} {abs(more):.3g}"


@dataclass(frozen=True)
class Evidence:
    """One tap that differs.

    Attributes:
      tap: torch's name of it.
      got, want: Flax's value from torch's inputs, and torch's, both in Flax's layout.
      plain: torch's value in its own layout.
      layout: from torch's to Flax's.
      call: what torch computed it from.
      truth: all that torch recorded.
      heard: torch's names of the taps that Flax has too; in a diagnosis these are torch's own.
      before: torch's taps that it may be computed from, the last of them first.
      kept: what share each dropout mask was asked to keep, in Flax and in torch.
      masked: whether NaN in a guess is what nobody knows, behind a number that hides.
    """

    tap: str
    got: np.ndarray
    want: np.ndarray
    plain: np.ndarray
    layout: Layout
    call: Call
    truth: Run
    tapped: frozenset[str] = frozenset()
    before: dict[str, np.ndarray] = field(default_factory=dict)
    keep_rates: tuple[tuple[float, float], ...] = ()
    masked: bool = False

    @property
    def point(self) -> str:
        """`"scores"` of `"attn.scores"`."""
        return point_of(self.tap)

    @property
    def owner(self) -> str:
        """The path of the module that the tap lies in."""
        return self.tap.rpartition(".")[0]

    def name(self, point: str) -> str:
        """The tap of another point of the same attention."""
        count = self.tap.rpartition(".")[2].partition("#")[2]
        name = f"{self.owner}.{point}" if self.owner else point
        return f"{name}#{count}" if count else name

    def at_point(self, point: str) -> np.ndarray | None:
        """Torch's value at another point of the same attention."""
        return self.truth.taps.get(self.name(point))

    def at(self, point: str) -> "Evidence":
        """Another point of the same attention, as if Flax had torch's value there."""
        value, call = self.truth.taps[self.name(point)], self.truth.calls[self.name(point)]
        value = hidden(value) if point == "scores" else value
        plain = Layout.plain(lambda x: x)
        return replace(
            self, tap=self.name(point), got=value, want=value, plain=value, layout=plain, call=call
        )

    def heads(self) -> int:
        """How many heads the attention has: 1 where its scores have no axis of them."""
        scores = self.at_point("scores")
        return scores.shape[-3] if scores is not None and scores.ndim > 3 else 1

    def sizes(self) -> dict[str, int]:
        """The widths that a scale may be mistaken for, by what they are."""
        query, scores = self.at_point("query"), self.at_point("scores")
        widths: dict[str, int] = {}
        if query is not None and scores is not None:
            width, (length, keys) = query.shape[-1], scores.shape[-2:]
            heads = self.heads()
            widths = {"the head's width": width, "the number of heads": heads}
            widths |= {"all heads' width": heads * width}
            widths |= {"the number of keys": keys, "the number of queries": length}
        owner = self.owner
        for name, call in self.truth.calls.items():
            weight = call.params.get("weight")
            if name.startswith(owner) and weight is not None and weight.ndim == 2:
                widths.setdefault("the model's width", weight.shape[1])
                widths[f"{name}'s width"] = weight.shape[0]
        return widths
