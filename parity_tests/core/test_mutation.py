"""A sample of the faults made by machine; `python -m parity_tests.core.mutation` makes them all."""

import random
import shutil
import sys
from pathlib import Path

import pytest

from .mutation import Mutant, Outcome, equivalents, mutants_of, size_of, split, stale
from .mutation.__main__ import main
from .mutation.chain import Chain, Sources
from .mutation.files import CHOOSES_SIZES, FILES, LIGHT, books_of, chosen
from .mutation.operators import mutants, mutated
from .mutation.record import Record
from .mutation.worker import PACKAGES, ROOT, Trial, try_all

SAMPLE = 4

SOURCE = '''
"""Words."""
Kind = int | str

def f(x: int, scale=1.0) -> int:
    """Words."""
    if x > 0 and not scale:
        raise ValueError(f"x is {x}")
    return g(x, -1, axis=0)[:x]
'''
CHANGED = """
def f(x: int, scale=2.0) -> int:
def f(x: int, scale=0.5) -> int:
pass
if True:
if False:
if x > 0 or not scale:
if not scale:
if x > 0:
if x >= 0 and (not scale):
if x <= 0 and (not scale):
if x > 1 and (not scale):
if x > -1 and (not scale):
if x > 0 and scale:
raise TypeError(f'x is {x}')
return None
return g(x, -1, axis=0)
return x[:x]
return g(-1, x, axis=0)[:x]
return g(-1, axis=0)[:x]
return g(x, axis=0)[:x]
return g(x, 1, axis=0)[:x]
return g(x, -2, axis=0)[:x]
return g(x, -0, axis=0)[:x]
return g(x, -1)[:x]
return g(x, -1, axis=1)[:x]
return g(x, -1, axis=-1)[:x]
return g(x, -1, axis=0)[:]
"""


def test_the_changes_of_a_small_source():
    made = mutants("f", SOURCE)
    changes = [mutant.name.partition("  =>  ")[2].partition("  (")[0] for mutant in made]
    assert set(changes) == set(CHANGED.strip().splitlines())
    for mutant in made:
        text = mutated(SOURCE, mutant.number)
        assert text != mutated(SOURCE, made[0].number) or mutant == made[0]
        compile(text, "mutant", "exec")
    assert len({mutant.name for mutant in made}) == len(made)
    assert len({mutant.key for mutant in made}) == len(made)


NAMED = """
def f(x, y=1):
    x = g(x + 1, h(k(x)), 0)
    @cached
    def inner(): return x[1:]
    return g(0 if x else 1)

@seen.register
def _(mask: Dense): return mask.array[0] + mask.array[0]
"""
NAMES = """
f | g(x + 1, h(...), 0)  =>  g(x + 1, h(...), 1)
f | h(k(x))  =>  k(x)
f | x + 1  =>  x - 1
f | return g(0 if x else 1)  =>  return None
f | y=1  =>  y=2
f | 0 if x else 1  =>  0 if True else 1
f.inner | @cached  =>  no decorator
f.inner | x[1:]  =>  x[:]
seen[Dense] | mask.array[0]  =>  mask.array  (2 of 2)
"""


def test_a_change_is_named_by_its_function_and_little_around_it():
    named = {f"{mutant.where} | {mutant.change}" for mutant in mutants("f", NAMED)}
    assert set(NAMES.strip().splitlines()) <= named
    edited = NAMED.replace("    x = g(", "    z = 5\n    x = z + g(").replace(
        ", 0)\n", ", 0) * 3\n"
    )
    still = {f"{mutant.where} | {mutant.change}" for mutant in mutants("f", edited)}
    assert {name for name in named - still if "x = g" not in name} == set()


def test_a_change_that_is_made_twice_is_not_excused_by_the_name_of_one():
    once, twice = (mutants("f", f"def f(x): return {text}") for text in ("x + 1", "x + 1, x + 1"))
    names = [{m.change for m in made if "x - 1" in m.change} for made in (once, twice)]
    assert names[0] == {"x + 1  =>  x - 1"}
    assert names[1] == {"x + 1  =>  x - 1  (1 of 2)", "x + 1  =>  x - 1  (2 of 2)"}


def test_what_only_type_checkers_read_is_left_alone():
    once = mutants("f", "def f(x, y=1): return x")
    overloaded = "@overload\ndef f(x, y=2): ...\ndef f(x, y=1): return x"
    assert [m.change for m in mutants("f", overloaded)] == [m.change for m in once]


def test_outcomes_are_counted():
    one, two, three = (Mutant("masks", i, i, str(i), "f", str(i)) for i in range(3))
    outcome = Outcome({one: "a law", two: None, three: None}, {("masks", "f", "2"): "why"})
    assert list(outcome.count("masks").values()) == [3, 1, 1, 1]
    assert outcome.alive == [two] and outcome.refuted == [] and outcome.share("masks") == 0.5
    assert Outcome({three: "a law"}, {("masks", "f", "2"): "why"}).refuted == [three]


@pytest.mark.nightly
def test_every_mutant_said_to_be_equivalent_is_there_and_has_a_reason(monkeypatch):
    assert all(equivalents().values()) and stale() == []
    gone = {("scores", "nobody", "0  =>  1"): "why", ("no/file", "f", "0  =>  1"): "why"}
    monkeypatch.setattr("parity_tests.core.mutation.equivalents", lambda: equivalents() | gone)
    monkeypatch.setitem(CHOOSES_SIZES, "scores", {"nobody: rows": "why"})
    assert len(stale()) == 3


def test_what_only_chooses_a_size_is_not_judged(monkeypatch):
    monkeypatch.setitem(CHOOSES_SIZES, "scores", {"f": "why", "g: rows": "why"})
    source = "def f(): return 1\ndef g(x):\n    rows = 1\n    return h(x, rows=2, cols=3)"
    judged, skipped = split(mutants("scores", source))
    assert {size_of(m) for m in skipped} == {"f", "g: rows"}
    assert all(m.where == "g" and "rows = " not in m.change for m in judged)
    assert {m.change for m in skipped} >= {"h(x, rows=2, cols=3)  =>  h(x, rows=3, cols=3)"}
    assert {m.change for m in judged} >= {"h(x, rows=2, cols=3)  =>  h(x, rows=2, cols=4)"}


# Four modules and their laws, in a folder of their own: what is built on what is changed.

BUILT = {
    "__init__": "from .low import Pair as Pair\nfrom .beside import other as other",
    "low": """
        from dataclasses import dataclass
        from functools import lru_cache
        import jax
        @jax.tree_util.register_dataclass
        @dataclass(frozen=True)
        class Pair:
            a: float
            b: float
        @lru_cache
        def factor():
            return 2.0
        def gap(pair):
            return pair.a - pair.b
        """,
    "middle": """
        import jax
        from .low import factor, gap
        @jax.jit
        def forward(pair):
            return factor() * gap(pair)
        """,
    "top": """
        from . import middle
        def run(pair):
            return middle.forward(pair)
        """,
    "beside": """
        other = object()
        """,
    "laws": """
        from built import Pair, other
        from built.top import run
        ONE = Pair(5.0, 2.0)
        def test_it_is_twice_the_gap():
            assert run(ONE) == 6 and isinstance(ONE, Pair)
        def test_nothing_beside_is_made_anew():
            import built.beside
            assert built.beside.other is other
        """,
}


@pytest.fixture
def built(tmp_path, monkeypatch):
    """The folder, importable while the test runs."""
    (tmp_path / "built").mkdir()
    for name, text in BUILT.items():
        lines = [line.removeprefix(" " * 8) for line in text.strip("\n").splitlines()]
        (tmp_path / "built" / f"{name}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "built"]:
        del sys.modules[name]


def chain(root: Path) -> Chain:
    return Chain(Sources(root), "built.low", ("built.laws",))


def test_what_is_built_on_a_module_is_found(built):
    assert chain(built).above == ["built.low", "built.middle", "built.top", "built.laws"]
    assert set(chain(built).reached) == {*chain(built).above, "built.beside"}
    assert [r.name for r in chain(built).reexports["built.low"]] == ["Pair"]
    with pytest.raises(ValueError, match=r"never import built\.laws"):
        Chain(Sources(built), "built.laws", ("built.top",))


@pytest.mark.nightly
def test_every_user_gets_the_mutant_and_then_all_is_put_back(built):
    trial = Trial(chain(built))
    names = ("built", "built.low", "built.middle", "built.top", "built.laws")
    before = {name: dict(vars(sys.modules[name])) for name in names}
    source = (built / "built" / "low.py").read_text()
    faults = [("2.0", "1 / 0"), ("2.0", "3.0"), ("pair.a - pair.b", "pair.a + pair.b")]
    for old, new in faults:
        assert old in source
        broken = trial.broken_by(compile(source.replace(old, new), "planted", "exec"), "")
        assert broken is not None and broken.startswith("test_it_is_twice_the_gap"), new
        assert {name: dict(vars(sys.modules[name])) for name in names} == before
        assert trial.broken(None) is None
    fates = {m.change: trial.broken(m.number) for m in mutants("low", source)}
    alive = {change for change, law in fates.items() if law is None}
    unfrozen = {f"dataclass(frozen=True)  =>  dataclass({but})" for but in ("", "frozen=False")}
    assert alive == {"@lru_cache  =>  no decorator", *unfrozen}


LAZY = """
import sys
from flax_attn._internal.lazy import Lazy
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .low import Pair as Pair
    from .low import gap as gap
    from .beside import other as other
_HOMES = {"Pair": ".low", "gap": ".low", "other": ".beside"}
_RENAMED = {}
sys.modules[__name__].__class__ = Lazy
"""


def test_laws_that_take_a_name_of_a_lazy_package_see_a_mutant_of_it(built):
    (built / "built" / "__init__.py").write_text(LAZY)
    laws = built / "built" / "laws.py"
    laws.write_text(
        "import built.middle\nfrom built import Pair, gap, other\n"
        "def test_the_gap():\n"
        "    assert gap(Pair(5.0, 2.0)) == 3 and isinstance(other, object)\n"
    )
    found = chain(built)
    assert found.above == ["built.low", "built.middle", "built.laws"]
    assert {*found.reached} == {*found.above, "built.beside"}
    assert {r.name for r in found.reexports["built.low"]} == {"Pair", "gap"}
    trial = Trial(found)
    source = (built / "built" / "low.py").read_text()
    wrong = compile(source.replace("pair.a - pair.b", "pair.a + pair.b"), "planted", "exec")
    assert (trial.broken_by(wrong, "") or "").startswith("test_the_gap")
    assert trial.broken(None) is None


@pytest.mark.nightly
def test_a_law_on_a_name_of_the_library_reaches_its_module():
    sources = Sources(ROOT, PACKAGES)
    assert sources.origin("flax_attn", "attend") == ("flax_attn.attend", "attend")
    assert sources.origin("flax_attn", "taps") == ("flax_attn.taps", None)
    assert sources.origin("flax_attn.parity", "Case") == ("flax_attn.parity.cases.case", "Case")
    laws = "parity_tests.core.attend.test_laws_attend"
    assert "flax_attn.attend" in Chain(sources, "flax_attn.attend", (laws,)).above


@pytest.mark.nightly
def test_no_laws_need_the_whole_library():
    """One `import flax_attn` in a file of laws makes a hundred modules anew for each mutant."""
    sources = Sources(ROOT, PACKAGES)
    for laws in {book for books in FILES.values() for book in books}:
        (book,) = books_of((laws,))
        assert "flax_attn" not in Chain(sources, book, (book,)).reached, book


def test_laws_that_fail_with_nothing_changed_are_refused(built):
    laws = built / "built" / "laws.py"
    laws.write_text(laws.read_text().replace("== 6", "== 7"))
    with pytest.raises(RuntimeError, match="as it stands breaks the law test_it_is_twice"):
        Trial(chain(built))


def test_the_digest_changes_with_code_that_the_laws_reach_and_with_no_other(built):
    digest, low = chain(built).digest(), built / "built" / "low.py"
    low.write_text(low.read_text() + "\n# A comment.\n")
    shutil.copy(low, built / "built" / "unread.py")
    assert chain(built).digest() == digest
    low.write_text(low.read_text().replace("2.0", "3.0"))
    assert chain(built).digest() != digest


def test_a_run_goes_on_where_it_ended(tmp_path):
    made = mutants("scores", SOURCE)
    path = tmp_path / "finished.jsonl"
    record = Record(path, {"scores": "code"})
    record.add(made[0], "a law", 0.5)
    record.add(made[1], None, 0.25)
    with path.open("a") as file:
        file.write('{"file": "sco')  # ended in the middle of a line
    again = Record(path, {"scores": "code"})
    assert again.finished(made) == {made[0]: "a law", made[1]: None}
    assert again.seconds(made[0]) == 0.5
    again.add(made[2], None, 0.125)
    assert set(Record(path, {"scores": "code"}).finished(made)) == set(made[:3])
    assert Record(path, {"scores": "other code"}).finished(made) == {}


def test_files_are_named_by_path_or_folder(capsys):
    assert chosen(["flax_attn/masks/nodes.py", "scores"]) == ["masks/nodes", "scores"]
    masks = ["algebra", "ranges", "nodes", "runs", "at_positions"]
    assert chosen(["flax_attn/masks/"]) == [f"masks/{file}" for file in masks]
    for name, said in {"nowhere": "there is no", "taps": "no laws are written for taps"}.items():
        with pytest.raises(SystemExit):
            main([name])
        assert said in capsys.readouterr().err


@pytest.mark.nightly
def test_no_mutant_of_a_sample_lives():
    known = equivalents()
    every = [m for file in LIGHT for m in split(mutants_of(file))[0] if m.key not in known]
    drawn = random.Random(len(every)).sample(every, SAMPLE)
    outcome = Outcome(try_all(sorted(drawn, key=lambda m: m.file), jobs=1), known)
    assert not outcome.alive
