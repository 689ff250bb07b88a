"""A fault outside the old trial's transformer: its pair, where it is, and what to say of it."""

from dataclasses import dataclass

from .pair import Pair

GROUPS = (
    "huge fills",
    "dropped outputs",
    "kept share",
    "state",
    "axis orders",
    "SDPA originals",
    "between taps",
    "norms and rotary",
    "process",
)
WHOLE = "whole run"


@dataclass(frozen=True)
class Strange:
    """One planted fault, in a pair of its own.

    Attributes:
      name: what is wrong, in words.
      group: one of `GROUPS`.
      pair: compared with nothing, a little or all of the fault in it.
      place: what `report.first.tap` must be, "|" between names that are as right: a tap, "between
        a and b", an output, a gradient; `WHOLE` if no tap may be named.
      hint: words of which one must be said, "|" between them; "" if none is expected.
      low: whether it has a low amplitude.
      noted: whether a note that says where and what is enough.
      lonely: why the pair cannot be shown equal without the fault; "" if it can.
    """

    name: str
    group: str
    pair: Pair
    place: str
    hint: str = ""
    low: bool = True
    noted: bool = False
    lonely: str = ""

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"

    @property
    def places(self) -> list[str]:
        """The names that are right, without `WHOLE`."""
        return [place for place in self.place.split("|") if place != WHOLE]

    @property
    def words(self) -> list[str]:
        """The words of which one must be said."""
        return [word for word in self.hint.split("|") if word]

    @property
    def whole(self) -> bool:
        """Whether a report that blames no tap is right."""
        return WHOLE in self.place.split("|")
