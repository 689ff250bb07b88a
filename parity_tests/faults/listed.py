"""The faults that people made, a row of listed/*.toml each."""

import inspect
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from ..port import Port
from .subjects import changed, homes

HERE = Path(__file__).with_name("listed")
WHOLE = "whole run"
BLENDS = ("mix", "row", "one")


@dataclass(frozen=True)
class Fault:
    """A text in the place of another in the file of a subject.

    Attributes:
      group: the name of the list.
      port: the name of the subject.
      name: what is wrong, in words.
      old: text that stands once in the file, or a list of such texts.
      new: what takes its place, or their places.
      place: what the report must name first, "|" between names that are as right: a tap, "between a
        and b", an output, a gradient; `WHOLE` if no tap may be named; "" for a rewrite.
      words: of which one must be said, "|" between them; "" if none is expected.
      low: how `new` is blended into `old` at low amplitude (`blend`), a text in place of `new`,
        or "" for a fault that has no amplitude.
      also: further places that are at fault.
      noted: whether a note that says where and what is enough.
      lonely: why the right port cannot be shown equal; "" if it can.
    """

    group: str
    port: str
    name: str
    old: str | list[str]
    new: str | list[str]
    place: str = ""
    words: str = ""
    low: str | list[str] = ""
    also: str = ""
    noted: bool = False
    lonely: str = ""

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"

    @property
    def is_rewrite(self) -> bool:
        return not self.place

    @property
    def whole(self) -> bool:
        """Whether a report that blames no tap is right."""
        return WHOLE in self.place.split("|")

    @property
    def places(self) -> list[str]:
        """The names that are right."""
        return [place for place in self.place.split("|") if place != WHOLE]

    @property
    def wanted(self) -> list[str]:
        """The words of which one must be said."""
        return [word for word in self.words.split("|") if word]

    def source(self, low: bool = False) -> str:
        """The subject's file with the fault in it.

        Raises:
          ValueError: unless `old` stands exactly once in the file.
        """
        text = inspect.getsource(homes()[self.port][0])
        new = self.new
        if low and self.low in BLENDS:
            new = f"_blend.{self.low}(lambda: ({self.old}), lambda: ({self.new}))"
            text = f"from parity_tests.faults import blend as _blend\n{text}"
        elif low:
            new = self.low
        for one, other in zip(_listed(self.old), _listed(new), strict=True):
            if (times := text.count(one)) != 1:
                raise ValueError(f"{self}: {one!r} must stand once, and stands {times} times.")
            text = text.replace(one, other)
        return text

    def wrong(self, low: bool = False) -> Port:
        """The port with the fault in it."""
        return changed(homes()[self.port][1], self.source(low))


@cache
def faults() -> tuple[Fault, ...]:
    """All rows, rewrites too, by list and then as they are written.

    Raises:
      ValueError: for a row with other fields than a fault has.
    """
    return tuple(fault for path in sorted(HERE.glob("*.toml")) for fault in _rows(path))


def _listed(text: str | list[str]) -> list[str]:
    return [text] if isinstance(text, str) else text


def _rows(path: Path) -> Iterator[Fault]:
    known = {field.name for field in fields(Fault)} - {"group", "port", "name"}
    for port, rows in tomllib.loads(path.read_text("utf-8")).items():
        for name, row in rows.items():
            if not {"old", "new"} <= row.keys() <= known:
                raise ValueError(f"{path.name}, {name!r}: has {', '.join(row)}; may have {known}.")
            yield Fault(path.stem.replace("_", " "), port, name, **row)
