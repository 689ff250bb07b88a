"""Names are imported on first use: importing the library is free, in whatever order."""

import copy
import pickle
import pydoc
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import flax_attn
from flax_attn import drop_in, families, parity, sharding, weights
from flax_attn._internal import lazy, versions
from flax_attn.command import cli

ROOT = Path(__file__).parents[2]
PACKAGES = (flax_attn, drop_in, families, parity, sharding, weights)
NAMES = [(package, name) for package in PACKAGES for name in package.__all__]
of_all_packages = pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)


def fresh(code):
    line = [sys.executable, "-c", code]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)


@of_all_packages
def test_the_table_says_what_type_checkers_read(package):
    source = Path(package.__file__).read_text("utf-8")
    block = source.partition("if TYPE_CHECKING:\n")[2].partition("\n\n")[0]
    lines = [f"    from {home} import {name} as {name}" for name, home in package._HOMES.items()]
    assert sorted(block.splitlines()) == sorted(lines)
    assert [x for x in package._HOMES if x != "__version__"] == list(package.__all__)


ORDERS = {
    "the name": "from flax_attn import attend",
    "the package": "import flax_attn; attend = flax_attn.attend",
    "the submodule first": "import flax_attn.attend; from flax_attn import attend",
    "the submodule after": "from flax_attn import attend; import flax_attn.attend",
    "from the submodule": "from flax_attn.attend import explain; from flax_attn import attend",
    "a user of it first": "import flax_attn.layers; from flax_attn import attend",
    "by a string": "from importlib import import_module; import_module('flax_attn.attend'); "
    "from flax_attn import attend",
    "all names": "from flax_attn import *",
    "the harness": "import flax_attn.parity.compare, flax_attn.parity.port; "
    "from flax_attn.parity import compare as attend, port",
}


AFTER = """
import flax_attn, flax_attn.attend
assert callable(attend) and attend.__doc__
assert callable(flax_attn.attend), flax_attn.attend
assert flax_attn.attend is flax_attn.attend.__wrapped__.__globals__['attend']
"""
# In one process, which forgets this library before each order and keeps jax.
ONE_BY_ONE = """
import sys
for name, code in {codes!r}.items():
    for module in [m for m in sys.modules if m.partition(".")[0] == "flax_attn"]:
        del sys.modules[module]
    try:
        exec(code, {{}})
    except Exception as error:
        print(f"{{name}}: {{error!r}}")
"""


def test_a_function_is_never_the_submodule_of_its_name():
    codes = {name: f"{order}\n{AFTER}" for name, order in ORDERS.items()}
    run = fresh(ONE_BY_ONE.format(codes=codes))
    assert run.returncode == 0, run.stderr
    assert not run.stdout, run.stdout


def test_importing_flax_attn_imports_no_other_package():
    code = "import sys; before, hooks = {*sys.modules}, [*sys.meta_path]; "
    code += "import flax_attn, flax_attn.parity; assert sys.meta_path == hooks; "
    code += "print(*sorted({*sys.modules} - before))"
    run = fresh(code)
    assert run.returncode == 0, run.stderr
    brought = {*run.stdout.split()} - sys.stdlib_module_names
    assert {name for name in brought if not name.startswith("importlib.")} == {
        "flax_attn",
        "flax_attn._internal",
        "flax_attn._internal.lazy",
        "flax_attn._internal.renamed",
        "flax_attn.parity",
    }
    assert "typing" not in run.stdout.split()


def test_what_is_public_can_be_sent_copied_and_read_about():
    for package, name in NAMES:
        value = getattr(package, name)
        if callable(value):
            sent = copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))
            assert all(x is value or x == value for x in sent)
    text = pydoc.render_doc(flax_attn, renderer=pydoc.plaintext)
    assert "class CausalAttention(" in text and "attend(q:" in text
    names: dict[str, object] = {}
    exec("from flax_attn import *", names)
    assert {*names} - {"__builtins__"} == {*flax_attn.__all__}


def test_a_submodule_is_there_without_being_imported():
    run = fresh("import flax_attn; print(flax_attn.errors.ParityError.__name__)")
    assert run.stdout == "ParityError\n", run.stderr


@of_all_packages
def test_an_old_name_is_the_new_one_and_says_so(package, monkeypatch):
    new = package.__all__[-1]
    monkeypatch.setattr(package, "_RENAMED", {"before": (new, "9.0.0")}, raising=False)
    name = rf"{package.__name__}\."
    told = rf"^{name}before is now called {name}{new}; the old name goes with 9\.0\.0\.$"
    with pytest.warns(DeprecationWarning, match=told) as caught:
        assert package.before is getattr(package, new)
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=told) as caught:
        exec(f"from {package.__name__} import before")
    assert caught[0].filename == "<string>"
    assert "before" not in dir(package) and "before" not in package.__all__


def test_no_old_name_has_outlived_its_releases():
    now = versions._numbers(flax_attn.__version__)
    sources = [path.read_text("utf-8") for path in (ROOT / "flax_attn").rglob("*.py")]
    goes = [release for text in sources for release in re.findall(r'goes="([\d.]+)"', text)]
    goes += [release for package in PACKAGES for _, release in package._RENAMED.values()]
    assert goes and all(versions._numbers(release) > now for release in goes)


def test_attention_and_masks_import_no_flax():
    code = """
import jax, jax.numpy as jnp, sys
from flax_attn import CAUSAL, Alibi, Dropout, alibi_slopes, attend, dot_product_attention, frozen
from flax_attn import Cache, Mask, attend_cached
@frozen
class Even(Mask):
    def __call__(self, b, n, q, k): return k % 2 == 0
q = jnp.ones((1, 5, 2, 4))
drop, bend = Dropout(0.1, jax.random.key(0)), Alibi(alibi_slopes(2))
attend(q, q, q, mask=CAUSAL & Even(), score=bend, dropout=drop)
dot_product_attention(q, q, q, is_causal=True)
print(*sorted({"flax", "optax", "flax_attn.layers"} & {*sys.modules}))
from flax import nnx
class Own(nnx.Module):
    def __init__(self): self.by = nnx.Param(jnp.ones(2))
    def __call__(self, q, mask): return attend(q, q, q, mask=mask)
nnx.tabulate(Own(), q, CAUSAL)
try: Alibi(nnx.Param(jnp.ones(2)))
except TypeError as error: print(error)
"""
    run = fresh(code)
    assert run.returncode == 0, run.stderr
    none, refused = run.stdout.split("\n", 1)
    assert not none and refused.startswith("Alibi.slopes holds an nnx.Param")


FITTING = [("0.10.0", "0.12.8"), ("0.11.0", "0.12.8"), ("0.11.1", "0.12.9"), ("0.12.0.1", "0.13.0")]
NOT_FITTING = [
    ("0.9.2", "0.12.12"),
    ("0.11.1", "0.12.8"),
    ("0.11.2", "0.12.9"),
    ("0.12.0.dev1", "0.12.9"),
]


def test_a_flax_that_does_not_import_under_a_jax_is_said_before_its_own_error(monkeypatch, capsys):
    monkeypatch.setattr(versions, "version", lambda name: version("flax-attn-absent"))
    assert versions.does_not_fit() == ""  # the import of what is missing says so
    for jax, flax in (*FITTING, *NOT_FITTING):
        monkeypatch.setattr(versions, "version", {"jax": jax, "flax": flax}.get)
        assert bool(versions.does_not_fit()) is ((jax, flax) in NOT_FITTING)
    told = r"^flax 0\.12\.9 does not import under jax .*, which needs flax 0\.12\.10 or newer: "

    def fails(home, package):
        raise AttributeError("module 'jax.experimental.hijax' has no attribute 'HiPrimitive'")

    monkeypatch.setattr(lazy, "import_module", fails)
    vars(weights).pop("load", None)  # what was imported before
    with pytest.raises(ImportError, match=told):
        weights.load  # noqa: B018
    assert cli.main(["parity"]) == 2 and "pip install -U flax" in capsys.readouterr().err
    monkeypatch.setattr(versions, "version", {"jax": "0.12.0", "flax": "0.12.10"}.get)
    with pytest.raises(AttributeError, match="HiPrimitive"):
        weights.load  # noqa: B018


def test_names_can_be_replaced_for_a_test(monkeypatch):
    before = flax_attn.attend
    with monkeypatch.context() as patch:
        patch.setattr(flax_attn, "attend", len)
        assert flax_attn.attend is len
    assert flax_attn.attend is before
