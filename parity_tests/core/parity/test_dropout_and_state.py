"""Train mode: how masks are drawn, what is trained, and what a call leaves behind."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, Rule, assert_parity, compare
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")
ONCE = {"dtypes": ("float64",), "eager": False}
X = np.random.RandomState(0).standard_normal((3, 5, 6))


class Theirs(torch.nn.Module):
    """A linear layer and dropout."""

    def __init__(self, rate):
        super().__init__()
        self.up, self.dropout = torch.nn.Linear(6, 4), torch.nn.Dropout(rate)

    def forward(self, x):
        return self.dropout(self.up(x))


class Dropout(nnx.Module):
    """Keeps `kept` of all places and divides by `divisor`; each method is a place for a fault."""

    def __init__(self, kept, divisor, rngs):
        self.kept, self.divisor, self.rngs = kept, divisor, rngs.dropout.fork()
        self.deterministic = False

    def key(self):
        return self.rngs()

    def mask(self, shape):
        return jax.random.bernoulli(self.key(), self.kept, shape)

    def __call__(self, x):
        return x if self.deterministic else jnp.where(self.mask(x.shape), x / self.divisor, 0)


class FixedKey(Dropout):
    def key(self):
        return jax.random.key(3)


class HeldKey(Dropout):
    """Its key is held, and every call draws from the same."""

    def __init__(self, kept, divisor, rngs):
        super().__init__(kept, divisor, rngs)
        self.held = nnx.Variable(jax.random.key(3))

    def key(self):
        return self.held.get_value()


class SplitKey(HeldKey):
    """Its key is held, and split at every call."""

    def key(self):
        key, now = jax.random.split(self.held.get_value())
        self.held.set_value(key)
        return now


class Mine(nnx.Module):
    def __init__(self, kind, *rates):
        rngs = nnx.Rngs(0)
        self.up, self.dropout = nnx.Linear(6, 4, rngs=rngs), kind(*rates, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.up(x))


def told(report):
    return [row.verdict.note for row in report.failed]


RATES = [(0.1, True), (0.75, False)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rate", "jit"), with_nightly(product([0.1, 0.5, 0.75], [True, False]), commit=RATES)
)
def test_masks_that_are_drawn_as_torch_draws_pass(rate, jit):
    options = {"train": True, "dtypes": ("float64",), "jit": jit, "eager": not jit}
    for mine in (Mine(nnx.Dropout, rate), Mine(SplitKey, 1 - rate, 1 - rate)):
        report = assert_parity(Theirs(rate), mine, X, **options)
        assert [row.name for row in report.rows if row.kind == "exact"].count("dropout") == 1


@pytest.mark.nightly
def test_dropout_masks_are_compared_in_float32_alone():
    options = {"train": True, "dtypes": ("float32",)}
    assert_parity(Theirs(0.1), Mine(nnx.Dropout, 0.1), X, **options)
    assert not compare(Theirs(0.1), Mine(Dropout, 0.1, 0.9), X, **options).ok


KEYS = [(FixedKey, True), (HeldKey, False)]


@pytest.mark.nightly(but=["FixedKey-True"])
@pytest.mark.parametrize(
    ("kind", "jit"), with_nightly(product([FixedKey, HeldKey], [True, False]), commit=KEYS)
)
def test_a_mask_from_a_fixed_key_is_found(kind, jit):
    options = {"train": True, "dtypes": ("float64",), "jit": jit, "eager": not jit}
    report = compare(Theirs(0.5), Mine(kind, 0.5, 0.5), X, **options)
    assert len(report.failed) == 1 and "same for every random key" in told(report)[0]
    assert report.first.tap == "dropout" and "same for every random key" in str(report)


@pytest.mark.nightly
def test_an_inverted_keep_rate_is_named():
    report = compare(Theirs(0.1), Mine(Dropout, 0.1, 0.9), X, train=True, **ONCE)
    (said,) = told(report)
    assert "keeps 0.1 of its places in Flax and 0.9 in torch" in said and "inverted" in said, said
    report = compare(Theirs(0.1), Mine(Dropout, 0.8, 0.9), X, train=True, **ONCE)
    (said,) = told(report)
    assert "keeps 0.8" in said and "inverted" not in said


@pytest.mark.nightly
def test_the_dropped_share_is_named_if_no_rate_is_known():
    class Uniform(Dropout):
        def mask(self, shape):
            from flax_attn.taps import tap

            return tap("keep", jax.random.uniform(self.key(), shape) < self.kept)

    assert_parity(Theirs(0.1), Mine(Uniform, 0.9, 0.9), X, train=True, **ONCE)
    for kept in (0.1, 0.8, 0.95):
        report = compare(Theirs(0.1), Mine(Uniform, kept, 0.9), X, train=True, **ONCE)
        (said,) = told(report)
        assert ("inverted" in said) is (kept == 0.1), said


@pytest.mark.parametrize("axis", with_nightly([0, 1, 2], commit=[0]))
def test_a_dropout_mask_repeated_along_an_axis_is_named(axis):
    """One mask for the whole batch, say, told to torch as one for each."""

    class Shared(Dropout):
        def mask(self, shape):
            from flax_attn.taps import tap

            one = (*shape[:axis], 1, *shape[axis + 1 :])
            drawn = jax.random.uniform(self.key(), one) < self.kept
            return tap("keep", jnp.broadcast_to(drawn, shape))

    x = np.random.RandomState(0).standard_normal((8, 9, 6))
    report = compare(Theirs(0.5), Mine(Shared, 0.5, 0.5), x, train=True, **ONCE)
    (said,) = told(report)
    assert f"the same all along its axis {axis} of [8, 9, 4]" in said


@pytest.mark.nightly
def test_a_dropout_mask_too_small_to_judge_is_reported():
    x = np.ones((1, 6))
    report = compare(Theirs(0.5), Mine(nnx.Dropout, 0.5), x[:, :6], train=True, **ONCE)
    assert report.ok, report

    class Tiny(torch.nn.Module):
        def forward(self, x):
            return x * torch.nn.functional.dropout(x[:1, :1] * 0 + 1, 0.002)

    class Port(nnx.Module):
        def __init__(self):
            self.rngs = nnx.Rngs(0)

        def __call__(self, x):
            keep = jax.random.bernoulli(self.rngs(), 0.998, (1, 1))
            return x * jnp.where(keep, 1 / 0.998, 0)

    report = assert_parity(Tiny(), Port(), x, train=True, **ONCE)
    assert any("too few to tell" in note for note in report.notes), report


@pytest.mark.nightly
def test_keys_that_the_call_makes_are_others_in_the_second_call():
    class Port(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(6, 4, rngs=nnx.Rngs(0))

        def __call__(self, x, key):
            keep = jax.random.bernoulli(key, 0.5, (3, 5, 4))
            return jnp.where(keep, self.up(x) / 0.5, 0)

    outside = jax.random.key(7)
    calls = (
        lambda m, x: m(x, jax.random.key(1)),
        lambda m, x: m(x, nnx.Rngs(3).dropout()),
        lambda m, x: m(x, outside),
        lambda m, x: m(x, key=jax.random.PRNGKey(1)),
    )
    for call in calls:
        assert_parity(Theirs(0.5), Port(), X, train=True, flax_call=call, **ONCE)


@pytest.mark.nightly
def test_functions_of_torch_that_draw_by_bernoulli_repeat_too():
    class Path(torch.nn.Module):
        def forward(self, x):
            kept = torch.bernoulli(torch.full((3, 1, 1), 0.75, dtype=x.dtype))
            return x * kept / 0.75 + x.new_empty(3, 5, 1).bernoulli_(0.5)

    class Port(nnx.Module):
        first, second = 0.75, 0.5

        def __init__(self):
            self.rngs = nnx.Rngs(0)

        def __call__(self, x):
            kept = jax.random.bernoulli(self.rngs(), self.first, (3, 1, 1))
            more = jax.random.bernoulli(self.rngs(), self.second, (3, 5, 1))
            return x * kept / 0.75 + more

    class Wrong(Port):
        second = 0.25

    assert_parity(Path(), Port(), X, train=True, **ONCE)
    report = compare(Path(), Wrong(), X, train=True, **ONCE)
    assert [row.name for row in report.failed] == ["dropout mask#2"], report


class Frozen(nnx.Variable):
    """What is no Param."""


def frozen(theirs):
    theirs.up.weight.requires_grad_(False)
    return theirs


@pytest.mark.nightly
def test_what_is_not_trained_in_torch_is_not_trained_in_flax():
    class Port(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
            self.up.kernel = Frozen(self.up.kernel.get_value())

        def __call__(self, x):
            return self.up(x)

    class Trains(Port):
        def __init__(self):
            self.up = nnx.Linear(6, 4, rngs=nnx.Rngs(0))

    assert_parity(frozen(Theirs(0.0)), Port(), X)
    report = compare(frozen(Theirs(0.0)), Trains(), X, **ONCE)
    assert [row.name for row in report.failed] == ["up.kernel is trained"]
    assert "hold it in an nnx.Variable that is no Param" in str(report)
    report = compare(Theirs(0.0), Port(), X, **ONCE)
    assert [row.name for row in report.failed] == ["up.kernel is trained"]
    assert "nnx.Param" in str(report)
    optimizer = {"optimizer": ("sgd", {"lr": 0.1}), "steps": 2}
    assert_parity(frozen(Theirs(0.0)), Port(), X, **ONCE, **optimizer)


class Counts(torch.nn.Module):
    """Counts its calls, and keeps a mean, in eval mode too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))
        self.calls = 0

    def forward(self, x):
        self.seen += 1
        self.calls += 1
        self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
        return x - self.mean


class Counter(nnx.Variable):
    """State that is no Param."""


class CountsToo(nnx.Module):
    step, share = 1, 0.1

    def __init__(self):
        self.seen = Counter(jnp.zeros((), int))
        self.mean = Counter(jnp.zeros(6))
        self.calls = 0

    def __call__(self, x):
        self.seen[...] += self.step
        self.calls += 1
        self.mean[...] = (1 - self.share) * self.mean[...] + 0.1 * x.mean((0, 1))
        return x - self.mean[...][None, None]


def test_state_that_both_sides_have_is_compared_in_eval_mode_too():
    class Twice(CountsToo):
        step = 2

    class Still(CountsToo):
        def __call__(self, x):  # torch alone changes `seen`
            self.calls += 1
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean((0, 1))
            return x - self.mean[...][None, None]

    class Other(CountsToo):
        share = 0.2

    report = assert_parity(Counts(), CountsToo(), X)
    rows = [row.name for row in report.rows if row.kind == "state" and row.mode == "jit"]
    assert sorted(rows) == ["calls", "mean", "seen"]
    for port, name in ((Twice, "seen"), (Still, "seen"), (Other, "mean")):
        report = compare(Counts(), port(), X + 1, **ONCE)
        kinds = {row.name for row in report.failed if row.kind == "state"}
        assert kinds == ({name} if name == "seen" else set()), report


def test_state_that_one_side_changes_is_noted():
    class Plain(torch.nn.Module):
        def forward(self, x):
            return x - 0.1 * x.mean((0, 1))

    class Port(nnx.Module):
        def __call__(self, x):
            return x - 0.1 * x.mean((0, 1))[None, None]

    notes = assert_parity(Counts(), Port(), X, **ONCE).notes
    for name in ("seen", "mean", "calls"):
        assert any(f"changes {name} in torch alone" in note for note in notes), notes
    notes = assert_parity(Plain(), CountsToo(), X, **ONCE).notes
    for name in ("seen", "mean", "calls"):
        assert any(f"changes {name} in Flax alone" in note for note in notes), notes
    assert assert_parity(Plain(), Port(), X, **ONCE).notes == ()


def test_a_buffer_that_is_carried_stays_as_it_was_built():
    """Random weights are drawn for parameters alone."""

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(6, 4)
            self.register_buffer("kept", torch.arange(1.0, 5.0))

        def forward(self, x):
            return self.up(x) * self.kept

    class Port(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
            self.kept = nnx.BatchStat(jnp.zeros(4))

        def __call__(self, x):
            return self.up(x) * self.kept[...][None, None]

    rules = [Rule("kept -> kept")]
    assert assert_parity(Scaled(), Port(), X, rules=rules, **ONCE).params == 3


def test_a_layer_that_is_pinned_to_a_dtype_is_noted():
    class Port(nnx.Module):
        def __init__(self, **fixed):
            self.up = nnx.Linear(6, 4, rngs=nnx.Rngs(0), **fixed)

        def __call__(self, x):
            return self.up(x).astype(x.dtype)

    dtypes = {"dtypes": ("bfloat16",)}
    notes = compare(Theirs(0.0), Port(dtype=jnp.float32), X, **dtypes).notes
    assert any("up of Flax still computes in float32" in note for note in notes), notes
    assert not compare(Theirs(0.0), Port(), X, **dtypes).notes


def test_sentences_say_what_to_do():
    class Two(Theirs):
        def forward(self, x):
            return super().forward(x), 3

    class TwoToo(Mine):
        def __call__(self, x):
            return super().__call__(x), 3

    mine = Mine(nnx.Dropout, 0.0)
    report = compare(Two(0.0), mine, X, **ONCE)
    take = "take [0] of what torch returns: torch_call=lambda m, *xs: m(*xs)[0]"
    assert take in str(report)
    report = compare(Theirs(0.0), TwoToo(nnx.Dropout, 0.0), X, **ONCE)
    assert "take [0] of what Flax returns: flax_call=lambda m, *xs: m(*xs)[0]" in str(report)

    class Numpy(Theirs):
        def __init__(self):
            super().__init__(0.0)
            self.table = np.ones((6, 4), np.float64)

        def forward(self, x):
            return super().forward(x) + x @ torch.from_numpy(self.table)

    with pytest.raises(ParityError, match=r"Make table \(a numpy array\) of it follow the"):
        compare(Numpy(), mine, X, dtypes=("float32",))

    class Breaks(Theirs):
        def forward(self, x):
            raise KeyError("dtype")

    with pytest.raises(ParityError) as caught:
        compare(Breaks(0.0), mine, X, **ONCE)
    assert "or pass torch_call=" in str(caught.value) and "constants" not in str(caught.value)
    with pytest.raises(ParityError) as caught:
        compare(Breaks(0.0), mine, X, torch_call=lambda m, x: m(x), **ONCE)
    assert "pass torch_call" not in str(caught.value)


@pytest.mark.nightly
def test_products_wider_than_the_run_are_noted_in_a_persons_own_lines():
    class Wide(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((4, 3)))

        def __call__(self, x):
            return (x.astype(jnp.float32) @ self.w.astype(jnp.float32)).astype(x.dtype)

    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4, 3))

        def forward(self, x):
            return x @ self.w

    x = np.random.RandomState(0).standard_normal((5, 4))
    narrow = compare(Theirs(), Wide(), x, dtypes=("bfloat16",))
    assert any("multiplies in float32 amid bfloat16" in note for note in narrow.notes), narrow
    assert not compare(Theirs(), Wide(), x, dtypes=("float32",)).notes
