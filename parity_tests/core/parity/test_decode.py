"""Decoding: both sides step by step; a fault in a cache is found, placed and named."""

from dataclasses import replace
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("torch", reason="the harness compares with torch")

from flax_attn.parity import Case, Decode, ParityError, compare, judge
from flax_attn.parity.cases import certificate, golden
from parity_tests.tables import with_nightly

from . import decoders as right
from .decoders import Mine, Theirs

W, T = 3, 7
X = np.random.RandomState(0).standard_normal((3, T, right.D))
PADDED = np.ones((3, T), bool)
PADDED[1, :2] = PADDED[2, 4] = PADDED[2, 6] = False


def report(mine, padded=False, window=W, **options):
    kwargs = {"valid": PADDED} if padded else {}
    axes = {"0": -2, "valid": -1} if padded else {"0": -2}
    decode = Decode(**{"axes": axes, **options})
    quick = {"dtypes": ("float64",), "eager": False, "grads": False}
    return compare(Theirs(window), mine, X, kwargs=kwargs, decode=decode, **quick)


class LengthShort(Mine):
    def length(self, cache, valid):
        return cache.length + valid.sum(-1) - (valid.shape[1] > 1)


class LengthOfSteps(Mine):
    def length(self, cache, valid):
        return cache.length + jnp.minimum(valid.sum(-1), 1)


class RotaryAtSlot(Mine):
    def key_places(self, places, cache):
        return places % cache.keys.shape[1]


class RotaryAtStep(Mine):
    def query_places(self, places, cache):
        return places - cache.length[:, None]


class QueriesFromOne(Mine):
    def query_places(self, places, cache):
        return places + 1


class AcrossTheSeam(Mine):
    """A chunk is written from its first slot on, and what lies beyond the last one is dropped."""

    def slots(self, places, valid, size, cache):
        slots = super().slots(places, valid, size, cache)
        return jnp.where(slots < slots[:, :1], size, slots)


class Clamped(Mine):
    """A token that is not valid is written to the last slot."""

    def slots(self, places, valid, size, cache):
        return jnp.minimum(super().slots(places, valid, size, cache), size - 1)


class NoWindowAtOne(Mine):
    def seen(self, query, key):
        window = jnp.inf if query.shape[2] == 1 else self.window
        return (key >= 0) & (key <= query) & (query - key < window)


class ReadFirst(Mine):
    def read(self, old, new, written):
        return old


class WriteFirst(Mine):
    """A chunk is written before its own queries looked at what it overwrites."""

    def read(self, old, new, written):
        return written


class RowZero(Mine):
    def length(self, cache, valid):
        return jnp.broadcast_to(super().length(cache, valid)[:1], cache.length.shape)


class Narrow(Mine):
    def written(self, cache, k, v, places, slots):
        k, v = (x.astype(jnp.bfloat16).astype(x.dtype) for x in (k, v))
        return super().written(cache, k, v, places, slots)


class NarrowStore(Mine):
    def init_cache(self, batch, length):
        cache = super().init_cache(batch, length)
        return replace(cache, values=cache.values.astype(jnp.float32))

    def read(self, old, new, written):
        old = replace(old, values=old.values.astype(new.values.dtype))
        return super().read(old, new, written)


class Swapped(Mine):
    """The values of another layer's cache: here those of another projection."""

    def written(self, cache, k, v, places, slots):
        return super().written(cache, k, 2 * v[..., ::-1], places, slots)


class KeptPlaces(Mine):
    def truncate(self, cache, length):
        return replace(cache, length=length)


class KeysAlone(Mine):
    def take(self, cache, rows):
        return replace(super().take(cache, rows), values=cache.values)


def with_drafts(module, x, cache, **kwargs):
    """Each step is followed by two tokens that are taken back."""
    cache = module.init_cache(len(x), T) if cache is None else cache
    y, cache = module(x, cache=cache, **kwargs)
    _, drafts = module(jnp.ones((len(x), 2, right.D)), cache=cache)
    return y, module.truncate(drafts, cache.length)


def with_beams(module, x, cache, **kwargs):
    """After each step the rows of the cache are in another order."""
    cache, order = (module.init_cache(len(x), T), jnp.arange(3)) if cache is None else cache
    y, cache = module(x[order], cache=cache, **kwargs)
    again = jnp.asarray([2, 0, 1])
    return y[jnp.argsort(order)], (module.take(cache, again), order[again])


def stepped(module, x, cache, **kwargs):
    return module.step(x, cache=cache, **kwargs)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "padded", "ring"),
    with_nightly(product([{}, {"torch": stepped}], [False, True], [None, W]), commit=8),
)
def test_a_right_cache_decodes_to_the_same_outputs(options, padded, ring):
    found = report(Mine(W, ring=ring), padded, **options)
    assert found.ok, str(found)
    decoded = [row.name for row in found.rows if row.kind == "decode"]
    assert len(decoded) == 10
    assert "decoded " in found.summary()


@pytest.mark.nightly
@pytest.mark.parametrize("step", with_nightly([with_drafts, with_beams], commit=2))
def test_a_custom_decode_step_is_equal(step):
    assert report(Mine(W), flax=step).ok


SECOND = "step 2 of 2x3+1, token 3"
FAULTS = [
    (LengthShort(), {"window": 99}, SECOND, "the query rotated by another position"),
    (LengthOfSteps(), {"window": 99}, SECOND, "does not see token 2, the last of the step before"),
    (RotaryAtSlot(W, ring=W), {}, "step 1 of 7, token 3", "positions counted otherwise"),
    (RotaryAtStep(W, ring=W), {}, SECOND, "the query rotated by another position"),
    (QueriesFromOne(W, ring=W), {}, "step 1 of 7, token 1", "positions counted otherwise"),
    (
        AcrossTheSeam(W, ring=W),
        {"cuts": [(T,), (2, 2, 2, 1)]},
        "step 3 of 3x2+1, token 4",
        "see token 3",
    ),
    (Clamped(W, ring=W), {"padded": True}, "token 5, row [2]", "does not see token"),
    (NoWindowAtOne(W, ring=W), {}, "step 2 of 3+4x1, token 3", "steps of one token"),
    (
        ReadFirst(W, ring=W),
        {},
        "step 1 of 7, token 0",
        "does not see itself: the cache is read before",
    ),
    (WriteFirst(W, ring=W), {}, "step 1 of 7, token 0", "writes over its own tokens"),
    (RowZero(W, ring=W), {"padded": True}, "row [", "row 0 is right"),
    (Narrow(W, ring=W), {}, SECOND, "keys holds bfloat16"),
    (NarrowStore(W, ring=W), {}, SECOND, "values is float32"),
    (Swapped(W, ring=W), {}, SECOND, "other values: of tokens 1 to 2"),
    (KeptPlaces(W), {"flax": with_drafts}, "step 2 of 2x3+1", "a truncate that keeps them"),
    (
        KeysAlone(W, ring=W),
        {"flax": with_beams},
        SECOND,
        "the keys of the cache lie in another order",
    ),
]


EACH = (LengthOfSteps, NoWindowAtOne, KeptPlaces)  # in the second, cuts differ from other steps on


@pytest.mark.nightly(but=["NoWindowAtOne"])
@pytest.mark.parametrize(
    ("mine", "options", "place", "hint"),
    with_nightly(FAULTS, commit=lambda row: type(row[0]) in EACH),
    ids=[type(x[0]).__name__ for x in FAULTS],
)
def test_a_fault_is_found_placed_and_named(mine, options, place, hint):
    found = report(mine, **options)
    assert not found.ok
    print(found)
    assert {row.kind for row in found.failed} == {"decode"}
    assert found.first.kind == "decode" and place in found.first.tap
    assert hint in found.first.hint


class Louder(Mine):
    """The layer is wrong, with a cache and without."""

    def attend(self, *args):
        return 2 * super().attend(*args)


class LouderAndLate(Louder, RotaryAtStep):
    """So is its cache."""


@pytest.mark.nightly
def test_a_wrong_layer_is_distinguished_from_a_wrong_cache():
    found = report(Louder(W))
    assert {row.kind for row in found.failed} == {"output", "decode"}
    assert all("whole" not in row.name for row in found.failed)
    assert [place.kind for place in found.divergences] == ["value"]
    assert "mend the layer, not its cache" in str(found)
    both = report(LouderAndLate(W))
    assert both.first.kind == "value" and both.divergences[-1].kind == "decode"
    assert SECOND in both.divergences[-1].tap and "own full forward" in both.divergences[-1].tap


def test_a_report_says_which_cuts_differ_and_draws_where(tmp_path):
    found = report(RotaryAtStep(W))
    assert "cuts that agree: 7\n" in f"{found.first.advice}\n"
    assert found.maps["decoded 2x3+1"].shape == X.shape
    assert not found.maps["decoded 2x3+1"][:, :3].max() > found.first.limit
    assert "decoded 2x3+1" in [row["name"] for row in found.to_dict()["rows"]]
    found.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert SECOND in page and "float64 decode" in page


@pytest.mark.nightly
def test_decode_steps_of_torch_are_the_reference_where_they_differ_from_its_full_forward():
    """Each step doubled in both worlds: steps agree, and a sentence says what they are not."""

    def twice(step):
        def doubled(*args, **kwargs):
            y, cache = step(*args, **kwargs)
            return 2 * y, cache

        return doubled

    own = {"torch": twice(stepped), "flax": twice(with_drafts)}
    found = report(Mine(W), **own)
    assert found.ok and "torch's own steps differ from its full forward pass in 7 (1.0e+00)" in str(
        found
    )
    assert sum(row.kind == "decode" for row in found.rows) == 5


@pytest.mark.nightly
def test_narrow_dtypes_are_held_against_torchs_own_error():
    quick = {"dtypes": ("float32",), "jit": False, "grads": False, "decode": Decode()}
    assert compare(Theirs(W), Mine(W), X, **quick).ok
    found = compare(Theirs(W), RotaryAtStep(W), X, **quick)
    assert SECOND in found.first.tap and not found.first.hint


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("padded", "ring"),
    with_nightly(product([False, True], [None, W]), commit=[(False, W)]),
)
def test_decoding_under_jit_is_equal_and_faults_are_located(padded, ring):
    kwargs = {"valid": PADDED} if padded else {}
    decode = Decode(cuts=[(4, 3)], axes={"0": -2, "valid": -1} if padded else None)
    options = {"dtypes": ("float64",), "eager": False, "grads": False, "decode": decode}
    assert compare(Theirs(W), Mine(W, ring=ring), X, kwargs=kwargs, **options).ok
    found = compare(Theirs(W), RotaryAtStep(W, ring=ring), X, kwargs=kwargs, **options)
    assert "step 2 of 4+3, token 4" in found.first.tap and "query rotated" in found.first.hint


class InItself(Mine):
    """Its cache is held by the module, as `flax.nnx.MultiHeadAttention` holds its own."""

    def __init__(self, window):
        super().__init__(window)
        self.held = nnx.data(None)

    def step(self, x):
        cache = self.init_cache(len(x), T) if self.held is None else self.held
        y, self.held = Mine.__call__(self, x, cache=cache)
        return y


@pytest.mark.nightly(but=["True"])
@pytest.mark.parametrize("jit", [False, True])
def test_a_cache_may_be_held_by_the_module(jit):
    decode = Decode(flax=lambda module, x, cache: (module.step(x), None))
    options = {"dtypes": ("float64",), "jit": jit, "eager": not jit, "grads": False}
    assert compare(Theirs(W), InItself(W), X, decode=decode, **options).ok


class WithoutCache(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(right.D, right.D, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.up(x)


def quick(decode, flax=None, **options):
    options = {"dtypes": ("float64",), "jit": False, "grads": False, **options}
    return compare(Theirs(W), flax or Mine(W), X, decode=decode, **options)


REFUSED = [
    (lambda: quick(Decode(cuts=[(3, 3)])), ValueError, r"sum to the 7 tokens of 0 .*\(3, 3\) sums"),
    (lambda: quick(Decode(cuts=[(0, 7)])), ValueError, r"1 token or more; got \(0, 7\)"),
    (lambda: quick(Decode(axes={"y": -2})), ValueError, "names 'y'; inputs that hold arrays: 0"),
    (lambda: quick(Decode(axes={"0": 5})), ValueError, r"along axis 5; its shape is \[3, 7, 6\]"),
    (lambda: quick((3, 4)), TypeError, "decode takes a Decode, or None"),
    (lambda: quick(Decode(), train=True), ValueError, "got train=True"),
    (lambda: quick(Decode(), WithoutCache(), weights="as_is"), ValueError, "has no init_cache"),
    (
        lambda: quick(Decode(), flax_call=lambda m, x: m(x)),
        ValueError,
        "flax_call takes no cache=",
    ),
    (
        lambda: quick(Decode(torch=lambda m, x, cache: (m(x)[:, 1:], None))),
        ParityError,
        "Step 1 of 7 of torch was given 7 tokens and returned 6",
    ),
    (
        lambda: quick(Decode(flax=lambda m, x, cache: m(x))),
        ParityError,
        r"Step 1 of 7 of Flax fails: A step of Flax must return \(y, cache\)",
    ),
    (
        lambda: quick(Decode(flax=lambda m, x, cache: ((m(x), x), None))),
        ParityError,
        "one array beside its cache; it returned 2",
    ),
    (
        lambda: quick(Decode(flax=lambda m, x, cache: m(x, cache.none))),
        ParityError,
        "Step 1 of 7 of Flax fails: AttributeError",
    ),
]


@pytest.mark.parametrize(("ask", "kind", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_what_cannot_be_decoded_is_refused_in_a_sentence(ask, kind, said):
    with pytest.raises(kind, match=said):
        ask()


def case_of(mine, **options):
    theirs = f"{Theirs.__module__}.Theirs"
    calls = {"dtypes": ("float64",), "rules": ()}
    return Case(mine, {"window": W}, reference=theirs, x=X.shape, decode=Decode(**options), **calls)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    with_nightly([{}, {"torch": stepped}], commit=[{"torch": stepped}]),
    ids=["whole", "steps"],
)
def test_a_golden_replays_the_steps(options, tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "path_of", lambda case: tmp_path / "decoders.safetensors")
    case = case_of(Mine, **options)
    golden.record([case])
    assert case.report(live=True, eager=False).ok
    replayed = case.report(live=False, eager=False)
    assert replayed.ok and sum(row.kind == "decode" for row in replayed.rows) == 10
    monkeypatch.setattr(Mine, "query_places", RotaryAtStep.query_places)
    wrong = case.report(live=False, eager=False)
    assert {row.kind for row in wrong.failed} == {"decode"}
    assert any(SECOND in row.verdict.note for row in wrong.failed)
    case.decode = Decode(cuts=[(2, 5)], torch=stepped)
    with pytest.raises(ParityError, match=r"not recorded step by step \(2\+5\)"):
        case.report(live=False)


@pytest.mark.nightly
def test_the_table_has_a_column_if_a_line_was_decoded():
    decoded, plain = report(Mine(W)), compare(Theirs(W), Mine(W), X, dtypes=("float64",), jit=False)
    without = certificate.columns(certificate.lines([("a", "b", plain)]))
    headings, rows = certificate.columns(
        certificate.lines([("a", "b", plain), ("c", "d", decoded)])
    )
    assert [*without[0]] == [name for name in headings if name != "decoded"]
    cells = [dict(zip(headings, row, strict=True)) for row in rows]
    assert cells[0]["decoded"] == "-" and float(cells[1]["decoded"]) <= judge.SAME_FUNCTION
