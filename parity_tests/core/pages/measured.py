"""Reads the tables of measured sections, as `flax-attn bench` writes them on pages."""

import re

from flax_attn._internal import markdown as _markdown


def sections(page: str, preset: str, dtype: str = "float32") -> dict[str, str]:
    """Returns, by device, the text between a preset's marks on a page."""
    marks = rf"<!-- bench: {preset}, ([^>]+), {dtype} -->\n(.*?)<!-- end of bench"
    return dict(re.findall(marks, page, re.DOTALL))


def rows(section: str, title: str) -> list[dict[str, str]]:
    """Rows of all tables whose titles hold `title`, a row a competitor, as dicts by heading."""
    every: list[dict[str, str]] = []
    for head, text in re.findall(r"\*\*([^\n]*)\*\*\n\n(\|.*?)\n(?:\n|\Z)", section, re.DOTALL):
        headings, *lines = _markdown.cells(text)
        if title in head and "competitor" in headings:
            every += [dict(zip(headings, line, strict=False)) for line in lines]  # "" at the end
    return every


def factors(cell: str) -> list[float]:
    """Parses the ratio of a cell, or the ends of its range.

    >>> factors("1.2x to 1.31x"), factors("-")
    ([1.2, 1.31], [])
    """
    return [float(factor) for factor in re.findall(r"([\d.]+)x", cell)]
