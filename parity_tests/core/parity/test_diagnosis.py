"""Diagnosis: places of faults, several at once, backward ones; and everything left as it was."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, compare, judge
from flax_attn.parity.report import ANOTHER_WAY
from flax_attn.taps import tap
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")

X = np.random.RandomState(0).standard_normal((3, 5, 6))
QUICK = {"dtypes": ("float64",), "jit": False}


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(6, 4) for _ in range(3))
        self.out = torch.nn.Linear(4, 7)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.mT / 2.0 + torch.arange(5) * 0.1
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        return self.out(torch.softmax(scores, -1) @ v)


@jax.custom_vjp
def tripled_backward(x):
    return x


tripled_backward.defvjp(lambda x: (x, None), lambda _, g: (3 * g,))


class Port(nnx.Module):
    """A faithful port; each of its class's attributes can be another function."""

    scale = staticmethod(lambda s: s / 2)
    softmax = staticmethod(jax.nn.softmax)
    queries = staticmethod(lambda q: q)
    contexts = staticmethod(lambda c: c)
    outputs = staticmethod(lambda y: y)

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.q, self.k, self.v = (nnx.Linear(6, 4, rngs=rngs) for _ in range(3))
        self.out = nnx.Linear(4, 7, rngs=rngs)

    def __call__(self, x):
        q, k, v = self.queries(self.q(x)), self.k(x), self.v(x)
        scores = self.scale(q @ k.mT) + (jnp.arange(5) * jnp.asarray(0.1, x.dtype))[None, None]
        hidden = jnp.triu(jnp.ones((5, 5), bool), 1)[None]
        weights = tap("weights", self.softmax(tap("scores", jnp.where(hidden, -jnp.inf, scores))))
        return self.outputs(self.out(tap("context", self.contexts(weights @ v))))


def port(**parts):
    return type("Faulty", (Port,), {name: staticmethod(part) for name, part in parts.items()})()


def narrow_softmax(scores):
    return jax.nn.softmax(scores.astype(jnp.float32)).astype(scores.dtype)


@pytest.mark.nightly
def test_a_faithful_port_needs_no_diagnosis():
    report = compare(Original(), Port(), X, **QUICK)
    assert report.ok and not report.local and not report.divergences and not report.maps


FAULTS = {
    "scores": ({"scale": lambda s: s / 2.1}, "value", "scale"),
    "weights": ({"softmax": narrow_softmax}, "value", "float32"),
    "context": ({"contexts": lambda c: -c}, "value", "negative"),
    "q": ({"queries": tripled_backward}, "gradient", "3"),
    "out": ({"outputs": tripled_backward}, "gradient", "3"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("place", with_nightly(FAULTS, commit=["weights", "context", "q"]))
def test_a_fault_is_placed_and_named(place):
    parts, kind, words = FAULTS[place]
    report = compare(Original(), port(**parts), X, **QUICK)
    assert not report.ok
    assert (report.first.tap, report.first.kind) == (place, kind), report
    said = report.first.hint or report.first.note  # that a size is float32's is no proof
    assert words in said
    assert [d.tap for d in report.divergences] == [place]
    assert f"DIFFERENT at {place}" in str(report) and said in str(report)


def test_two_faults_are_both_named_and_the_step_between_is_not():
    report = compare(Original(), port(scale=lambda s: s, contexts=lambda c: 2 * c), X, **QUICK)
    assert [d.tap for d in report.divergences] == ["scores", "context"]
    assert "not scaled" in report.divergences[0].hint
    assert "another scale: twice" in report.divergences[1].hint
    innocent = {row.name: row.verdict.ok for row in report.local if row.kind == "local"}
    assert innocent["weights"] and innocent["out"] and not innocent["context"]
    assert set(report.maps) == {"scores", "context"}
    assert report.maps["context"].shape == (3, 5, 4)


@pytest.mark.nightly
def test_the_report_names_the_line_of_a_cast():
    report = compare(Original(), port(softmax=narrow_softmax), X, dtypes=("float64",), eager=False)
    line = narrow_softmax.__code__.co_firstlineno + 1
    assert any(f"test_diagnosis.py:{line} (narrow_softmax)" in note for note in report.notes)


@pytest.mark.nightly
def test_a_product_below_the_asked_precision_is_found():
    def low(context):
        eye = jnp.eye(4, dtype=context.dtype)
        return jnp.matmul(context, eye, precision="default")

    report = compare(Original(), port(contexts=low), X, **QUICK)
    assert not report.ok
    assert report.first.kind == "exact" and "test_diagnosis.py" in str(report)


@pytest.mark.nightly
def test_lost_precision_is_placed_in_narrow_dtypes():
    def rounded(softmax):
        return lambda s: softmax(s.astype(jnp.bfloat16)).astype(s.dtype)

    faulty = port(softmax=rounded(jax.nn.softmax))
    report = compare(Original(), faulty, X, dtypes=("float32",), eager=False)
    assert (report.first.tap, report.first.kind) == ("weights", "precision")


class Float32Inside(Original):
    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.mT / 2.0 + torch.arange(5) * 0.1
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        return self.out(torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype) @ v)


@pytest.mark.nightly
def test_a_float32_softmax_of_torch_is_lifted_and_told():
    report = compare(Float32Inside(), Port(), X, **QUICK)
    assert report.ok, report
    assert any("float32" in note and "lifted" in note for note in report.notes)


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4)

    def forward(self, x):
        return self.out(self.norm(x))


class NormedPort(nnx.Module):
    def __init__(self, momentum=0.9):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(
            6, momentum=momentum, epsilon=1e-5, use_fast_variance=False, rngs=rngs
        )
        self.out = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(x))


@pytest.mark.nightly
def test_running_statistics_agree_after_training():
    report = compare(Normed(), NormedPort(), X[:, 0], train=True, **QUICK)
    assert report.ok, report
    assert {row.name for row in report.rows if row.kind == "state"} == {"norm.mean", "norm.var"}
    assert any("unbiased" in note for note in report.notes)
    wrong = compare(Normed(), NormedPort(momentum=0.99), X[:, 0], train=True, **QUICK)
    assert {row.name for row in wrong.failed} == {"norm.mean", "norm.var"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(["sgd", "adamw"], commit=["adamw"]))
def test_steps_of_an_optimizer_agree(name):
    options = {"sgd": dict(lr=0.1, momentum=0.9), "adamw": dict(lr=1e-2, weight_decay=1e-2)}
    report = compare(Original(), Port(), X, optimizer=(name, options[name]), steps=3, **QUICK)
    assert report.ok, report
    steps = [row.name for row in report.rows if row.kind == "step"]
    assert "q.kernel after step 1" in steps and "out.bias after step 3" in steps
    wrong = port(queries=tripled_backward)
    report = compare(Original(), wrong, X, optimizer=(name, options[name]), steps=1, **QUICK)
    assert any(row.kind == "step" for row in report.failed)


class Changes(Original):
    def forward(self, x):
        x += 1
        return super().forward(x)


class Fails(Original):
    def forward(self, x):
        if x.dtype == torch.float64:
            raise TypeError("no float64 here")
        return super().forward(x)


class GivesNaN(Original):
    def forward(self, x):
        return super().forward(x) * torch.tensor([1.0, torch.nan] + [1.0] * 5)


@pytest.mark.parametrize(
    ("module", "words"),
    [(Changes, "in place"), (Fails, "fails in float64: TypeError: no float64 here")],
)
def test_unsuitable_torch_modules_are_refused(module, words):
    with pytest.raises(ParityError, match=words):
        compare(module(), Port(), X, **QUICK)


def test_nan_in_the_reference_proves_nothing():
    class Same(Port):
        outputs = staticmethod(lambda y: y.at[..., 1].set(jnp.nan))

    report = compare(GivesNaN(), Same(), X, **QUICK)
    assert not report.ok and "torch itself gives NaN" in str(report)


def test_tensors_are_refused_as_inputs():
    with pytest.raises(TypeError, match="numpy"):
        compare(Original(), Port(), torch.from_numpy(X), **QUICK)


def test_modules_in_the_wrong_order_are_refused():
    with pytest.raises(
        TypeError, match=r"torch.nn.Module or a Recording of one, a flax.nnx.Module"
    ):
        compare(Port(), Original(), X, **QUICK)


class Draws(Original):
    def forward(self, x):
        torch.rand(3), np.random.rand(3), random.random()
        raise RuntimeError("stops")


@pytest.mark.parametrize("module", [Original, Draws])
def test_compare_restores_modules_and_global_state(module):
    theirs, ours = module(), Port()
    theirs.q.weight.requires_grad_(False)
    before = {k: v.clone() for k, v in theirs.state_dict().items()}
    kernel, call = np.array(ours.q.kernel[...]), Port.__dict__["__call__"]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    try:
        compare(theirs, ours, X, **QUICK)
    except ParityError:
        assert module is Draws
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all() and random.getstate() == states[2]
    assert torch.get_default_dtype() == torch.float32 and not jax.config.jax_enable_x64
    assert Port.__dict__["__call__"] is call and nnx.Linear.__call__.__name__ == "__call__"
    assert all(torch.equal(v, before[k]) for k, v in theirs.state_dict().items())
    assert theirs.training and not theirs.q.weight.requires_grad
    assert (np.array(ours.q.kernel[...]) == kernel).all()


def test_an_equivalent_step_is_reported_and_the_report_is_equal():
    keys = np.arange(5.0)[None, None]
    same = port(scale=lambda s: s / 2 + keys, softmax=lambda s: jax.nn.softmax(s - keys))
    report = compare(Original(), same, X, **QUICK)
    assert report.ok and report.rewritten == ("scores",) and report.first is None
    assert (
        report.worst("float64", "output", "tap") < judge.SAME_FUNCTION
    )  # the rewritten tap does not count
    assert "computed another way inside, with the same result: scores" in str(report)
    assert report.verdict == ANOTHER_WAY and report.certain


def test_submodules_in_another_mode_are_reported():
    theirs = Original()
    theirs.v.eval()
    report = compare(theirs, Port(), X, **QUICK)
    assert report.ok
    assert "v of torch came in another mode than the rest: all ran in eval mode" in report.notes


@pytest.mark.nightly
def test_a_dropout_that_ignores_eval_mode_is_reported():
    class Always(Port):
        def __init__(self):
            super().__init__()
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.dropout(super().__call__(x), deterministic=False)

    with pytest.raises(ParityError, match="in eval mode"):
        compare(Original(), Always(), X, **QUICK)
