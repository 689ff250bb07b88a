"""Builds HTML elements; strings are escaped unless they are `Html`."""

from html import escape
from math import inf
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


def badness(error: float) -> float:
    """Sort key for errors: NaN counts as inf.

    >>> badness(0.5), badness(float("nan"))
    (0.5, inf)
    """
    return error if error == error else inf


def code(text: Any) -> Html:
    """Formats a name, a value or a command in fixed width."""
    return el("code", text)
