"""Examples in docstrings become blocks of code: a Griffe extension of the site."""

import re
from typing import Any

from griffe import Extension, Object

# Lines from a prompt on, up to the next blank one.
EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Examples(Extension):
    """Puts a fence around each example."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for every object, before its docstring is read."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """A text whose examples are blocks of Markdown."""
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
