"""What `flax-attn bench` prints: brief tables, tables with every figure, and remarks."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as Shown
from rich.text import Text

from ..bench import brief
from ..bench.result import MEASURED, Results
from ..bench.stream import LEFT, Stream
from ..bench.table import Table, split, tables
from .wrap import wrapped

WINNER = r"(?<!\S)[\d.,]+(?: [a-zA-Z]+|x| to [\d.]+x)*\*(?!\S)"  # an amount or a ratio, marked
MORE = "--all-figures shows the quartiles, rates, memory, errors and all the rest."


class Screen:
    """Prints the results of a benchmark at the width of the terminal.

    Args:
      console: where to print; 80 columns wide if it is no terminal.
      all_figures: whether tables have every figure, however wide they are.
    """

    def __init__(self, console: Console, all_figures: bool):
        self.console, self.all_figures = console, all_figures

    def stream(self, results: Results) -> Stream | brief.BriefStream:
        """Returns what prints each row as soon as it is measured."""
        if self.all_figures:
            return Stream(results, self.print_line)
        return brief.BriefStream(results, self.print_line, self.console.width)

    def print_line(self, line: str) -> None:
        """Prints a line of a table unchanged, with winners bold and green on a terminal."""
        text = Text(line)
        text.highlight_regex(WINNER, "bold green")
        self.console.print(text, soft_wrap=True)

    def print_text(self, text: str) -> None:
        """Prints sentences, wrapped at words."""
        self.console.out(wrapped(text, self.console.width), highlight=False)

    def print_tables(self, comparison: Sequence[Table], whole: Results, several: bool) -> None:
        """Prints old times over new ones, and the results again if they are of several runs."""
        if self.all_figures:
            self.print_wide([*comparison, *(split(tables(whole))[0] if several else ())])
            return
        shown = [brief.compared(table) for table in comparison]
        for group in [*shown, *(brief.groups(whole) if several else ())]:
            for line in brief.text_of(group, self.console.width):
                self.print_line(line)

    def print_wide(self, all_tables: Sequence[Table]) -> None:
        """Prints tables as wide as they are."""
        for table in all_tables:
            self.console.print(f"\n{table.title}", markup=False, highlight=False)
            shown = Shown(box=box.SIMPLE_HEAD)
            for name in table.header:
                side: Any = "left" if name in LEFT else "right"
                shown.add_column(name, justify=side, no_wrap=True)
            for cells in table.rows:
                shown.add_row(*cells)
            Console(width=max(self.console.width, 200), file=self.console.file).print(shown)

    def print_legend(self, results: Results) -> None:
        """Says what the mark means, and how to see more."""
        if self.all_figures or not brief.groups(results):
            return
        if any(row.status == MEASURED for row in results.rows):
            best = "the least memory of a race; several if they are equal"
        else:
            best = "the fastest of a race; several if the middle halves of their timings overlap"
        self.print_text(f"\n{brief.MARK} {best}. {MORE}")
