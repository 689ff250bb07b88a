"""The small changes: every place of a source where one applies, and the source with it made.

Operators, arguments, constants, conditions, slices, results and statements are changed, one at a
time. Annotations, docstrings, imports, type aliases, overloads, `zip(strict=)` and the words of
an error are left alone.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from .naming import change_of, line

COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
PAIRS = """min max, any all, maximum minimum, smaller larger, argmax argmin, sum max, zeros ones,
isposinf isneginf, isnan isinf, isfinite isnan, exp expm1, log log1p, tanh sin, True_ False_,
ValueError TypeError, TypeError ValueError"""
NAMES: dict[str, str] = {}
for one, two in (pair.split() for pair in PAIRS.split(",")):
    NAMES.setdefault(one, two)
    NAMES.setdefault(two, one)
COMMUTE = {"min", "max", "minimum", "maximum", "smaller", "larger", "swapaxes"}
LIBRARIES = {"np", "jnp", "jax", "math", "ml_dtypes"}
KEPT = (ast.FunctionDef, ast.ClassDef, ast.Return)  # statements that are not left out
UNTOUCHED = (ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Pass)
UNREAD = ("annotation", "returns", "ctx", "op", "ops", "format_spec")


@dataclass(eq=False)
class Site:
    """One place of a tree and the node to stand there instead."""

    where: str  # "Window.key_range"
    statement: ast.stmt
    path: tuple[ast.AST, ...]  # from the statement to the parent
    field: str
    position: int | None
    new: ast.AST | None  # None: the entry of a list falls away

    def __post_init__(self):
        self.parent = self.path[-1]
        self.held = getattr(self.parent, self.field)
        self.old = self.held if self.position is None else self.held[self.position]

    def make(self) -> None:
        if self.position is None:
            setattr(self.parent, self.field, self.new)
        else:
            new = [] if self.new is None else [self.new]
            rest = self.held[self.position + 1 :]
            setattr(self.parent, self.field, [*self.held[: self.position], *new, *rest])

    def undo(self) -> None:
        setattr(self.parent, self.field, self.held)

    @cached_property
    def texts(self) -> tuple[str, str]:
        """The statement as it is, and as it is with the change."""
        before = line(self.statement)
        self.make()
        after = line(self.new if isinstance(self.new, ast.stmt) else self.statement)
        self.undo()
        return before, after

    @cached_property
    def parts(self) -> frozenset[str]:
        """The names that the statement assigns to, and the keywords that hold the place."""
        targets = getattr(self.statement, "targets", [getattr(self.statement, "target", None)])
        named = [t.id for t in targets if isinstance(t, ast.Name)]
        keywords = [n.arg for n in (*self.path, self.old) if isinstance(n, ast.keyword) and n.arg]
        return frozenset([*named, *keywords])


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    `where` and `change` together are told apart from all other changes of the file, and outlive
    edits elsewhere in the function. `name` says the whole statement, for a reader.
    """

    file: str
    number: int
    line: int
    name: str
    where: str = ""
    change: str = ""
    parts: frozenset[str] = frozenset()

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.where, self.change


def mutants(file: str, source: str) -> list[Mutant]:
    """All mutants of a source, in its order."""
    found, times = [], Counter()
    seen: set[tuple[int, str]] = set()
    for number, site in enumerate(sites(ast.parse(source))):
        before, after = site.texts
        if before == after or (id(site.statement), after) in seen:
            continue
        seen.add((id(site.statement), after))
        name = f"{site.where}: {before}  =>  {after}"
        times[name] += 1
        name += f"  ({times[name]})" if times[name] > 1 else ""
        place, change = site.statement.lineno, change_of(site)
        found.append(Mutant(file, number, place, name, site.where, change, site.parts))
    return _told_apart(found)


def _told_apart(found: list[Mutant]) -> list[Mutant]:
    """A change that occurs several times in a function says which of how many it is."""
    often, times, apart = Counter(m.key for m in found), Counter(), []
    for mutant in found:
        times[mutant.key] += 1
        if often[mutant.key] > 1:
            change = f"{mutant.change}  ({times[mutant.key]} of {often[mutant.key]})"
            mutant = replace(mutant, change=change)
        apart.append(mutant)
    return apart


def mutated(source: str, number: int) -> str:
    """The source with the change of that number made."""
    tree = ast.parse(source)
    site = sites(tree)[number]
    site.make()
    return ast.unparse(ast.fix_missing_locations(tree))


def sites(tree: ast.Module) -> list[Site]:
    """Every place of a tree and every change there, numbered by their order."""
    return list(_walk(tree, "", ast.Pass(), (tree,)))


def _walk(
    node: ast.AST, where: str, statement: ast.stmt, path: tuple[ast.AST, ...]
) -> Iterator[Site]:
    for field, value in ast.iter_fields(node):
        if field in UNREAD or (isinstance(node, ast.Raise) and field == "cause"):
            continue
        for position, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or _is_left_alone(child, node):
                continue
            owner = child if isinstance(child, ast.stmt) else statement
            at = position if isinstance(value, list) else None
            for new in _instead(child, field):
                yield Site(where or "module", owner, path, field, at, new)
            inner = where
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{where}.{_name(child)}".lstrip(".")
            if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
                yield from _raised(child, where)
            else:
                above = () if isinstance(child, ast.stmt) else path
                yield from _walk(child, inner, owner, (*above, child))


def _name(node: ast.FunctionDef | ast.ClassDef) -> str:
    """The name; of the nameless branches of a singledispatch `seen[Dense]`."""
    for decorator in node.decorator_list if node.name == "_" else []:
        if isinstance(decorator, ast.Attribute) and decorator.attr == "register":
            return f"{ast.unparse(decorator.value)}[{ast.unparse(node.args.args[0].annotation)}]"
    return node.name


def _raised(node: ast.Raise, where: str) -> Iterator[Site]:
    """Only the kind of an error is changed, not its words."""
    for new in _instead(node.exc.func, "func"):
        yield Site(where or "module", node, (node, node.exc), "func", None, new)


def _is_left_alone(node: ast.AST, parent: ast.AST) -> bool:
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    alias = (
        isinstance(node, ast.Assign)
        and isinstance(parent, ast.Module)
        and ast.unparse(node.targets[0]).istitle()
    )
    overload = isinstance(node, ast.FunctionDef) and "overload" in map(
        ast.unparse, node.decorator_list
    )
    checked = isinstance(node, ast.keyword) and node.arg == "strict"
    return docstring or alias or overload or checked or isinstance(node, UNTOUCHED)


def _constant(value: object) -> ast.Constant:
    return ast.Constant(value)


def _instead(node: ast.AST, field: str) -> Iterator[ast.AST | None]:
    """What may stand instead of a node that is its parent's `field`."""
    given = isinstance(node, ast.expr | ast.keyword)
    if given and field in ("decorator_list", "keywords", "args"):
        yield None
    if field in ("test", "ifs"):
        yield _constant(True)
        yield _constant(False)
    if field in ("lower", "upper"):
        yield None
    if isinstance(node, ast.stmt) and not isinstance(node, KEPT):
        yield ast.Pass()
    made = _CHANGES.get(type(node))
    if made is not None:
        yield from made(node)


def _of_return(node: ast.Return) -> Iterator[ast.AST]:
    yield ast.Return(_constant(None))


def _of_compare(node: ast.Compare) -> Iterator[ast.AST]:
    for i, op in enumerate(node.ops):
        for other in COMPARISONS[type(op)]:
            yield ast.Compare(
                node.left, [*node.ops[:i], other(), *node.ops[i + 1 :]], node.comparators
            )


def _of_arithmetic(node: ast.BinOp) -> Iterator[ast.AST]:
    if type(node.op) in ARITHMETIC:
        yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    yield node.left
    yield node.right


def _of_logic(node: ast.BoolOp) -> Iterator[ast.AST]:
    yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    for i in range(len(node.values)):
        rest = [*node.values[:i], *node.values[i + 1 :]]
        yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)


def _of_sign(node: ast.UnaryOp) -> Iterator[ast.AST]:
    yield node.operand
    if isinstance(node.operand, ast.Attribute) and node.operand.attr == "inf":
        yield _constant(0.0)


def _of_constant(node: ast.Constant) -> Iterator[ast.AST]:
    match node.value:
        case bool():
            yield _constant(not node.value)
        case int():
            yield _constant(node.value + 1)
            yield _constant(node.value - 1)
        case float():
            yield _constant(2 * node.value if node.value else 1.0)
            yield _constant(node.value / 2)
        case str():
            yield _constant(node.value + "x")


def _of_name(node: ast.Name) -> Iterator[ast.AST]:
    if isinstance(node.ctx, ast.Load) and node.id in NAMES:
        yield ast.Name(NAMES[node.id], ast.Load())


def _of_attribute(node: ast.Attribute) -> Iterator[ast.AST]:
    if node.attr in NAMES:
        yield ast.Attribute(node.value, NAMES[node.attr], node.ctx)


def _of_call(node: ast.Call) -> Iterator[ast.AST]:
    """The call left out, and two neighbours among its arguments swapped."""
    path = ast.unparse(node.func).split(".")
    if isinstance(node.func, ast.Attribute) and path[0] not in LIBRARIES:
        yield node.func.value
    elif node.args and not isinstance(node.args[0], ast.Starred):
        yield node.args[0]
    for args in [] if path[-1] in COMMUTE else _swapped(node.args):
        yield ast.Call(node.func, args, node.keywords)


def _of_tuple(node: ast.Tuple) -> Iterator[ast.AST]:
    if isinstance(node.ctx, ast.Load):
        for elements in _swapped(node.elts):
            yield ast.Tuple(elements, node.ctx)


def _of_index(node: ast.Subscript) -> Iterator[ast.AST]:
    if isinstance(node.ctx, ast.Load):
        yield node.value


def _of_choice(node: ast.Dict) -> Iterator[ast.AST]:
    for i in range(len(node.keys)):
        yield ast.Dict(
            [*node.keys[:i], *node.keys[i + 1 :]], [*node.values[:i], *node.values[i + 1 :]]
        )


def _swapped(nodes: list) -> Iterator[list]:
    for i in range(len(nodes) - 1):
        yield [*nodes[:i], nodes[i + 1], nodes[i], *nodes[i + 2 :]]


_CHANGES = {
    ast.Return: _of_return,
    ast.Compare: _of_compare,
    ast.BinOp: _of_arithmetic,
    ast.BoolOp: _of_logic,
    ast.UnaryOp: _of_sign,
    ast.Constant: _of_constant,
    ast.Name: _of_name,
    ast.Attribute: _of_attribute,
    ast.Call: _of_call,
    ast.Tuple: _of_tuple,
    ast.Subscript: _of_index,
    ast.Dict: _of_choice,
}
