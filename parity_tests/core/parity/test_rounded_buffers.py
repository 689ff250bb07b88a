"""Buffers that torch holds in float32: a port that computes them in float64 is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import Recording, compare, record
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")

T, D, WIDTH = 7, 6, 12
X = np.random.RandomState(0).standard_normal((2, T, WIDTH))
ONCE = {"dtypes": ("float64",), "eager": False}


def frequencies(base, np_like, **options):
    return 1.0 / base ** (np_like.arange(0, D, 2, **options) / D)


class Theirs(torch.nn.Module):
    """Attention with two heads whose queries and keys are rotated; `table` keeps the angles."""

    def __init__(self, base=10000.0, table=False):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = torch.nn.LayerNorm(WIDTH)
        inv_freq = frequencies(base, torch, dtype=torch.float32)
        angles = torch.arange(T, dtype=torch.float32)[:, None] * inv_freq
        if table:
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)
        else:
            self.register_buffer("inv_freq", inv_freq, persistent=False)

    def rotation(self, x):
        if hasattr(self, "cos"):
            return self.cos, self.sin
        angles = torch.arange(T, dtype=x.dtype)[:, None] * self.inv_freq.to(x.dtype)
        return angles.cos(), angles.sin()

    def forward(self, x):
        def heads(y):
            return y.unflatten(-1, (2, D)).transpose(1, 2)

        def rotate(y):
            (cos, sin), (a, b) = self.rotation(x), y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        q, k, v = rotate(heads(self.q(x))), rotate(heads(self.k(x))), heads(self.v(x))
        weights = torch.softmax(q @ k.mT / D**0.5, -1)
        return self.norm(self.o((weights @ v).transpose(1, 2).flatten(-2)))


class Mine(nnx.Module):
    """Computes its frequencies in the dtype of the run."""

    def __init__(self, base=10000.0, epsilon=1e-5, factor=1.0):
        rngs = nnx.Rngs(0)
        self.q, self.k, self.v, self.o = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4))
        self.norm = nnx.LayerNorm(WIDTH, epsilon=epsilon, use_fast_variance=False, rngs=rngs)
        self.base, self.factor = base, factor

    def __call__(self, x):
        def heads(y):
            return y.reshape(*y.shape[:2], 2, D).swapaxes(1, 2)

        angles = (
            jnp.arange(T, dtype=x.dtype)[:, None] * frequencies(self.base, jnp, dtype=x.dtype)[None]
        )
        cos, sin = (f(angles)[None, None] for f in (jnp.cos, jnp.sin))

        def rotate(y):
            a, b = jnp.split(y, 2, -1)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        q, k, v = rotate(heads(self.q(x))), rotate(heads(self.k(x))), heads(self.v(x))
        weights = jax.nn.softmax(q @ k.mT / D**0.5)
        y = (weights @ v).swapaxes(1, 2).reshape(*x.shape[:2], WIDTH)
        return self.norm(self.o(y)) * self.factor


def noted(report, name):
    return [note for note in report.notes if note.startswith(f"{name} of torch is rounded to")]


@pytest.mark.nightly
@pytest.mark.parametrize("base", with_nightly([10000.0, 500.0, 500000.0], commit=2))
def test_a_port_that_computes_a_rounded_buffer_is_equal(base):
    report = compare(Theirs(base), Mine(base), X)
    assert report.verdict == "equal" and report.certain, str(report)
    assert len(noted(report, "inv_freq")) == 1, report.notes


@pytest.mark.nightly
def test_rounded_tables_of_cos_and_sin_are_reported_and_equal():
    report = compare(Theirs(table=True), Mine(), X)
    assert report.verdict == "equal", str(report)
    assert len(noted(report, "cos")) == len(noted(report, "sin")) == 1, report.notes


class Sums(torch.nn.Module):
    """A table of sines added before a projection, and with `scales` one that scales after it."""

    def __init__(self, sizes, scales):
        super().__init__()
        rows, wide, few = sizes
        sines = torch.sin(torch.arange(rows * wide) / 9)  # in float32, near zero too
        self.fc, self.out = torch.nn.Linear(wide, few), torch.nn.Linear(few, 3)
        self.register_buffer("pe", sines.view(rows, wide))
        self.register_buffer("by", torch.cos(torch.arange(few * 1.0)) if scales else None)

    def forward(self, x):
        y = torch.tanh(self.fc(x + self.pe[: x.shape[1]]))
        return self.out(y if self.by is None else y * self.by)


class OwnSums(nnx.Module):
    def __init__(self, sizes, scales, factor=1.0):
        self.sizes, self.scales, self.factor = sizes, scales, factor
        self.fc = nnx.Linear(*sizes[1:], rngs=nnx.Rngs(0))
        self.out = nnx.Linear(sizes[2], 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        rows, wide, few = self.sizes
        pe = jnp.sin(jnp.arange(rows * wide) / 9.0).reshape(1, rows, wide)
        y = jnp.tanh(self.fc(x + pe[:, : x.shape[1]]))
        by = jnp.cos(jnp.arange(few * 1.0))[None, None]
        return self.out(y * by if self.scales else y) * self.factor


def drawn_sums(seed):
    random = np.random.default_rng(seed)
    sizes, scales = tuple(map(int, random.integers([6, 5, 3], [9, 9, 5]))), bool(seed % 2)
    return sizes, scales, random.standard_normal((2, 5, sizes[1]))


@pytest.mark.parametrize("seed", with_nightly(range(12), commit=[0, 1]))
def test_gradients_go_by_the_buffers_that_outputs_do_not_tell(seed):
    sizes, scales, x = drawn_sums(seed)
    right = compare(Sums(sizes, scales), OwnSums(sizes, scales), x, **ONCE)
    assert right.verdict == "equal" and noted(right, "pe"), str(right)


@pytest.mark.nightly
def test_a_rounded_table_before_a_fault_is_not_named():
    sizes, scales, x = drawn_sums(1)
    wrong = compare(Sums(sizes, scales), OwnSums(sizes, scales, 1.01), x, **ONCE)
    assert not wrong.ok and noted(wrong, "pe") and "fc" not in {row.name for row in wrong.failed}


WRONG = {
    "base": dict(base=10001.0),
    "epsilon": dict(epsilon=1e-6),
    "a factor": dict(factor=1 + 1e-9),
}


@pytest.mark.nightly
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_port_is_different(wrong, table):
    report = compare(Theirs(table=table), Mine(**WRONG[wrong]), X, **ONCE)
    assert report.verdict == "DIFFERENT", report


@pytest.mark.nightly
def test_a_fault_behind_a_rounded_buffer_is_placed():
    report = compare(Theirs(), Mine(factor=1.5), X, **ONCE)
    assert [place.tap for place in report.divergences] == ["output"], report
    assert noted(report, "inv_freq") and "base" not in str(report), report
    report = compare(Theirs(), Mine(epsilon=1e-2), X, **ONCE)
    assert [place.tap for place in report.divergences] == ["norm"], report


@pytest.mark.nightly
def test_optimizer_steps_with_a_rounded_buffer_are_equal():
    report = compare(Theirs(), Mine(), X, **ONCE, optimizer=("sgd", {"lr": 0.1}), steps=2)
    assert report.verdict == "equal", str(report)


@pytest.mark.nightly
def test_a_buffer_that_torch_computes_in_float64_is_not_noted():
    theirs = Theirs()
    theirs.inv_freq = frequencies(10000.0, torch, dtype=torch.float64)
    report = compare(theirs, Mine(), X, **ONCE)
    assert report.verdict == "equal" and not noted(report, "inv_freq"), report


def test_a_recording_cannot_run_torch_again(tmp_path):
    file = tmp_path / "rotary.safetensors"
    record(Theirs(), (X,), file, dtypes=("float64",))
    report = compare(Recording(file), Mine(), eager=False)
    assert report.verdict == "DIFFERENT", report
    theirs = Theirs()  # as docs/porting.md advises
    theirs.inv_freq = frequencies(10000.0, torch, dtype=torch.float64)
    record(theirs, (X,), file, dtypes=("float64",))
    assert compare(Recording(file), Mine(), eager=False).certain
