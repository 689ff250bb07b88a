"""Wraps what people read at words; code, commands and names stay whole."""

import re
import textwrap

# Their spaces are no places to break a line, unless they are longer than one.
CODE = re.compile(r"`[^`]*`|pip install \S+|flax-attn [\w-]+(?: -{1,2}[\w-]+)*")
GAP = re.compile(r"(?<=\S) {2,}(?=\S)")  # between two columns
REMOVED = "\0"  # stands for a space inside code


def wrapped(text: str, width: int) -> str:
    """Wraps each line of `text` that is longer than `width` columns, at spaces.

    A word longer than that is not broken. Lines that go on keep the indentation, or start below the
    last column of an aligned line. Lines of tables in Markdown, and commands in a column of their
    own, are unchanged.

    >>> print(wrapped("see  one sentence that is long, and a/path/that/is/longer/still", 24))
    see  one sentence that
         is long, and
         a/path/that/is/longer/still
    """
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    gaps = [gap.end() for gap in GAP.finditer(line)]
    column = gaps[-1] if gaps else 0
    is_command = bool(gaps) and line.startswith("flax-attn ", column)
    if len(line) <= width or line.lstrip().startswith("|") or is_command or column > width // 2:
        return line
    indent = column or len(line) - len(line.lstrip())
    room = width - indent
    whole = CODE.sub(
        lambda code: code[0] if len(code[0]) > room else code[0].replace(" ", REMOVED),
        line[indent:],
    )
    parts = textwrap.wrap(
        whole,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return (line[:indent] + "\n".join(parts)[indent:]).replace(REMOVED, " ")
