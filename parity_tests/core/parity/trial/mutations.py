"""Faults made in the source of a Flax port: every way in which one expression can be wrong."""

import ast
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import combinations
from typing import Any

ACTIVATIONS = ("relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "elu", "leaky_relu")
ACTIVATIONS += ("swish", "exp", "log", "square", "abs", "sin", "cos", "sqrt", "rsqrt")
REDUCTIONS = ("mean", "sum", "max", "min", "var", "std", "prod")
NAMED = {"softmax": "sigmoid", "log_softmax": "softmax", "logsumexp": "max", "argmax": "argmin"}
NAMED |= {"maximum": "minimum", "minimum": "maximum", "repeat": "tile", "zeros": "ones"}
NAMED |= {"ones": "zeros", "cumsum": "cumprod", "tril": "triu", "real": "imag", "imag": "real"}
# Left out they change no number, or nothing runs.
PLAIN = ("reshape", "split", "swapaxes", "moveaxis", "transpose", "Rngs", "Linear", "Param")
OPERATORS: dict[type, tuple[type, ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div, ast.Add),
    ast.Div: (ast.Mult,),
}
BOUNDS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}
# What is put around an expression, by kind. The last ones no list of usual mistakes has.
AROUND = {
    "gradient stopped": ("jax.lax.stop_gradient(y)",),
    "rounded": ("y.astype(jnp.float32).astype(jnp.float64)",),
    "rolled": ("jnp.roll(y, 1, -1)", "jnp.roll(y, 1, 1)"),
    "flipped": ("jnp.flip(y, -1)", "jnp.flip(y, 1)"),
    "scaled": ("0.5 * y", "y * y.shape[-1] ** -0.5"),
    "shifted": ("y + 1.0",),
    "extra activation": ("jax.nn.relu(y)", "jnp.tanh(y)", "jax.nn.silu(y)"),
    "extra norm": ("jax.nn.standardize(y)", "jax.nn.softmax(y)"),
    "clipped": ("jnp.clip(y, -0.5, 0.5)", "jnp.maximum(y, 0.1)"),
    "first zeroed": ("y.at[..., 0].set(0)", "y.at[:, 0].set(0)"),
    "running mean": ("jnp.cumsum(y, 1) / y.shape[1]",),
    "sorted": ("jnp.sort(y, -1)",),
    "by its largest": ("y / (1 + jnp.max(jnp.abs(y)))",),
    "half of it": ("jnp.where(jnp.arange(y.shape[-1]) % 2 == 0, y, 0.5 * y)",),
    "mixed with its neighbour": ("0.9 * y + 0.1 * jnp.roll(y, 1, -1)",),
    "quantised": ("jnp.round(16 * y) / 16",),
    "signed root": ("jnp.sign(y) * jnp.sqrt(jnp.abs(y))",),
    "differences": ("y - jnp.roll(y, 1, -1)",),
    "cubed": ("y**3",),
    "last doubled": ("y.at[..., -1].multiply(2)",),
}
# Kinds that the catalogue of the search does not have, as it is now.
LACKING = (
    "first zeroed", "running mean", "sorted", "by its largest", "half of it",
    "mixed with its neighbour", "quantised", "clipped", "signed root", "differences", "cubed",
    "last doubled",
)  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
      kind: of what sort it is.
      tree: the whole module, right.
      number: of the wrong node, as `ast.walk` counts.
      node: the node, right.
      other: the node, wrong; None if it is left out.
    """

    kind: str
    tree: ast.Module
    number: int
    node: Any
    other: ast.AST | None

    def __str__(self) -> str:
        what = f"{_text(self.node)} -> {_text(self.other)}"
        return f"{self.kind}, line {self.node.lineno}: {what}"

    @property
    def source(self) -> str:
        """The whole module with the fault."""
        return _with(self.tree, self.number, self.other)


def mutations(source: str, names: frozenset[str]) -> Iterator[Mutation]:
    """Every fault in the classes and functions with these names."""
    tree = ast.parse(source)
    for number, node, function in _places(tree, list(ast.walk(tree)), names):
        for kind, other in _changed(node, function):
            if isinstance(other, str):
                other = ast.parse(other, mode="eval").body
            yield Mutation(kind, tree, number, node, other)


def _text(node: ast.AST | None) -> str:
    return ast.unparse(node)[:90] if node is not None else "nothing"


def _with(tree: ast.Module, number: int, other: ast.AST | None) -> str:
    """The source with one node replaced; None leaves a statement out."""
    copy = deepcopy(tree)
    target = list(ast.walk(copy))[number]

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST | None:
            return other if node is target else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Replace().visit(copy)))


def _places(
    tree: ast.Module, nodes: list[ast.AST], names: frozenset[str]
) -> Iterator[tuple[int, ast.AST, ast.FunctionDef]]:
    """The nodes in forward code, numbered as `ast.walk` does, with their functions."""
    numbers = {id(node): i for i, node in enumerate(nodes)}
    for top in tree.body:
        if getattr(top, "name", "") not in names:
            continue
        functions = [x for x in ast.walk(top) if isinstance(x, ast.FunctionDef)]
        for function in functions:
            inner = {id(x) for f in functions if f is not function for x in ast.walk(f)
                     if any(f is y for y in ast.walk(function))}  # fmt: skip
            for node in (x for statement in function.body for x in ast.walk(statement)):
                plain = isinstance(node, ast.expr | ast.Assign) and id(node) not in inner
                if plain and not isinstance(getattr(node, "ctx", None), ast.Store):
                    yield numbers[id(node)], node, function


def _changed(
    node: ast.AST, function: ast.FunctionDef
) -> Iterator[tuple[str, ast.AST | str | None]]:
    """The kind and the replacement of every fault at one node."""
    forward = function.name != "__init__"
    for change in (_calls, _numbers, _operators, _axes, _letters):
        yield from change(node)
    if forward:
        for change in (_names, _orders, _around):
            yield from change(node, function)


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    func = node.func
    return getattr(func, "attr", getattr(func, "id", ""))


def _calls(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Another function, none, or the same twice."""
    name = _called(node)
    if not isinstance(node, ast.Call) or not name:
        return
    for group, kind in ((ACTIVATIONS, "activation"), (REDUCTIONS, "reduction")):
        for other in group if name in group else ():
            if other != name and not (kind == "activation" and _module(node, other) is None):
                yield kind, _renamed(node, other, kind)
    if name in NAMED:
        yield "another function", _renamed(node, NAMED[name], "")
    if name not in PLAIN and node.args and not isinstance(node.args[0], ast.Starred):
        yield "left out", node.args[0]
        twice = deepcopy(node)
        twice.args[0] = deepcopy(node)
        yield "twice", twice
    if isinstance(node.func, ast.Attribute) and name in (*REDUCTIONS, "swapaxes", "astype"):
        yield "left out", node.func.value


def _module(node: ast.Call, name: str) -> str | None:
    numeric = ("exp", "log", "square", "abs", "sin", "cos", "sqrt", "tanh")
    return "jnp" if name in numeric else "jax.lax" if name == "rsqrt" else "jax.nn"


def _renamed(node: ast.Call, name: str, kind: str) -> ast.Call:
    made = deepcopy(node)
    where = _module(node, name) if kind == "activation" else None
    if where:
        made.func = ast.parse(f"{where}.{name}", mode="eval").body
        made.args, made.keywords = made.args[:1], []
    elif isinstance(made.func, ast.Attribute):
        made.func.attr = name
    return made


def _numbers(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Another constant."""
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield "flag", ast.Constant(not node.value)
    elif isinstance(node.value, float):
        for other in (2 * node.value, node.value / 10, 1.5 * node.value, 1 - node.value):
            yield "constant", ast.Constant(other)
    elif isinstance(node.value, int):
        for by in (1, -1):
            yield "integer", ast.Constant(node.value + by)
    elif node.value in ("SAME", "VALID", "CAUSAL"):
        for other in {"SAME", "VALID", "CAUSAL"} - {node.value}:
            yield "padding", ast.Constant(other)


def _operators(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Another operator, an operand left out, two exchanged, a sign."""
    if isinstance(node, ast.BinOp):
        for other in OPERATORS.get(type(node.op), ()):
            yield "operator", ast.BinOp(node.left, other(), node.right)
        yield "term left out", node.left
        yield "term left out", node.right
        if isinstance(node.op, ast.Sub | ast.Div | ast.MatMult | ast.Pow):
            yield "exchanged", ast.BinOp(node.right, node.op, node.left)
        if isinstance(node.op, ast.MatMult):
            for side in ("left", "right"):
                turned = deepcopy(node)
                inner = getattr(node, side)
                text = f"jnp.swapaxes({ast.unparse(inner)}, -1, -2)"
                setattr(turned, side, ast.parse(text, mode="eval").body)
                yield "transposed", turned
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert | ast.Not):
        if not isinstance(node.operand, ast.Constant):
            yield "sign", node.operand
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in BOUNDS:
        yield "bound", ast.Compare(node.left, [BOUNDS[type(node.ops[0])]()], node.comparators)


def _axes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Another axis."""
    if not isinstance(node, ast.Call):
        return
    for i, word in enumerate(node.keywords):
        if word.arg in ("axis", "reduction_axes", "feature_axes", "axes"):
            for axis in (-1, 0, 1, 2):
                made = deepcopy(node)
                made.keywords[i].value = ast.parse(str(axis), mode="eval").body
                if ast.unparse(made) != ast.unparse(node):
                    yield "axis", made


def _letters(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Two letters of an einsum exchanged in one of its terms."""
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and "->" in node.value):
        return
    terms = node.value.replace("->", ",").split(",")
    for i, term in enumerate(terms):
        for a, b in combinations(term.strip().replace(".", "").replace(" ", ""), 2):
            other = term.translate(str.maketrans({a: b, b: a}))
            made = [*terms[:i], other, *terms[i + 1 :]]
            yield "letters", ast.Constant(",".join(made[:-1]) + "->" + made[-1])


def _names(node: ast.AST, function: ast.FunctionDef) -> Iterator[tuple[str, ast.AST]]:
    """Another variable of the function; another attribute of self that is called alike."""
    if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
        return
    stored = [
        x.id for x in ast.walk(function) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
    ]
    known = dict.fromkeys([*(a.arg for a in function.args.args if a.arg != "self"), *stored])
    if node.id in known:
        for other in known:
            if other != node.id:
                yield "another value", ast.Name(other, ast.Load())


def _orders(node: ast.AST, function: ast.FunctionDef) -> Iterator[tuple[str, ast.AST | None]]:
    """Parts in another order, other parts, branches exchanged, a statement left out."""
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Call | ast.Name):
            for i, j in combinations(range(len(target.elts)), 2):
                made = deepcopy(node)
                elements = made.targets[0].elts
                elements[i], elements[j] = elements[j], elements[i]
                yield "parts", made
        if isinstance(target, ast.Name) and target.id in _loaded(node.value):
            yield "statement left out", None
    elif isinstance(node, ast.List | ast.Tuple) and len(node.elts) > 1:
        if all(isinstance(x, ast.Name | ast.Call | ast.BinOp) for x in node.elts):
            elements = [node.elts[1], node.elts[0], *node.elts[2:]]
            yield "joined", type(node)(elements, ast.Load())
    elif _called(node) == "where" and len(node.args) == 3:
        made = deepcopy(node)
        made.args[1:] = made.args[:0:-1]
        yield "branches", made
    elif isinstance(node, ast.Subscript):
        for i, part in enumerate(ast.walk(node.slice)):
            if isinstance(part, ast.Slice) and (part.lower is None) != (part.upper is None):
                made = deepcopy(node)
                other = list(ast.walk(made.slice))[i]
                other.lower, other.upper = other.upper, other.lower
                yield "other part", made


def _loaded(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def _around(node: ast.AST, function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Something put around an expression."""
    shaped = isinstance(node, ast.Call | ast.BinOp) and _called(node) not in ("range", "len")
    if shaped and function.name != "__init__":
        text = ast.unparse(node)
        for kind, forms in AROUND.items():
            yield from ((kind, f"(lambda y: {form})({text})") for form in forms)
