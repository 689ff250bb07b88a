"""What a hint may look at: Flax's value and torch's at one tap, and all that torch recorded."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ...sides.match import Layout, point_of
from ...sides.run import Call, Run

# What Flax's value may be: a sentence, and an array in torch's layout, or a function of how much of
# the fault there is (0: none, 1: all of it) that gives one, or None where it is all or nothing.
Guess = tuple[str | Callable[[float], str], np.ndarray | Callable[[float], np.ndarray | None]]
Guesses = Iterator[Guess]


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
    """

    tap: str
    got: np.ndarray
    want: np.ndarray
    plain: np.ndarray
    layout: Layout
    call: Call
    truth: Run

    @property
    def point(self) -> str:
        """`"scores"` of `"attn.scores"`."""
        return point_of(self.tap)

    def near(self, point: str) -> np.ndarray | None:
        """Torch's value at another point of the same attention."""
        owner, _, own = self.tap.rpartition(".")
        count = own.partition("#")[2]
        name = f"{owner}.{point}" if owner else point
        return self.truth.taps.get(f"{name}#{count}" if count else name)

    def sizes(self) -> dict[str, int]:
        """The widths that a scale may be mistaken for, by what they are."""
        query, scores = self.near("query"), self.near("scores")
        found: dict[str, int] = {}
        if query is not None and scores is not None:
            width, (length, keys) = query.shape[-1], scores.shape[-2:]
            heads = scores.shape[-3] if scores.ndim > 3 else 1
            found = {"the head's width": width, "the number of heads": heads}
            found |= {"all heads' width": heads * width}
            found |= {"the number of keys": keys, "the number of queries": length}
        owner = self.tap.rpartition(".")[0]
        for name, call in self.truth.calls.items():
            weight = call.params.get("weight")
            if name.startswith(owner) and weight is not None and weight.ndim == 2:
                found.setdefault("the model's width", weight.shape[1])
                found[f"{name}'s width"] = weight.shape[0]
        return found
