"""Prints the ratio tables while they grow, each row as soon as it is measured."""

from collections.abc import Callable

from .cells import Table
from .result import Results
from .table import split, tables

SPACES = "   "  # between two columns
LEFT = ("competitor", "pass", "backend", "workload", "cache", "strategy, layout")
Say = Callable[[str], object]


class Stream:
    """Prints each row of the first tables once.

    Args:
      results: the growing results.
      say: prints a line.
    """

    def __init__(self, results: Results, say: Say):
        self.results, self.say = results, say
        self._shown: dict[str, int] = {}  # number of rows by table title
        self._header: list[str] = []
        self._widths: list[int] = []

    def update(self) -> None:
        """Prints the rows added since the last call."""
        first, _ = split(tables(self.results))
        for table in first:
            rows = table.rows[self._shown.get(table.title, 0) :]
            if rows and (table.title not in self._shown or table.header != self._header):
                self._begin(table)
            for cells in rows:
                self.say(self._line(cells, table.header))
            self._shown[table.title] = len(table.rows)

    def rest(self) -> list[Table]:
        """Returns the tables that were not printed: every figure."""
        return [table for table in tables(self.results) if table.title not in self._shown]

    def _begin(self, table: Table) -> None:
        """Prints a heading; columns are slightly wider than the latest row needs."""
        self._header = table.header
        cells = zip(table.header, table.rows[-1], strict=True)
        self._widths = [max(len(name), len(cell) + 1) for name, cell in cells]
        self.say(f"\n{table.title}\n")
        self.say(self._line(table.header, table.header))

    def _line(self, cells: list[str], header: list[str]) -> str:
        placed = zip(cells, header, self._widths, strict=True)
        columns = [c.ljust(n) if name in LEFT else c.rjust(n) for c, name, n in placed]
        return SPACES.join(columns).rstrip()
