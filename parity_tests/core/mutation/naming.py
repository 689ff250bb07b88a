"""How a change is called: what stands at its place before and after, and little around it.

The name of a change is a key in `equivalent.json`, so it leaves out whatever is deeper than the
change or beside it: `jnp.where(most == -jnp.inf, 0.0, most)  =>  jnp.where(most == -jnp.inf, 1.0,
most)` stays the same wherever that call stands in its function.
"""

import ast
from typing import Any

BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef)
INSIDE = ("body", "orelse", "handlers", "finalbody", "cases")  # of a block
DEPTH, DEEPEST = 2, 30
LEFT_OUT = ast.Name("...", ast.Load())


def line(statement: ast.stmt) -> str:
    """A statement on one line, a block without its body."""
    if isinstance(statement, BLOCKS):
        held = {name: getattr(statement, name, None) for name in ("body", "orelse", "handlers")}
        statement.body, statement.orelse, statement.handlers = [], [], []
        text = ast.unparse(statement)
        for name, value in held.items():
            if value is not None:
                setattr(statement, name, value)
    else:
        text = ast.unparse(statement)
    return " ".join(text.split())


def change_of(site: Any) -> str:
    """`before  =>  after` of a site, as short as shows the change."""
    for depth in range(DEPTH, DEEPEST):
        before, after = _texts(site, depth)
        if before != after:
            break
    return f"{before}  =>  {after}"


def _texts(site: Any, depth: int) -> tuple[str, str]:
    if site.field == "decorator_list":
        return f"@{short(site.old, depth)}", "no decorator"
    whole = isinstance(site.old, ast.stmt) or not _is_leaf(site.old)
    if whole and isinstance(site.new, ast.expr | ast.stmt):
        inner = any(node is site.new for node in ast.walk(site.old))
        return short(site.old, depth), short(site.new, depth - inner)
    at = _around(site)
    name = _argument(site) if isinstance(site.parent, ast.arguments) else None
    before = short(site.old if name else at, depth)
    site.make()
    after = short(site.new if name else at, depth)
    site.undo()
    return (f"{name}={before}", f"{name}={after}") if name else (before, after)


def _around(site: Any) -> ast.AST:
    """The closest expression or statement around a place that says something by itself."""
    for node in reversed(site.path):
        slice_ = isinstance(node, ast.Slice | ast.Starred)
        if isinstance(node, ast.stmt) or (
            isinstance(node, ast.expr) and not slice_ and not _is_leaf(node)
        ):
            return node
    return site.statement


def _argument(site: Any) -> str:
    """The argument whose default value stands at the place."""
    of, i = site.parent, site.position
    if site.field == "kw_defaults":
        return of.kwonlyargs[i].arg
    names = [*of.posonlyargs, *of.args]
    return names[len(names) - len(of.defaults) + i].arg


def short(node: ast.AST, depth: int) -> str:
    """Source text in which expressions deeper than `depth` are dots."""
    return " ".join(ast.unparse(_cut(node, depth)).split())


def _cut(node: ast.AST, depth: int) -> ast.AST:
    if isinstance(node, ast.JoinedStr):
        return LEFT_OUT
    if isinstance(node, ast.expr) and not _is_leaf(node):
        if depth == 0:
            return LEFT_OUT
        depth -= not isinstance(node, ast.Slice | ast.Starred)
    fields = {}
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.stmt | ast.ExceptHandler) and name in (*INSIDE, "decorator_list"):
            value = []
        elif isinstance(value, list):
            value = [_cut(x, depth) if isinstance(x, ast.AST) else x for x in value]
        elif isinstance(value, ast.AST):
            value = _cut(value, depth)
        fields[name] = value
    return ast.copy_location(type(node)(**fields), node)


def _is_leaf(node: ast.AST) -> bool:
    """A name, a number, a dotted name, or one of these with a sign."""
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
        node = node.operand
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name | ast.Constant)
