"""The tests of layers on trial: each fails under a fault, and none compares a name with itself."""

import ast
from functools import partial
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from flax_attn.parity import Case, ParityError
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")
HERE = Path(__file__).parent
FILES = sorted(path.stem for path in HERE.parents[1].glob("test_*.py"))
TWINS = sorted((HERE.parents[2] / "torch_ref").glob("*.py"))


def cases(name: str) -> list[Case]:
    return import_module(f"parity_tests.{name}").CASES


OF_EACH_KIND = ["test_causal_attention", "test_t5"]  # of torch_ref's twins, of transformers


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(FILES, commit=OF_EACH_KIND))
def test_each_parity_test_fails_under_a_fault(name, monkeypatch):
    """One number of the layer's output is a billionth off, and `test_parity` itself says so."""
    case = cases(name)[0]
    right = case.flax_class.__call__
    monkeypatch.setattr(case.flax_class, "__call__", lambda *a, **k: nudged(right(*a, **k)))
    monkeypatch.setattr(case, "dtypes", ("float64",))
    monkeypatch.setattr(case, "report", partial(case.report, eager=False))
    # Where the fault lies is asked above; here only whether the test sees it.
    compare = import_module("flax_attn.parity.compare")
    monkeypatch.setattr(compare, "diagnosed", lambda pair, report, *_: report)
    with pytest.raises(ParityError) as caught:
        import_module(f"parity_tests.{name}").test_parity(case)
    assert {row.kind for row in caught.value.report.rows if not row.verdict.ok} & {"output", "tap"}


def nudged(out):
    """The largest number of the first floating array a billionth larger: the last one may be 0."""
    leaves, tree = jax.tree.flatten(out)
    at = next(i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating))
    flat = leaves[at].ravel()
    largest = jnp.argmax(jnp.abs(flat))
    leaves[at] = flat.at[largest].multiply(1 + 1e-9).reshape(leaves[at].shape)
    return jax.tree.unflatten(tree, leaves)


@pytest.mark.parametrize("every", with_nightly([False, True], commit=[False]))
def test_no_case_compares_a_name_with_itself(every):
    """One case of each layer and original, and nightly every case."""
    absent, found = {}, [case for name in FILES for case in cases(name)]
    once = {(case.flax_class, case.reference): case for case in found}
    for case in found if every else once.values():
        try:
            module = case.torch_module()  # first, since some packages warn when they are imported
        except ModuleNotFoundError as error:
            absent[case.reference] = error
        else:
            _is_somebody_else(case, module)
    if absent:
        pytest.skip(f"not looked at, since not installed: {', '.join(sorted(absent))}")


def _is_somebody_else(case: Case, module: object) -> None:
    """Holds a case's witness to be another class than ours, and of torch."""
    package, _, attribute = case.reference.rpartition(".")
    if case.made_by:  # of a package, perhaps, that cannot be imported whole
        witness = type(module)
        assert witness.__name__ == attribute, case
        assert package.rpartition(".")[2] in witness.__module__, case
    else:
        witness = getattr(import_module(package), attribute)
    assert witness is not case.flax_class, case
    assert getattr(witness, "__module__", package).partition(".")[0] != "flax_attn", case
    assert isinstance(module, torch.nn.Module), case
    inside = type(module).__module__
    assert not inside.startswith(("flax_attn.layers", "jax", "flax.")), case


@pytest.mark.parametrize("path", TWINS, ids=lambda path: path.stem)
def test_no_torch_twin_imports_the_layer_it_judges(path):
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    assert not imported & {"flax_attn", "jax", "flax", "numpy"}
