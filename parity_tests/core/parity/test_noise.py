"""Torch's own rounding noise: ill-conditioned right ports pass by it, wrong ones do not."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch", reason="parity is with torch")

from flax_attn.parity import compare  # noqa: E402
from flax_attn.parity.sides.torch.noise import RoundingMove, noise  # noqa: E402

X = np.random.RandomState(0).standard_normal((3, 40))
FLOAT64 = {"dtypes": ("float64",), "eager": False}


class Torch(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Port(nnx.Module):
    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


def compared(theirs, mine, *xs, **options):
    return compare(Torch(theirs), Port(mine), *xs, **{**FLOAT64, **options})


def variance_by_moments(x):
    x = x + 1e6
    return (x * x).mean(-1) - x.mean(-1) ** 2


def variance_by_sums(x):
    x = x + 1e6
    return jnp.sum(x * x, axis=-1) / 40 - (jnp.sum(x, axis=-1) / 40) ** 2


def saturated(x):
    weights = torch.softmax(1e5 * x, dim=-1)
    return (weights * x).sum(-1)


def saturated_too(x):
    x_ = x * 1e5
    powers = jnp.exp(x_ - x_.max(axis=-1, keepdims=True))
    return jnp.sum(powers * x, axis=-1) / jnp.sum(powers, axis=-1)


RIGHT = [
    (variance_by_moments, variance_by_sums),
    (lambda x: (x + 1e9) - 1e9, lambda x: (x - 1e9) + 1e9),
]


@pytest.mark.parametrize(("theirs", "mine"), RIGHT)
def test_a_right_port_is_equal_up_to_noise_where_the_input_is_ill_conditioned(theirs, mine):
    report = compared(theirs, mine, X)
    assert report.verdict == "equal as far as this input can tell" and report.unsure
    assert report.ok and not report.certain
    assert "equal as far as this input can tell" in str(report)


@pytest.mark.nightly
def test_a_wrong_port_of_an_ill_conditioned_function_is_different():
    wrong = [
        lambda x: 1.001 * variance_by_sums(x),
        lambda x: variance_by_sums(x) * 40 / 39,
        lambda x: variance_by_sums(x[:, ::-1].at[:, 0].add(0.1)),
    ]
    for mine in wrong:
        report = compared(variance_by_moments, mine, X)
        assert report.verdict == "DIFFERENT", report


def test_a_well_conditioned_comparison_measures_no_noise():
    report = compared(lambda x: torch.softmax(x, -1), lambda x: nnx.softmax(x), X)
    assert report.certain and report.verdict == "equal"
    assert all(row.verdict.noise is None for row in report.rows)
    assert compared(saturated, saturated_too, X).ok


@pytest.mark.nightly
def test_noise_is_reported_next_to_every_error_in_every_dtype():
    dtypes = ("float64", "float32", "bfloat16")
    linear, mine = torch.nn.Linear(40, 7), nnx.Linear(40, 7, rngs=nnx.Rngs(0))
    report = compare(linear, mine, X, dtypes=dtypes, noise=True, eager=False)
    assert report.ok
    rows = [row for row in report.rows if row.kind in ("output", "gradient")]
    eps = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}
    assert {row.dtype for row in rows} == {*dtypes}
    for row in rows:
        assert row.verdict.noise is not None
        assert 0.02 * eps[row.dtype] < row.verdict.noise < 20 * eps[row.dtype], row
    told = str(report)
    assert "torch's own rounding noise beside each error" in told
    assert told.count("output") >= 3 and "gradient  input 0" in told


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_noise_changes_each_operation_by_at_most_one_unit_and_no_view_or_copy(dtype):
    kind = getattr(torch, dtype)
    x = torch.rand(50, 60, dtype=torch.float64).to(kind) + 1
    eps = torch.finfo(kind).eps
    with noise(RoundingMove(0), dtype):
        made = {"exp": x.exp(), "div": x / 3, "mm": x @ x.T, "sum": x.sum(0)}
        kept = [x.T, x.reshape(60, 50), x.clone(), torch.cat([x, x]), x[3:], x.relu()]
    plain = {"exp": x.exp(), "div": x / 3, "mm": x @ x.T, "sum": x.sum(0)}
    for name, y in made.items():
        apart = ((y.double() - plain[name].double()) / plain[name].double()).abs()
        assert apart.max() > 0, name
        assert apart.max() <= 2 * eps, name
    for y, want in zip(
        kept, [x.T, x.reshape(60, 50), x, torch.cat([x, x]), x[3:], x.relu()], strict=True
    ):
        assert torch.equal(y, want)
    with noise(RoundingMove(0), dtype):
        again = x.exp()
    assert torch.equal(again, made["exp"])


def test_a_difference_that_cancels_is_moved_by_what_was_added():
    x = torch.tensor([[1e8, 1.0, -1e8]], dtype=torch.float64)
    with noise(RoundingMove(1), "float64"):
        moved = x.sum() - 1
        product = x @ torch.ones(3, 1, dtype=torch.float64) - 1
    for off in (moved, product):
        assert 1e-10 < off.abs() < 1e-7


def relative(x):
    places = torch.arange(5, dtype=x.dtype) * 0.1 * 10
    index = (places[:, None] - places + 4).long()
    return (
        x[:, 4 * index].sum((1, 2)) + (x > 0.3).to(x.dtype).sum(-1) + torch.floor(places / 3).sum()
    )


@pytest.mark.nightly
def test_comparisons_and_indices_get_no_noise():
    """An index made of floating numbers, a comparison, a number rounded down."""

    def wrong(x):
        places = jnp.asarray(np.arange(5.0) * 0.1 * 10)
        index = (places[:, None] - places[None] + 4).astype(int)
        whole = x[:, 4 * index].sum((1, 2)) + (x > 0.3).astype(x.dtype).sum(-1)
        return whole + jnp.floor(places / 3).sum()

    right = compared(relative, wrong, X, noise=True)
    assert right.certain and all(r.verdict.noise < 1e-13 for r in right.rows if r.kind == "output")
    for off in (lambda x: wrong(x[:, ::-1]), lambda x: wrong(x) + x[:, 0] * 1e-6):
        assert compared(relative, off, X).verdict == "DIFFERENT"


def test_a_result_that_is_only_noise_proves_nothing():
    """An output that is nothing but rounding proves nothing, right or wrong; others still do."""

    def theirs(x):
        return x.cumsum(-1)[:, -1] - x.sum(-1)

    for mine in (lambda x: x.sum(-1) - x[:, ::-1].sum(-1), lambda x: x[:, 0]):
        report = compared(theirs, mine, X, grads=False)
        assert not report.ok and "nothing shows" in str(report)
    both = compared(
        lambda x: (theirs(x), x.sum(-1)), lambda x: (x[:, 0], x.sum(-1)), X, grads=False
    )
    assert both.verdict == "equal"


@pytest.mark.nightly
def test_a_module_that_forgets_to_return_itself_from_train_is_compared():
    class Forgets(Torch):
        def train(self, mode=True):
            super().train(mode)

    assert compare(Forgets(torch.tanh), Port(jnp.tanh), X, **FLOAT64).certain
