"""What the sources say of themselves, read by `ast`: classes, their arguments, imports."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def bases_of(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base) for base in node.bases]


def _abstract() -> dict[str, Path]:
    """Base classes that layers share, and their files: modules in files with an underscore."""
    modules, found = {"nnx.Module", "Layer"}, {}
    files = sorted((ROOT / "flax_attn/layers").glob("_*.py"))
    classes = [(x, p) for p in files for x in tree_of(p).body if isinstance(x, ast.ClassDef)]
    for _ in files:  # a class may be based on one of a later file
        for node, path in classes:
            if modules & {*bases_of(node)} and node.name != "Layer":
                modules.add(node.name)
                found[node.name] = path
    return found


ABSTRACT = _abstract()
# What a constructor writes that hands the keywords of every layer on, and those not among them.
KEYWORDS = {"Unpack[LayerInitKeywords]": (), "Unpack[InitKeywords]": ("dropout",)}
KINDS = {"nnx.Module", "Layer", "nn.Module", "torch.nn.Module", *ABSTRACT}


def modules_of(path: Path) -> dict[str, ast.ClassDef]:
    """The classes of a file that are nnx or torch modules, by name."""
    classes = (node for node in tree_of(path).body if isinstance(node, ast.ClassDef))
    return {node.name: node for node in classes if KINDS & {*bases_of(node)}}


def method(of: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """The method of this name, behind its overloads."""
    found = [x for x in of.body if isinstance(x, ast.FunctionDef) and x.name == name]
    return found[-1] if found else None


def arguments(of: ast.ClassDef) -> dict[str, str]:
    """The constructor's arguments, each with how it is given and its default.

    A layer with grouped heads has those of its abstract class too: all of them where it has no
    constructor, the keywords that it does not name where it takes `**grouped`.
    """
    init = method(of, "__init__")
    base = next((x for x in bases_of(of) if x in ABSTRACT), None)
    own = {} if init is None else own_arguments(init)
    if base is None or (init is not None and init.args.kwarg is None):
        return own
    return own | {x: how for x, how in arguments_of_base(base).items() if x not in own}


def arguments_of_base(name: str) -> dict[str, str]:
    classes = (x for x in tree_of(ABSTRACT[name]).body if isinstance(x, ast.ClassDef))
    return arguments(next(x for x in classes if x.name == name))


def own_arguments(init: ast.FunctionDef) -> dict[str, str]:
    given, found = init.args, {}
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + given.defaults
    for kind, names, values in [
        ("positional", plain, defaults),
        ("keyword", given.kwonlyargs, given.kw_defaults),
    ]:
        for arg, value in zip(names, values, strict=True):
            default = "required" if value is None else f"= {ast.unparse(value)}"
            found[arg.arg] = f"{kind}, {default}"
    more = "" if given.kwarg is None else ast.unparse(given.kwarg.annotation or given.kwarg)
    if more in KEYWORDS:
        found |= {x: how for x, how in init_arguments().items() if x not in KEYWORDS[more]}
    return {name: how for name, how in found.items() if name != "self"}


def init_arguments() -> dict[str, str]:
    """What every constructor takes: the fields of `LayerInit`."""
    classes = tree_of(ROOT / "flax_attn/layers/_init.py").body
    init = next(x for x in classes if isinstance(x, ast.ClassDef) and x.name == "LayerInit")
    lines = [x for x in init.body if isinstance(x, ast.AnnAssign)]
    return {
        ast.unparse(x.target): "keyword, "
        + ("required" if x.value is None else f"= {ast.unparse(x.value)}")
        for x in lines
    }


def imports(path: Path, inside_functions: bool = True) -> Iterator[str]:
    """Full names of all that a file imports, relative imports resolved."""
    package = path.relative_to(ROOT).parent.parts
    for node in _nodes(tree_of(path), inside_functions):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*base, *([node.module] if node.module else [])])
            holds_files = (ROOT / base.replace(".", "/")).is_dir()
            yield from (f"{base}.{x.name}" if holds_files else base for x in node.names)


def _nodes(node: ast.AST, inside_functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if inside_functions or not is_function:
            yield child
            yield from _nodes(child, inside_functions)


def ours(path: Path) -> Iterator[tuple[str, str]]:
    """`(import, its part)` for all that a file takes of flax_attn: `flax_attn.masks` is "masks"."""
    for name in imports(path):
        root, *rest = name.split(".")
        if root == "flax_attn":
            yield name, rest[0] if rest else "__init__"
