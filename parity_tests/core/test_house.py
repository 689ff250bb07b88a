"""The house in order: twins complete, imports one way, files short, torch never brought unasked.

All is read from the sources by `ast`, so that torch need not be there.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import flax_attn

ROOT = Path(__file__).parents[2]
PACKAGES = ("flax_attn", "torch_ref", "parity_tests")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
ARROWS = """
errors, _types, _lazy < taps, _checks, _arrays < places < masks, positions, dropout < scores < rules
< reference < backends < sharding < attend, pooling, projection, heads
< drop_in, layers < flax_drop_in, bench, proving, explain_command < cli, _pytest
"""
LEVELS = [[name.strip() for name in level.split(",")] for level in ARROWS.split("<")]
LEVEL = {name: height for height, level in enumerate(LEVELS) for name in level}
COMMON = ("rngs", "dtype", "param_dtype")  # taken by every layer, meaningless in torch
# In pieces, so that it does not find itself.
TOLERANCE = re.compile(r"\b(a" + "tol|r" + "tol|abs_" + "tol|rel_" + r"tol)\s*=|app" + r"rox\(")


def names_in(folder: str, pattern: str = "*.py") -> set[str]:
    found = {path.stem.removeprefix("test_") for path in (ROOT / folder).glob(pattern)}
    return found - {"__init__"}


HOMES = {
    "flax_attn/layers/{}.py": names_in("flax_attn/layers"),
    "torch_ref/{}.py": names_in("torch_ref"),
    "parity_tests/test_{}.py": names_in("parity_tests", "test_*.py"),
}
VARIANTS = sorted(set.union(*HOMES.values()))
LAYERS = sorted(HOMES["flax_attn/layers/{}.py"])

of_all_sources = pytest.mark.parametrize(
    "path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix()
)
of_all_layers = pytest.mark.parametrize("layer", LAYERS)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def own(package: str) -> list[Path]:
    return [path for path in SOURCES if path.is_relative_to(ROOT / package)]


def modules_of(path: Path) -> dict[str, ast.ClassDef]:
    """The classes of a file that are nnx or torch modules, by name."""
    classes = (node for node in tree_of(path).body if isinstance(node, ast.ClassDef))
    kinds = {"nnx.Module", "nn.Module", "torch.nn.Module"}
    return {node.name: node for node in classes if kinds & {*map(ast.unparse, node.bases)}}


def method(of: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((x for x in of.body if isinstance(x, ast.FunctionDef) and x.name == name), None)


def arguments(of: ast.ClassDef) -> dict[str, str]:
    """The constructor's arguments, each with how it is given and its default."""
    init = method(of, "__init__")
    if init is None:
        return {}
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
    return {name: how for name, how in found.items() if name != "self"}


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_file_of_a_variant_was_forgotten(variant):
    missing = [home.format(variant) for home, names in HOMES.items() if variant not in names]
    assert not missing, f"The variant {variant} is three files; {' and '.join(missing)} is missing."


@of_all_layers
def test_twins_have_the_same_classes_and_arguments(layer):
    theirs = modules_of(ROOT / f"torch_ref/{layer}.py")
    mine = modules_of(ROOT / f"flax_attn/layers/{layer}.py")
    assert mine, f"flax_attn/layers/{layer}.py holds no nnx.Module."
    assert mine.keys() == theirs.keys()
    for name in mine:
        given = {k: v for k, v in arguments(mine[name]).items() if k not in COMMON}
        assert list(given.items()) == list(arguments(theirs[name]).items()), f"{name}.__init__"


@of_all_layers
def test_every_layer_is_exported(layer):
    for name in modules_of(ROOT / f"flax_attn/layers/{layer}.py"):
        found = getattr(flax_attn, name, None)
        lines = f"from .{layer} import {name} as {name}", f"from .layers import {name} as {name}"
        lines = (*lines, f'"{name}": ".layers"')  # in the table too
        assert found is not None, f"flax_attn/layers/__init__.py and flax_attn/__init__.py: {lines}"
        assert found.__module__ == f"flax_attn.layers.{layer}"


@of_all_layers
def test_constructors_take_what_every_layer_takes_and_few_things_more(layer):
    for name, node in modules_of(ROOT / f"flax_attn/layers/{layer}.py").items():
        given = arguments(node)
        for common in COMMON:
            assert given.get(common, "").startswith("keyword"), f"{name} lacks {common}."
        more = [argument for argument in given if argument not in COMMON]
        assert len(more) <= 8, f"{name} takes {len(more)} arguments; the ninth is a new variant."


@of_all_layers
def test_a_forward_is_an_equation(layer):
    for name, node in modules_of(ROOT / f"flax_attn/layers/{layer}.py").items():
        assert [ast.unparse(base) for base in node.bases] == ["nnx.Module"], f"{name} is not final."
        call = method(node, "__call__")
        assert call is not None, f"{name} has no __call__."
        body = call.body[-1].end_lineno - call.body[0].end_lineno  # after the docstring
        assert ast.get_docstring(call) and body <= 25, f"{name}.__call__ has {body} lines."
        ifs = sum(isinstance(x, ast.If) for x in ast.walk(call))
        assert ifs <= 1, f"{name}.__call__ has {ifs} ifs: another variant, another file."


@of_all_sources
def test_files_and_functions_are_short(path):
    lines = len(path.read_text("utf-8").splitlines())
    assert lines < 450, f"{lines} lines: two ideas in one file."
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                length -= node.body[0].end_lineno - node.body[0].lineno + 1
            assert length < 40, f"{node.name} has {length} lines, line {node.lineno}."


@pytest.mark.parametrize("path", own("flax_attn"), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_run_one_way(path):
    part = path.relative_to(ROOT / "flax_attn").with_suffix("").parts
    outside = {name.split(".")[0] for name in imports(path)} & {"torch_ref", "parity_tests"}
    assert not outside, f"The library does not know {outside}."
    if part in (("__init__",), ("__main__",)):
        allowed = {*LEVEL} - {"cli", "_pytest"} if part == ("__init__",) else {"cli"}
    elif part[0] == "parity":
        allowed = {"parity", "weights", "errors", "taps", "_lazy"}
    elif part[0] == "weights":
        allowed = {"weights", "errors", "taps"}
    else:
        assert part[0] in LEVEL, f"{part[0]} has no place in ARROWS above: say what it may import."
        allowed = {name for name in LEVEL if LEVEL[name] < LEVEL[part[0]]}
        allowed |= {"layers", "backends", "bench", "masks", "sharding"} & {part[0]}
        allowed |= {"parity"} if part[0] in ("bench", "proving", "cli", "_pytest") else set()
    for name, of in ours(path):
        assert of in allowed, f"imports {name}, which stands above it or aside."
        if part[0] == of == "backends" and part[-1] != "__init__":
            known = ([], ["protocol"], ["platform"], ["hoist"], [part[1]])
            assert name.split(".")[2:3] in known, f"imports {name}: another backend."


@pytest.mark.parametrize("path", own("torch_ref"), ids=lambda p: p.name)
def test_the_references_know_torch_alone(path):
    known = {"torch", "torch_ref", *sys.stdlib_module_names}
    for name in imports(path):
        assert name.split(".")[0] in known, f"imports {name}."


@pytest.mark.parametrize("path", own("flax_attn"), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_torch_is_imported_late(path):
    for name in imports(path, inside_functions=False):
        assert name.split(".")[0] not in ("torch", "transformers"), f"imports {name} at the top."


@pytest.mark.parametrize("path", own("parity_tests"), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_tolerances_live_in_judge_alone(path):
    found = TOLERANCE.search(path.read_text("utf-8"))
    assert found is None, f"{found.group()} stands here: ask flax_attn.parity.judge."


def test_the_tolerance_pattern_finds_tolerances():
    for line in ["allclose(a, b, r" + "tol=1e-3)", "a" + "tol = 1", "app" + "rox(2.0)"]:
        assert TOLERANCE.search(line)
    assert not TOLERANCE.search("judge.same_function(got, want)")


def test_the_wheel_holds_the_library_its_twins_and_the_cases():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["include"]
    found = [path for pattern in patterns for path in ROOT.glob(pattern.removeprefix("/"))]
    held = {f for path in found for f in ([path] if path.is_file() else path.rglob("*.py"))}
    assert held >= {*own("flax_attn"), *own("torch_ref")}
    rest = {path.relative_to(ROOT).as_posix() for path in held & {*own("parity_tests")}}
    cases = {f"parity_tests/test_{variant}.py" for variant in VARIANTS}
    real = {f"parity_tests/real/{name}.py" for name in (*names_in("parity_tests/real"), "__init__")}
    assert rest == {"parity_tests/__init__.py", *cases, *real}
    for path in held:
        for name in imports(path):
            inside = name.startswith("parity_tests.")
            assert not inside or path.is_relative_to(ROOT / "parity_tests/real"), f"{path}: {name}"


FRESH = """
import sys
import flax.nnx
before = {name.partition(".")[0] for name in sys.modules}
import flax_attn
assert flax_attn.attend
brought = {name.partition(".")[0] for name in sys.modules} - before
assert brought <= {"flax_attn", "jaxtyping", "wadler_lindig"}, brought
assert "flax_attn.parity" not in sys.modules
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""


def test_importing_computes_nothing_and_brings_no_torch():
    run = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert run.returncode == 0, run.stderr
