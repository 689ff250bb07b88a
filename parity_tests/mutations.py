"""Mistakes made by a generator in Python source: every way in which one expression can be wrong.

`mutations` makes them in ports, for the trial of the harness (`faults/`), and in the library's own
code, for the trial of the tests (`core/bugs`). A mutation replaces the text of one node.
"""

import ast
from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations

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
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
BOUNDS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}
BOUNDS |= {ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn}
# What is put around an expression, by kind. The last ones no list of usual mistakes has.
AROUND = {
    "gradient stopped": (
        "jax.lax.stop_gradient(y)",
        "2 * jax.lax.stop_gradient(y) - y",
        "2 * y - jax.lax.stop_gradient(y)",
    ),
    "rounded": ("y.astype(jnp.float32).astype(jnp.float64)", "jnp.round(16 * y) / 16"),
    "rolled": ("jnp.roll(y, 1, -1)", "jnp.roll(y, 1, 1)"),
    "flipped": ("jnp.flip(y, -1)", "jnp.flip(y, 1)"),
    "along an axis": ("jnp.cumsum(y, 1) / y.shape[1]", "jnp.sort(y)", "y - jnp.roll(y, 1, -1)"),
    "scaled": ("0.5 * y", "y * y.shape[-1] ** -0.5"),
    "shifted": ("y + 1.0", "y + 0.1 * jnp.arange(y.shape[-1])"),
    "extra activation": ("jax.nn.relu(y)", "jnp.tanh(y)", "jax.nn.silu(y)", "y**3"),
    "extra norm": ("jax.nn.standardize(y)", "jax.nn.softmax(y)", "y / (1 + jnp.max(jnp.abs(y)))"),
    "clipped": ("jnp.clip(y, -0.5, 0.5)", "jnp.maximum(y, 0.1)"),
    "first zeroed": ("y.at[..., 0].set(0)", "y.at[:, 0].set(0)"),
    "weighted by place": (
        "jnp.where(jnp.arange(y.shape[-1]) % 2 == 0, y, 0.5 * y)",
        "y.at[..., -1].multiply(2)",
        "y * 0.9 ** jnp.arange(y.shape[-1])",
    ),
    "mixed": ("0.9 * y + 0.1 * jnp.roll(y, 1, -1)", "0.5 * y + 0.5 * jnp.mean(y)"),
    "signed root": ("jnp.sign(y) * jnp.sqrt(jnp.abs(y))",),
    "small ones dropped": ("jnp.where(jnp.abs(y) < 0.3, 0, y)",),
    "running maximum": ("jax.lax.cummax(y, 1)",),
    "signed logarithm": ("jnp.sign(y) * jnp.log1p(jnp.abs(y))",),
    "wrapped": ("y - jnp.floor(y)",),
    "gated by its neighbour": ("y * jax.nn.sigmoid(jnp.roll(y, 1, -1))",),
    "by its own size": ("y * jnp.mean(jnp.abs(y), -1, keepdims=True)",),
    "less its median": ("y - jnp.median(y, -1, keepdims=True)",),
    "sine added": ("y + 0.1 * jnp.sin(3 * y)",),
    "largest doubled": ("jnp.where(y == jnp.max(y, -1, keepdims=True), 2 * y, y)",),
    "bell": ("1 / (1 + y**2)",),
    "square of the one before": ("y + 0.1 * jnp.roll(y, 1, 1) ** 2",),
}
# Kinds that the catalogue of the search does not have, as it is now.
LACKING = (
    "signed root", "small ones dropped", "running maximum", "signed logarithm", "wrapped",
    "gated by its neighbour", "by its own size", "less its median", "sine added",
    "largest doubled", "bell", "square of the one before",
)  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
      kind: of what sort it is.
      right: the whole module without the fault.
      line: in which it is.
      start, end: where the text of the node is in it, in bytes.
      new: what takes the place of that.
    """

    kind: str
    right: str
    line: int
    start: int
    end: int
    new: str

    def __str__(self) -> str:
        return f"{self.kind}, line {self.line}: {self.old[:90]} -> {self.new[:90]}"

    @property
    def old(self) -> str:
        """The text of the node, in one line."""
        return " ".join(self.right.encode()[self.start : self.end].decode().split())

    @property
    def source(self) -> str:
        """The whole module with the fault."""
        right = self.right.encode()
        return (right[: self.start] + self.new.encode() + right[self.end :]).decode()


def mutations(source: str, names: Collection[str]) -> Iterator[Mutation]:
    """Every fault in the classes and functions with these names at the top of a port."""
    for node, function in _places(source, names):
        for kind, other in _changed(node, function):
            yield _made(source, kind, node, other)


# Another text for the same value, by kind.
THE_SAME = {
    "a third three times": "(y / 3) * 3",
    "there and back": "jnp.flip(jnp.flip(y, -1), -1)",
    "recomputed": "jax.checkpoint(lambda x: x * 1.0)(y)",
    "plus a negative": "y + -0.0",
}


def rewrites(source: str, names: Collection[str]) -> Iterator[Mutation]:
    """Other texts for the same function: what is put around floats, and other operators."""
    for node, _ in _places(source, names):
        if isinstance(node, ast.Call) and _called(node) in ("einsum", "exp", "sigmoid", "tanh"):
            for kind, form in THE_SAME.items():
                yield _made(source, kind, node, f"(lambda y: {form})({ast.unparse(node)})")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            other = ast.BinOp(node.right, node.op, node.left)
            yield _made(source, "operands exchanged", node, other)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            other = ast.BinOp(node.left, ast.Add(), ast.UnaryOp(ast.USub(), node.right))
            yield _made(source, "plus the negative", node, other)


def mutants(source: str) -> Iterator[Mutation]:
    """Every fault in all functions of a module of the library: no word of what ports do wrong."""
    tree = ast.parse(source)
    for node, function in _places(source, [top.name for top in tree.body if hasattr(top, "name")]):
        for change in (_calls, _numbers, _operators, _axes, _conditions):
            for kind, other in change(node):
                yield _made(source, kind, node, other)
        for change in (_names, _orders):
            for kind, other in change(node, function):
                yield _made(source, kind, node, other)


def _made(source: str, kind: str, node: ast.AST, other: ast.AST | str | None) -> Mutation:
    """`other` in the place of a node; None leaves a statement out."""
    starts = _line_starts(source)
    start = starts[node.lineno - 1] + node.col_offset
    end = starts[node.end_lineno - 1] + node.end_col_offset
    text = "pass" if other is None else other if isinstance(other, str) else ast.unparse(other)
    text = f"({text})" if isinstance(node, ast.expr) else text
    return Mutation(kind, source, node.lineno, start, end, text)


@lru_cache(maxsize=1)
def _line_starts(source: str) -> list[int]:
    """Where each line begins, in bytes."""
    return list(accumulate(map(len, source.encode().splitlines(keepends=True)), initial=0))


def _places(source: str, names: Collection[str]) -> Iterator[tuple[ast.AST, ast.FunctionDef]]:
    """The nodes in the bodies of functions, with the innermost function of each."""
    for top in ast.parse(source).body:
        if getattr(top, "name", "") in names:
            for function in (x for x in ast.walk(top) if isinstance(x, ast.FunctionDef)):
                for node in _of_body(function):
                    stored = isinstance(getattr(node, "ctx", None), ast.Store)
                    if isinstance(node, ast.expr | ast.Assign | ast.Return) and not stored:
                        yield node, function


def _of_body(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Every node of a function's statements but annotations, texts, errors and inner functions."""
    left: list[ast.AST] = list(reversed(function.body))
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.JoinedStr | ast.Raise):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        yield node
        inner = [x for x in ast.iter_child_nodes(node) if x is not getattr(node, "annotation", 0)]
        left += reversed(inner)


def _changed(
    node: ast.AST, function: ast.FunctionDef
) -> Iterator[tuple[str, ast.AST | str | None]]:
    """The kind and the replacement of every fault at one node of a port."""
    for change in (_calls, _numbers, _operators, _axes, _letters):
        yield from change(node)
    if function.name != "__init__":
        for change in (_names, _orders, _around):
            yield from change(node, function)


def _conditions(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """A condition that always holds or never, one part of it left out, its opposite."""
    if isinstance(node, ast.IfExp):
        yield "one branch", node.body
        yield "one branch", node.orelse
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and, or", ast.BoolOp(other, node.values)
        yield from (("term left out", part) for part in node.values)
    elif isinstance(node, ast.Compare):
        for held in (True, False):
            yield "condition", ast.Constant(held)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "nothing returned", ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Call):
        for i in range(len(node.keywords)):
            made = deepcopy(node)
            del made.keywords[i]
            yield "argument left out", made


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
