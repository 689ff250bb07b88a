"""The house in order: twins complete, torch never brought unasked.

All is read from the sources by `ast`, so that torch need not be there.
"""

import ast
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import flax_attn
import flax_attn.layers
from flax_attn import masks
from flax_attn.masks import Mask
from flax_attn.parity.cases import markdown
from flax_attn.parity.cases.collect import Listed, listed
from flax_attn.parity.recording.store import opened
from flax_attn.parity.report import ANOTHER_WAY, EQUAL
from parity_tests import real
from parity_tests.core import layer_facts
from parity_tests.core.sources import (
    ABSTRACT,
    ROOT,
    arguments,
    bases_of,
    imports,
    method,
    modules_of,
    own_arguments,
    tree_of,
)
from parity_tests.tables import each

PACKAGES = ("flax_attn", "torch_ref", "parity_tests")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
# Taken by every layer, meaningless in torch.
COMMON = ("kernel_init", "bias_init", "rngs", "dtype", "param_dtype")
# Shape no equation, so are not counted.
HOUSE = (*COMMON, "qkv_bias", "out_bias", "dropout", "chunk")
# In pieces, so that it does not find itself.
TOLERANCE = re.compile(r"\b(a" + "tol|r" + "tol|abs_" + "tol|rel_" + r"tol)\s*=|app" + r"rox\(")


def names_in(folder: str, pattern: str = "*.py") -> set[str]:
    found = {path.stem.removeprefix("test_") for path in (ROOT / folder).glob(pattern)}
    return {name for name in found if not name.startswith("_")}


HOMES = {
    "flax_attn/layers/{}.py": names_in("flax_attn/layers"),
    "torch_ref/{}.py": names_in("torch_ref"),
    "parity_tests/test_{}.py": names_in("parity_tests", "test_*.py"),
}
VARIANTS = sorted(set.union(*HOMES.values()))
LAYERS = sorted(HOMES["flax_attn/layers/{}.py"])
WHOLE = sorted(set.intersection(*HOMES.values()))  # of the others their missing file is told

CERTIFICATE = "docs/certificate.md"

of_all_layers = each("layer", LAYERS)
of_whole_variants = each("layer", WHOLE)


@cache
def cases_of(layer: str) -> list[Listed]:
    """The cases of a layer, which its own file holds."""
    try:
        found = listed(("parity_tests", f"parity_tests.test_{layer}"))
    except ImportError as error:
        pytest.fail(f"parity_tests/test_{layer}.py cannot be imported: {error}.", pytrace=False)
    return [case for case in found if case.variant == layer]


@cache
def certificate() -> dict[str, list[str]]:
    """The rows of the certificate by their layers."""
    return markdown.rows(markdown.MARKS.search((ROOT / CERTIFICATE).read_text("utf-8"))["table"])


def own(package: str) -> list[Path]:
    return [path for path in SOURCES if path.is_relative_to(ROOT / package)]


@each("variant", VARIANTS)
def test_no_file_of_a_variant_was_forgotten(variant):
    missing = [home.format(variant) for home, names in HOMES.items() if variant not in names]
    there = [home.format(variant) for home, names in HOMES.items() if variant in names]
    assert not missing, (
        f"The variant {variant} lacks {' and '.join(missing)}: write what is missing and run "
        f"`flax-attn parity {variant}`, or, if it was removed, delete {' and '.join(there)}."
    )


@of_whole_variants
def test_the_case_file_of_a_layer_has_cases_of_it(layer):
    assert cases_of(layer), (
        f"parity_tests/test_{layer}.py has no case of flax_attn/layers/{layer}.py: write a list "
        f"CASES there, and run `flax-attn parity {layer}`."
    )


@of_whole_variants
def test_no_golden_was_forgotten(layer):
    path = f"flax_attn/goldens/{layer}.safetensors"
    again = f"run `flax-attn parity {layer} --record`"
    assert (ROOT / path).exists(), f"{path} is missing, the record of torch's results: {again}."
    recorded = opened(ROOT / path, again)[0]["cases"]
    titles = {case.title for case in cases_of(layer)}
    assert titles <= {*recorded}, f"{path} lacks the case {min(titles - {*recorded})}: {again}."
    extra = {*recorded} - titles
    assert not extra, f"{path} holds {min(extra, default='')}, which is no case now: {again}."


def test_every_golden_is_of_a_layer():
    for path in sorted((ROOT / "flax_attn/goldens").iterdir()):
        known = path.stem in LAYERS or path.name.startswith("real_")
        assert known, f"{path} belongs to no layer: delete it."


@of_whole_variants
def test_no_row_of_the_certificate_was_forgotten(layer):
    again = f"run `flax-attn parity {layer} --markdown {CERTIFICATE}`"
    full = certificate()
    name = markdown.layers(cases_of(layer)).get(layer, layer)
    assert name in full, f"{CERTIFICATE} has no row of {name}: {again}."
    row = dict(zip(markdown.HEADINGS, full[name], strict=True))
    witnesses = {case.reference for case in cases_of(layer)}
    witnesses |= {kept.proven_equal_to for kept in real.KEPT if kept.variant == layer}
    should = " and ".join(sorted(witnesses))
    told = f"The row of {name} in {CERTIFICATE}"
    assert {*row["equal to"].split("; ")} == witnesses, f"{told} should name {should}: {again}."
    verdict = ANOTHER_WAY if row["layer"] in layer_facts.REORDERED else EQUAL
    assert row["verdict"] == verdict, f"{told} says {row['verdict']!r}: {again}."


def test_every_row_of_the_certificate_is_of_a_layer():
    names = {", ".join(modules_of(ROOT / f"flax_attn/layers/{layer}.py")) for layer in LAYERS}
    text = (ROOT / CERTIFICATE).read_text("utf-8")
    for name in certificate():
        assert name in names, f"{CERTIFICATE} has a row of {name}, which is no layer: delete it."
        assert text.count(f"\n| {name} |") == 1, (
            f"{CERTIFICATE} has two rows of {name}: delete one."
        )


@of_whole_variants
def test_twins_have_the_same_classes_and_arguments(layer):
    theirs = modules_of(ROOT / f"torch_ref/{layer}.py")
    mine = modules_of(ROOT / f"flax_attn/layers/{layer}.py")
    assert mine, f"flax_attn/layers/{layer}.py holds no nnx.Module."
    assert mine.keys() == theirs.keys()
    for name in mine:
        given = [x for x in arguments(mine[name]).items() if x[0] not in COMMON]
        plain = [y for x in given for y in layer_facts.TORCH_ARGUMENTS.get(x, dict([x])).items()]
        assert plain == list(arguments(theirs[name]).items()), f"{name}.__init__"


@of_all_layers
def test_every_layer_is_exported(layer):
    for name in modules_of(ROOT / f"flax_attn/layers/{layer}.py"):
        for package in (flax_attn.layers, flax_attn):
            found = getattr(package, name, None)
            file = Path(package.__file__).relative_to(ROOT)
            assert found is not None, (
                f"{file} does not export {name}: name it there as its neighbours are named, and "
                f"run `python -c 'from {package.__name__} import {name}'`."
            )
            assert found.__module__ == f"flax_attn.layers.{layer}"


@of_all_layers
def test_constructors_take_what_every_layer_takes_and_few_things_more(layer):
    for name, node in modules_of(ROOT / f"flax_attn/layers/{layer}.py").items():
        given = arguments(node)
        for common in COMMON:
            assert given.get(common, "").startswith("keyword"), f"{name} lacks {common}."
        most = layer_facts.MANY_ARGUMENTS.get(name, 8)
        if name not in ABSTRACT and {*bases_of(node)} & {*ABSTRACT}:
            init = method(node, "__init__")
            given = {} if init is None else own_arguments(init)
        more = [argument for argument in given if argument not in HOUSE]
        assert len(more) <= most, f"{name} takes {len(more)} arguments: another variant instead."


@of_all_layers
def test_a_forward_is_an_equation(layer):
    for name, node in modules_of(ROOT / f"flax_attn/layers/{layer}.py").items():
        bases, call = bases_of(node), method(node, "__call__")
        if bases == ["Recurrent"]:
            assert call is None, f"{name} has a __call__ beside that of Recurrent."
            call = method(node, "recur")
        elif not {*bases} <= {*ABSTRACT}:
            assert bases == ["Layer"], f"{name} is not final."
        elif call is None:
            continue
        else:  # a call with more arguments, of the same steps
            steps = ("self.forward(", "self.attention(")
            assert any(x in ast.unparse(call) for x in steps), f"{name}.__call__ is not by them."
        assert call is not None, f"{name} has no __call__."
        body = call.body[-1].end_lineno - call.body[0].end_lineno  # after the docstring
        assert ast.get_docstring(call) and body <= 25, f"{name}.{call.name} has {body} lines."
        ifs = sum(isinstance(x, ast.If) for x in ast.walk(call))
        assert ifs <= 1, f"{name}.{call.name} has {ifs} ifs: another variant, another file."


# Where a file outside `masks` asks for a mask by its class, and why it may.
KNOW_MASKS = {
    "backends/blockwise/block.py": ({"And", "Dense", "Not", "Or"}, "An array is cut by slices."),
    "backends/hoist.py": ({"MaskFn"}, "A user's function is traced, with all that it closes over."),
    "backends/splash.py": ({"Full"}, "Splash attention has a mask of its own for it."),
    "layers/_token_indices.py": ({"Lengths"}, "A call says by it where its padding is."),
    "reference.py": ({"Full"}, "Where nothing is hidden the plain formula has no mask."),
    "rules.py": ({"Segments"}, "Only its ids may exceed what JAX's integers hold."),
}


# Folders whose steps need a reason above them, and how many comments they have at least.
MIN_COMMENTS = {"backends": 60, "sharding": 40, "parity/sides": 40}


@each("folder", MIN_COMMENTS)
def test_every_folder_has_comments_that_explain_hard_steps(folder):
    comments = 0
    for path in (ROOT / "flax_attn" / folder).rglob("*.py"):
        with path.open(encoding="utf-8") as file:
            tokens = [
                x for x in tokenize.generate_tokens(file.readline) if x.type == tokenize.COMMENT
            ]
        comments += sum(x.line.lstrip().startswith("#") for x in tokens)
    assert comments >= MIN_COMMENTS[folder]


def requested_backend(path: Path) -> Iterator[str]:
    """The classes for which a file registers a function, asks `isinstance`, or matches a case."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef):
            kinds = [d for d in node.decorator_list if "register" in ast.unparse(d)]
            first = [arg.annotation for arg in node.args.args[:1] if arg.annotation is not None]
            named = [*kinds, *first] if kinds else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            named = node.args[1:]
        elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node.left):
            named = node.comparators
        else:
            named = [node.cls] if isinstance(node, ast.MatchClass) else []
        for part in named:
            yield from (x.id for x in ast.walk(part) if isinstance(x, ast.Name))


def test_no_file_outside_masks_checks_for_a_class_of_mask():
    """What a mask is asked stands in its class, so that a new one is one class in one file."""
    known = {n for n, x in vars(masks).items() if isinstance(x, type) and issubclass(x, Mask)}
    found = {}
    for path in own("flax_attn"):
        name = path.relative_to(ROOT / "flax_attn").as_posix()
        kinds = {*requested_backend(path)} & (known - {"Mask"})
        if kinds and not name.startswith("masks/"):
            found[name] = kinds
    assert found == {name: kinds for name, (kinds, _) in KNOW_MASKS.items()}


@each("path", own("torch_ref"))
def test_a_twin_is_written_out_in_full(path):
    """Its base is torch's Module, so that one file shows what it does."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            assert bases_of(node) in ([], ["nn.Module"]), f"{node.name} builds on another twin."


@each("path", own("torch_ref"))
def test_the_references_know_torch_alone(path):
    known = {"torch", "torch_ref", *sys.stdlib_module_names}
    for name in imports(path):
        assert name.split(".")[0] in known, f"imports {name}."


@each("path", own("flax_attn"))
def test_torch_is_imported_late(path):
    for name in imports(path, inside_functions=False):
        assert name.split(".")[0] not in ("torch", "transformers"), f"imports {name} at the top."


@each("path", own("parity_tests"))
def test_tolerances_live_in_judge_alone(path):
    found = TOLERANCE.search(path.read_text("utf-8"))
    assert found is None, f"{found.group()} stands here: ask flax_attn.parity.judge."


def test_the_tolerance_pattern_finds_tolerances():
    for line in ["allclose(a, b, r" + "tol=1e-3)", "a" + "tol = 1", "app" + "rox(2.0)"]:
        assert TOLERANCE.search(line)
    assert not TOLERANCE.search("judge.same_function(got, want)")


def test_the_nightly_command_starts():
    command = [sys.executable, str(ROOT / ".ci/nightly"), "--oldest"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_wheel_holds_the_library_its_twins_and_the_cases():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["include"]
    found = [path for pattern in patterns for path in ROOT.glob(pattern.removeprefix("/"))]
    held = {f for path in found for f in ([path] if path.is_file() else path.rglob("*.py"))}
    assert held >= {*own("flax_attn"), *own("torch_ref")}
    rest = {path.relative_to(ROOT).as_posix() for path in held & {*own("parity_tests")}}
    cases = {f"parity_tests/test_{variant}.py" for variant in VARIANTS}
    # What the command asks for by name, and cases.
    folders = ("families", "models", "real", "witnesses")
    rooms = tuple(f"parity_tests/{folder}/" for folder in folders)
    inside = {path.relative_to(ROOT).as_posix() for path in own("parity_tests")}
    more = {name for name in inside if name.startswith(rooms)}
    assert rest == {"parity_tests/__init__.py", *cases, *more}
    for path in held:
        for name in imports(path):
            where = path.relative_to(ROOT).as_posix()
            assert not name.startswith("parity_tests.") or where in more, f"{path}: {name}"


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
