"""The table of `flax-attn parity --families`: one row per model_type of published configs."""

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from ..families import ALIASES
from ..parity.cases.certificate import Line
from ..parity.cases.markdown import PageFacts

HEADINGS = ("model_type", "in transformers", "layer", "float64", "grads", "", "the same attention")


def table(lines: Sequence[Line], about: Mapping[str, PageFacts], strict: bool = False) -> Table:
    """The table of all families, sorted by model type.

    Args:
      lines: lines of the certificate, one per family.
      about: facts by family, with the name of its layer.
      strict: whether equality within rounding noise only is shown as different.
    """
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for heading in HEADINGS:
        justify = "right" if heading in ("float64", "grads") else "left"
        shown.add_column(heading, justify=justify, no_wrap=heading != HEADINGS[-1])
    for line in sorted(lines, key=lambda line: line.variant):
        whole = line.ok and (not strict or all(report.certain for report in line.reports))
        verdict = Text(line.verdict, "green" if whole else "red")
        errors = (line.error("output"), line.error("gradient"))
        names = (line.variant, line.proven_equal_to, about[line.variant].layer)
        aliases = [alias for alias, family in ALIASES.items() if family == line.variant]
        shown.add_row(*names, *errors, verdict, ", ".join(aliases))
    return shown
