"""Marks: a call at the head of every function and branch, which names its block by `file:line`.

The recorder puts the marks into the code and the runner looks for the block of a patched line; both
take the blocks from here. A block is the body of a function, of an `if` or `else`, of an `except`
or of a `case`. It is named by the line of its `def`, or of its first statement.
"""

import ast
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import NamedTuple

NAME = "__entered__"  # of the function among the builtins that every mark calls


class Block(NamedTuple):
    """The lines `line` to `last`, of which the first is the name."""

    line: int
    last: int
    is_function: bool


def blocks(tree: ast.AST) -> list[Block]:
    """All blocks of a module."""
    return [
        Block(line, body[-1].end_lineno or line, isinstance(node, _FUNCTIONS))
        for node in ast.walk(tree)
        for line, body in _bodies(node)
    ]


def around(known: list[Block], line: int) -> list[Block]:
    """The blocks that hold a line, the innermost first."""
    return sorted((x for x in known if x.line <= line <= x.last), key=lambda x: -x.line)


def mark(tree: ast.AST, file: str) -> None:
    """Puts a call of `NAME` with "file:line" at the head of every block of a module."""
    bodies = [(node, *body) for node in ast.walk(tree) for body in _bodies(node)]
    for node, line, body in bodies:
        has_docstring = isinstance(node, _FUNCTIONS) and ast.get_docstring(node, False) is not None
        call = ast.Expr(ast.Call(ast.Name(NAME, ast.Load()), [ast.Constant(f"{file}:{line}")], []))
        for part in ast.walk(call):
            if isinstance(part, ast.expr | ast.stmt):
                part.lineno = part.end_lineno = line
                part.col_offset = part.end_col_offset = 0
        body.insert(int(has_docstring), call)


def changed_lines(before: str, after: str) -> list[int]:
    """The lines of `before`, from 1, that `after` has otherwise, or beside which it has more."""
    one, two = before.splitlines(), after.splitlines()
    lines: list[int] = []
    for kind, start, stop, _, _ in SequenceMatcher(None, one, two, autojunk=False).get_opcodes():
        if kind != "equal":
            lines += range(start + 1, stop + 1) if stop > start else [max(start, 1)]
    return lines


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _bodies(node: ast.AST) -> Iterator[tuple[int, list[ast.stmt]]]:
    """The bodies of a node that are blocks, each with its line. An `elif` is a node of its own."""
    if isinstance(node, _FUNCTIONS):
        yield node.lineno, node.body
    if isinstance(node, ast.If | ast.ExceptHandler | ast.match_case):
        yield node.body[0].lineno, node.body
    if isinstance(node, ast.If) and node.orelse:
        is_elif = len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
        if not is_elif:
            yield node.orelse[0].lineno, node.orelse
