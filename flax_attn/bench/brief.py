"""Tables that fit a narrow terminal: amounts, ratios and the best entry of each race.

A race is one workload in one pass. The races of a group are the lines of a grid if its columns
fit; else each competitor has a line, below a line that names the workload.
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from . import scale, steps
from .cells import Table, bytes_of, time_of, times
from .result import MEASURED, WRONG, Results, Row
from .table import base, cell, heading, races, ratio, value

MARK, SPACES, INDENT = "*", "  ", "  "
AMOUNT_COLUMNS = 8  # width of a column that holds a time or a ratio with its mark


class Entry(NamedTuple):
    """One competitor in a race: its name, its cells with the amount first, and whether it won."""

    name: str
    cells: tuple[str, ...]
    best: bool = False

    @property
    def marked(self) -> tuple[str, ...]:
        """The cells; the first ends with the mark of a winner, or with a space."""
        return f"{self.cells[0]}{MARK if self.best else ' '}", *self.cells[1:]


class Race(NamedTuple):
    """A race: the cells that name its workload, and its entries, the best first."""

    place: tuple[str, ...]
    entries: tuple[Entry, ...]


class Group(NamedTuple):
    """Races below one title.

    Attributes:
      title: what they share.
      places: headings of the cells that name a workload.
      heads: headings of an entry's cells.
      races: the races, in order.
      base: the competitor to whose amount ratios refer; "" if there is no grid.
      longest: length of the longest name that races may get later, if known.
    """

    title: str
    places: tuple[str, ...]
    heads: tuple[str, ...]
    races: list[Race]
    base: str = ""
    longest: int = 0

    @property
    def names(self) -> list[str]:
        """The competitors, in order of appearance."""
        return list(dict.fromkeys(entry.name for race in self.races for entry in race.entries))


def groups(results: Results) -> list[Group]:
    """Returns the races of all results by what their workloads share."""
    if any(row.workload.stored for row in results.rows):
        shown = [_decoding(results.rows)]
    elif any(row.workload.devices for row in results.rows):
        lengths = groupby(results.rows, key=lambda row: row.workload.length)
        shown = [_of_devices(list(rows)) for _, rows in lengths]
    else:
        shared = {}
        for row in results.rows:
            shared.setdefault(heading(row.workload), []).append(row)
        shown = [_of_workloads(title, rows) for title, rows in shared.items()]
    return [group for group in shown if group.races]


def winners(rows: Iterable[Row], amount: Callable[[Row], float | None] = value) -> set[str]:
    """Names of the best competitors of a race, by least amount; none if fewer than two have one.

    Timings tie if the middle halves of the two overlap: the first quartile of one is no longer than
    the third quartile of the fastest. All that tie with the fastest are winners. Amounts of memory
    tie only if they are equal.
    """
    amounts = {row.competitor: (x, row.quartiles) for row in rows if (x := amount(row))}
    if len(amounts) < 2:
        return set()
    least, quartiles = min(amounts.values(), key=lambda pair: pair[0])
    limit = max(least, quartiles[1]) if quartiles else least
    return {name for name, (x, q) in amounts.items() if min(x, q[0] if q else x) <= limit}


def _of_workloads(title: str, rows: Sequence[Row]) -> Group:
    """Races of attention or of whole layers: amounts, and ratios to this library's."""
    is_memory = any(row.status == MEASURED for row in rows)
    bases = [of.competitor for race in races(rows) if (of := base(race))]
    shown = []
    for race in races(rows):
        w, of, best = race[0].workload, base(race), winners(race)
        ranked = sorted(race, key=lambda row: value(row) or float("inf"))
        entries = [_entry(row, cell(row), ratio(row, of), row.competitor in best) for row in ranked]
        place = (str(w.length), f"{w.batch} x {w.heads}", race[0].which)
        shown.append(Race(place, tuple(entries)))
    what = "memory" if is_memory else "time"
    over = f" over that of {bases[0]}" if bases else ""
    return Group(
        f"{what}{over}: {title}",
        ("T", "B x N", "pass"),
        (what, "ratio"),
        [race for race in shown if any(entry.cells[0] != "-" for entry in race.entries)],
        bases[0] if bases else "",
    )


def _entry(row: Row, amount: str, by: str, best: bool, *more: str) -> Entry:
    """An entry; one that is wrong says so in place of its amount."""
    if row.status == WRONG:
        return Entry(row.competitor, (WRONG, "", *("" for _ in more)))
    return Entry(row.competitor, (amount, by, *more), best)


def _decoding(rows: Sequence[Row]) -> Group:
    """Races of decoding steps, by the least time of each."""
    shown, names = [], list(dict.fromkeys(row.competitor for row in rows))
    for w, race in steps.races(rows):
        of = race.get(names[0])
        best = winners((row for name, row in race.items() if name != steps.LIMIT), steps.least)
        ranked = sorted(race.values(), key=lambda row: steps.least(row) or float("inf"))
        entries = [
            _entry(
                row,
                time_of(steps.least(row)) or "-",
                steps.ratio(row, of) if of else "",
                row.competitor in best,
            )
            for row in ranked
        ]
        if any(entry.cells[0] != "-" for entry in entries):
            shown.append(Race(tuple(steps.of_workload(w)), tuple(entries)))
    title = f"time over that of {names[0]}: one step of a whole layer"
    return Group(title, tuple(steps.HEADER), ("a step", "ratio"), shown, names[0])


def _of_devices(rows: Sequence[Row]) -> Group:
    """Races of strategies and layouts over several devices, by memory."""
    alone = {row.which: row.temporary for row in rows if row.workload.devices == 1}
    shown = []
    for (devices, which), race in groupby(rows, key=lambda row: (row.workload.devices, row.which)):
        race = list(race)
        best = winners(race)
        entries = []
        for row in sorted(race, key=lambda row: value(row) or float("inf")):
            first = alone.get(which)
            cells = [times(row.temporary / first) if row.temporary and first else ""]
            if row.counts:
                cells.append(times(row.counts["blocks"] / row.counts["mean"]))
                cells.append(bytes_of(int(row.counts["sent"])) if devices > 1 else "")
            cells += [""] * (3 - len(cells))
            entries.append(_entry(row, cell(row), cells[0], row.competitor in best, *cells[1:]))
        if any(entry.cells[0] != "-" for entry in entries):
            shown.append(Race((str(devices), which), tuple(entries)))
    heads = ("memory", "of 1 device", "busiest/mean", "sent")
    longest = max(len(", ".join(way)) for way in scale.WAYS)
    title = scale.title_of(rows[0].workload)
    return Group(title, ("devices", "pass"), heads, shown, longest=longest)


def compared(table: Table) -> Group:
    """The races of a table of old times over new ones."""
    shown = []
    for place, lines in groupby(table.rows, key=lambda cells: (cells[2], cells[3])):
        entries = [Entry(line[1], (line[0], *line[4:])) for line in lines]
        shown.append(Race(place, tuple(entries)))
    return Group(table.title, ("workload", "pass"), ("ratio", "old", "new"), shown)


class TextTable:
    """Lays out a group in lines of at most `width` columns, unless a name is longer than that.

    Args:
      group: the group; races that it gets later have the same columns.
      width: of the terminal, in columns.
    """

    def __init__(self, group: Group, width: int):
        self.group, self.width = group, width
        self._columns = [group.base, *(name for name in group.names if name != group.base)]
        last = group.races[-1]
        self._places = [
            max(len(head), len(text) + 1)
            for head, text in zip(group.places, last.place, strict=True)
        ]
        self._grid = [max(len(name), AMOUNT_COLUMNS) for name in self._columns]
        sizes = [*self._places, *self._grid]
        longest = max(
            len(mark) for race in group.races for mark in _grid_cells(race, self._columns)
        )
        fits = sum(sizes) + len(SPACES) * (len(sizes) - 1) <= width and longest <= AMOUNT_COLUMNS
        self.is_grid = bool(group.base) and fits and len(group.heads) == 2
        marked = [group.heads, *(x.marked for race in group.races for x in race.entries)]
        self._cells = [max(map(len, column)) for column in zip(*marked, strict=True)]
        self._name = max(*map(len, group.names), group.longest, len("competitor"))
        total = len(INDENT) + self._name + sum(self._cells) + len(SPACES) * len(self._cells)
        if total + len(self._cells) <= width:  # room for amounts of one more digit
            self._cells = [size + 1 for size in self._cells]

    def title(self) -> str:
        """The title of the group, in as many lines as it needs."""
        return f"\n{self._filled(self.group.title)}\n"

    def header(self) -> str:
        """The line of headings."""
        if self.is_grid:
            names = (f"{name} " for name in self._columns)
            return self._grid_line(self.group.places, names)
        return self._entry_line("competitor", [f"{self.group.heads[0]} ", *self.group.heads[1:]])

    def lines(self, race: Race) -> list[str]:
        """The lines of one race."""
        if self.is_grid:
            return [self._grid_line(race.place, _grid_cells(race, self._columns))]
        named = zip(self.group.places, race.place, strict=True)
        label = ", ".join(f"{head} = {text}" for head, text in named)
        entries = [entry for entry in race.entries if entry.cells[0] != "-"]
        return [
            self._filled(label),
            *(self._entry_line(entry.name, entry.marked) for entry in entries),
        ]

    def _filled(self, text: str) -> str:
        return textwrap.fill(text, self.width, break_long_words=False, break_on_hyphens=False)

    def _grid_line(self, place: Iterable[str], cells: Iterable[str]) -> str:
        left = [
            text.ljust(size) if head == "pass" else text.rjust(size)
            for text, size, head in zip(place, self._places, self.group.places, strict=True)
        ]
        right = [text.rjust(size) for text, size in zip(cells, self._grid, strict=True)]
        return SPACES.join([*left, *right]).rstrip()

    def _entry_line(self, name: str, cells: Iterable[str]) -> str:
        right = [text.rjust(size) for text, size in zip(cells, self._cells, strict=True)]
        return SPACES.join([INDENT + name.ljust(self._name), *right]).rstrip()


def _grid_cells(race: Race, names: Sequence[str]) -> list[str]:
    """The amount of the base and the ratios of the others, each with its mark."""
    entries = {entry.name: entry for entry in race.entries}
    cells = []
    for i, name in enumerate(names):
        entry = entries.get(name)
        text = "-" if entry is None else entry.cells[0]
        if entry is not None and i and text not in ("-", WRONG):
            text = entry.cells[1] or "-"
        cells.append(f"{text}{MARK if entry is not None and entry.best else ' '}")
    return cells


class BriefStream:
    """Prints each race once, as soon as it is measured.

    Args:
      results: the growing results.
      say: prints a line.
      width: of the terminal, in columns.
    """

    def __init__(self, results: Results, say: Callable[[str], object], width: int):
        self.results, self.say, self.width = results, say, width
        self._shown: dict[str, int] = {}  # number of races by the title of their group
        self._tables: dict[str, TextTable] = {}

    def update(self) -> None:
        """Prints the races added since the last call."""
        for group in groups(self.results):
            new = group.races[self._shown.get(group.title, 0) :]
            if new and group.title not in self._tables:
                self._tables[group.title] = TextTable(group, self.width)
                self.say(self._tables[group.title].title())
                self.say(self._tables[group.title].header())
            for race in new:
                for line in self._tables[group.title].lines(race):
                    self.say(line)
            self._shown[group.title] = len(group.races)

    def rest(self) -> list[Table]:
        """Returns no table: the other figures are shown on request."""
        return []


def text_of(group: Group, width: int) -> list[str]:
    """The lines of a whole group: its title, the headings and all races."""
    table = TextTable(group, width)
    lines = [line for race in group.races for line in table.lines(race)]
    return [table.title(), table.header(), *lines]
