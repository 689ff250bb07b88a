"""The evidence for a hint: Flax's and torch's value at one tap, and torch's recorded run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ...search.fit import short_numbers
from ...sides.match import Layout, hidden, point_of, sibling
from ...sides.run import Call, Run

# A possible Flax value: a description, and an array in torch's layout or a function of the share of
# the fault (0: none, 1: all) that returns one, or None if the fault cannot apply partially.
Guess = tuple[str | Callable[[float], str], np.ndarray | Callable[[float], np.ndarray | None]]
Guesses = Iterator[Guess]
Values = Iterator[tuple[str, np.ndarray]]


def times(factor: float) -> str:
    """Formats a factor; never as a plain 1.

    >>> times(1.25), times(1 - 2e-12)
    ('1.25', '1 - 2e-12')
    """
    text, more = f"{factor:.8g}", factor - 1
    return text if text != "1" else f"1 {'-' if more < 0 else '+'} {abs(more):.3g}"


def is_short(factor: float, tolerance: float = 1e-10) -> bool:
    """Whether a factor, or one over it or its square, has few digits; others depend on the data.

    `tolerance` is relative.
    """
    return any(abs(factor - x) <= tolerance * abs(factor) for x in short_numbers(factor))


@dataclass(frozen=True)
class Evidence:
    """One tap that differs.

    Attributes:
      tap: torch's name of the tap.
      got, want: Flax's value from torch's inputs, and torch's, both in Flax's layout.
      plain: torch's value in its own layout.
      layout: converts from torch's to Flax's layout.
      call: what torch computed it from.
      truth: torch's recorded run.
      tapped: torch's names of taps that Flax also has; in the local run they have torch's values.
      before: preceding torch taps that it may be computed from, the latest first.
      keep_rates: keep rate of each dropout mask, in Flax and in torch.
      masked: whether NaN in a guess means unknown, next to a fill value.
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
        """The tap's point in an attention: `"scores"` for `"attn.scores"`."""
        return point_of(self.tap)

    @property
    def owner(self) -> str:
        """The path of the module that contains the tap."""
        return self.tap.rpartition(".")[0]

    def name(self, point: str) -> str:
        """Name of the tap at another point of the same attention."""
        return sibling(self.tap, point)

    def at_point(self, point: str) -> np.ndarray | None:
        """Torch's value at another point of the same attention."""
        return self.truth.taps.get(self.name(point))

    def at(self, point: str) -> "Evidence":
        """Evidence for another point of the same attention, as if Flax had torch's value there."""
        value, call = self.truth.taps[self.name(point)], self.truth.calls[self.name(point)]
        value = hidden(value) if point == "scores" else value
        plain = Layout.plain(lambda x: x)
        return replace(
            self, tap=self.name(point), got=value, want=value, plain=value, layout=plain, call=call
        )

    def heads(self) -> int:
        """Number of heads; 1 if the scores have no head axis."""
        scores = self.at_point("scores")
        return scores.shape[-3] if scores is not None and scores.ndim > 3 else 1

    def sizes(self) -> dict[str, int]:
        """Sizes that may be used for a scale by mistake, by description."""
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
