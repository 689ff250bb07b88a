"""Names are imported on first use: importing the library is free, in whatever order."""

import copy
import pickle
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import flax_attn
from flax_attn import parity, weights

ROOT = Path(__file__).parents[2]
PACKAGES = (flax_attn, parity, weights)
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
        "flax_attn._internal.moved",
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
    monkeypatch.setitem(package._RENAMED, "before", new)
    told = rf"^{package.__name__}\.before is now called {package.__name__}\.{new}; "
    with pytest.warns(DeprecationWarning, match=told) as caught:
        assert package.before is getattr(package, new)
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=told) as caught:
        exec(f"from {package.__name__} import before")
    assert caught[0].filename == "<string>"
    assert "before" not in dir(package) and "before" not in package.__all__


def test_names_can_be_replaced_for_a_test(monkeypatch):
    before = flax_attn.attend
    with monkeypatch.context() as patch:
        patch.setattr(flax_attn, "attend", len)
        assert flax_attn.attend is len
    assert flax_attn.attend is before
