"""Builds HTML elements; strings are escaped unless they are `Html`."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

VOID = ("meta", "link")


class Html(str):
    """Markup, inserted unchanged; any other string is escaped."""


def el(name: str, /, *children: Any, **attributes: Any) -> Html:
    """One element; None among children and attributes is left out.

    A trailing "_" of an attribute's name is dropped, other "_" become "-".

    >>> el("p", "a < b", el("b", 3), class_="note", id=None)
    '<p class="note">a &lt; b<b>3</b></p>'
    """
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    end = "" if name in VOID else f"{join(children)}</{name}>"
    return Html(f"<{name}{text}>{end}")


def join(children: Any) -> Html:
    """Concatenates the children, escaping those that are not markup."""
    return Html(
        "".join(
            child if isinstance(child, Html) else escape(str(child), quote=False)
            for child in children
            if child is not None
        )
    )


def number(value: float) -> str:
    """Formats an error or a limit with two digits: 3.9e-16, 0, inf, nan.

    >>> number(3.94e-16), number(0.0), number(float("inf"))
    ('3.9e-16', '0', 'inf')
    """
    return "0" if value == 0 else f"{value:.1e}"


def code(text: Any) -> Html:
    """Formats a name, a value or a command in fixed width."""
    return el("code", text)


def table_of(
    headings: Sequence[str], rows: Iterable[tuple[Sequence[Any], bool]], class_: str | None = None
) -> Html:
    """A table that scrolls sideways; each row is its cells, and whether they are marked as bad.

    >>> table_of(["name"], [(["a < b"], True)])[64:-22]
    '<tbody><tr class="bad"><td>a &lt; b</td></tr>'
    """
    head = el("thead", el("tr", *(el("th", text) for text in headings)))
    body = [
        el("tr", *(el("td", cell) for cell in cells), class_="bad" if bad else None)
        for cells, bad in rows
    ]
    return el("div", el("table", head, el("tbody", *body), class_=class_), class_="scroll")
