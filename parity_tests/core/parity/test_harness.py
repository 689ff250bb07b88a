"""The harness on trial: planted faults are found and placed, faithful rewrites are not flagged."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import Case, ParityError, Report, Rule, assert_parity, compare
from flax_attn.parity import port as carry
from flax_attn.parity.cases import golden
from flax_attn.reference import softmax
from flax_attn.taps import tap
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")
X = np.random.RandomState(0).standard_normal((3, 5, 6))
QUICK = {"dtypes": ("float64",), "eager": False}


class Original(torch.nn.Module):
    """Norm, causal attention with dropout, and a projection; square weights throughout."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        self.q, self.k, self.v, self.out = (torch.nn.Linear(6, 6) for _ in range(4))
        self.dropout = torch.nn.Dropout(0.4)

    def forward(self, x):
        x = self.norm(x)
        scores = self.q(x) @ self.k(x).transpose(-2, -1) / 6**0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
        return self.out(self.dropout(weights) @ self.v(x))


class Faithful(nnx.Module):
    """The port; each method is a place where a fault can be planted."""

    epsilon, rate = 1e-5, 0.4

    def __init__(self):
        rngs = nnx.Rngs(0)
        eps = {"epsilon": self.epsilon, "use_fast_variance": False}
        self.norm = nnx.LayerNorm(6, **eps, rngs=rngs)
        self.q, self.k, self.v, self.out = (nnx.Linear(6, 6, rngs=rngs) for _ in range(4))
        self.dropout = nnx.Dropout(self.rate, rngs=rngs)

    def project(self, layer, x):
        return layer(x)

    def logits(self, q, k):
        return q @ k.mT / 6**0.5

    def future(self, scores):
        return jnp.triu(jnp.ones_like(scores, dtype=bool), k=1)

    def weigh(self, scores):
        return softmax(scores)

    def drop(self, weights):
        return self.dropout(weights)

    def __call__(self, x):
        x = self.norm(x)
        q, k = self.project(self.q, x), self.project(self.k, x)
        scores = self.logits(q, k)
        scores = tap("scores", jnp.where(self.future(scores), -jnp.inf, scores))
        weights = tap("weights", self.weigh(scores))
        return self.finish(self.out(self.drop(weights) @ self.v(x)))

    def finish(self, out):
        return out


class ScaleOnQueries(Faithful):
    def logits(self, q, k):
        return (q / 6**0.5) @ k.mT


class NoScale(Faithful):
    def logits(self, q, k):
        return q @ k.mT


class MaskShifted(Faithful):
    def future(self, scores):
        return jnp.triu(jnp.ones_like(scores, dtype=bool), k=2)


class OtherEpsilon(Faithful):
    epsilon = 1e-6


class OtherAxis(Faithful):
    def weigh(self, scores):
        return jax.nn.softmax(jnp.where(jnp.isinf(scores), -1e30, scores), axis=-2)


class Untransposed(Faithful):
    def project(self, layer, x):
        return x @ layer.kernel[...].T + layer.bias[...].reshape(1, 1, -1)


class HiddenCast(Faithful):
    def weigh(self, scores):
        return softmax(scores.astype(jnp.float32)).astype(scores.dtype)


class Flat(Faithful):
    def finish(self, out):
        return out.reshape(-1, 6)


class NarrowOutput(Faithful):
    def finish(self, out):
        return out.astype(jnp.float16)


class OneNaN(Faithful):
    def finish(self, out):
        return out.at[0, 1, 2].set(jnp.nan)


@jax.custom_vjp
def half_the_gradient(x):
    return x


half_the_gradient.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))


class WrongBackward(Faithful):
    def finish(self, out):
        return half_the_gradient(out)


class SmallFault(Faithful):
    def logits(self, q, k):
        return super().logits(q, k).at[-1, -1, -1].multiply(1 + 1e-6)


class OtherRate(Faithful):
    rate = 0.2


class NoDropout(Faithful):
    def drop(self, weights):
        return weights


FAULTS = {
    NoScale: "scores",
    SmallFault: "scores",
    MaskShifted: "scores",
    OtherEpsilon: "norm",
    OtherAxis: "weights",
    HiddenCast: "weights",
    Untransposed: "scores",
    NarrowOutput: "names, shapes, dtypes",
    Flat: "names, shapes, dtypes",
    OneNaN: "output",
    WrongBackward: "out",
}


@pytest.mark.nightly
@pytest.mark.parametrize("train", with_nightly([False, True], commit=[True]))
def test_a_faithful_port_is_equal(train):
    dtypes = ("float64", "float32", "bfloat16")
    report = compare(Original(), Faithful(), X, train=train, dtypes=dtypes)
    assert report.ok, report
    kinds = {(row.kind, row.dtype, row.mode) for row in report.rows}
    assert {("gradient", "float64", "eager"), ("gradient", "float64", "jit")} <= kinds
    assert {("output", "float32", "jit"), ("gradient", "bfloat16", "jit")} <= kinds
    assert {("tap", "float64", "jit"), ("exact", "", "")} <= kinds


@pytest.mark.nightly
def test_assert_parity_raises_with_the_report():
    assert assert_parity(Original(), Faithful(), X, **QUICK).ok
    with pytest.raises(ParityError, match="DIFFERENT at scores") as caught:
        assert_parity(Original(), NoScale(), X, reproduce="do this", **QUICK)
    assert isinstance(caught.value.report, Report) and isinstance(caught.value, AssertionError)
    assert "see it again  do this" in str(caught.value)


def state_of(torch_module, flax_module):
    flax = nnx.to_flat_state(nnx.state(flax_module))
    return (
        [x.clone() for x in torch_module.state_dict().values()],
        [
            np.array(
                jax.random.key_data(v) if jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key) else v
            )
            for v in (leaf.get_value() for _, leaf in flax)
        ],
        torch.get_rng_state(),
        (torch.get_default_dtype(), torch_module.training, jax.config.jax_enable_x64),
        (jax.random.bernoulli, nnx.Linear.__call__, flax_module.dropout.deterministic),
    )


def unchanged(a, b):
    return (
        all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
        and all((x == y).all() for x, y in zip(a[1], b[1], strict=True))
        and torch.equal(a[2], b[2])
        and a[3:] == b[3:]
    )


@pytest.mark.nightly
@pytest.mark.parametrize("port", [Faithful, NoDropout])
def test_compare_leaves_everything_as_it_was(port):
    one, two = Original(), port()
    before = state_of(one, two)
    if port is NoDropout:
        with pytest.raises(ParityError):
            compare(one, two, X, train=True, **QUICK)
    else:
        compare(one, two, X, train=True, **QUICK)
    assert unchanged(before, state_of(one, two))


@pytest.mark.nightly
def test_weights_given_and_as_is():
    one, two = Original(), Faithful()
    assert compare(one, two, X, weights="given", **QUICK).ok
    assert not compare(one, two, X, weights="as_is", **QUICK).ok
    carry(one, two)
    assert compare(one, two, X, weights="as_is", **QUICK).ok
    two.q.kernel.set_value(two.q.kernel[...].T)
    assert compare(one, two, X, weights="as_is", **QUICK).first.tap == "q"


@pytest.mark.nightly
def test_a_square_weight_that_a_rule_leaves_untransposed_is_found():
    wrong = Rule("v.weight -> v.kernel", "o i -> o i")
    assert compare(Original(), Faithful(), X, rules=[wrong], **QUICK).first.tap == "v"


@pytest.mark.nightly
def test_rules_rename_taps_too():
    class Renamed(Original):
        def __init__(self):
            super().__init__()
            self.query = self.q
            del self.q

        def forward(self, x):
            self.__dict__["q"] = self.query
            return super().forward(x)

    report = compare(Renamed(), Faithful(), X, rules=[Rule("query -> q")], **QUICK)
    assert report.ok and any(row.name == "q" and row.kind == "tap" for row in report.rows)


def test_a_report_of_nothing_proves_nothing():
    report = Report("empty", ())
    assert not report.ok and report.first is None and "nothing is proven" in str(report)


@pytest.mark.nightly
def test_json_holds_everything(tmp_path):
    report = compare(Original(), OneNaN(), X, **QUICK)
    report.to_json(tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text())
    assert read["ok"] is False and read["first"]["tap"] == "output"
    assert len(read["rows"]) == len(report.rows) and read["versions"]["torch"]


def test_bad_knobs_are_named():
    for knobs, words in (
        ({"dtypes": ("float8",)}, "float64"),
        ({"dtypes": "float64"}, "float64"),
        ({"weights": "mine"}, "as_is"),
        ({"eager": False, "jit": False}, "eagerly or under jit"),
    ):
        with pytest.raises(ValueError, match=words):
            compare(Original(), Faithful(), X, **knobs)


def recorded(port, name="", **inputs):
    return Case(
        port,
        {},
        reference=f"{__name__}.Original",
        dtypes=("float64",),
        name=name,
        train=True,
        **(inputs or {"x": X}),
    )


@pytest.mark.nightly
def test_a_golden_is_replayed_without_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "path_of", lambda case: tmp_path / f"{case.variant}.safetensors")
    case = recorded(Faithful)
    with pytest.raises(ParityError, match=r"not recorded.*--record test_harness"):
        case.report(live=False)
    assert golden.record([case]) == tmp_path / "test_harness.safetensors"
    assert case.report(live=False, eager=False).ok
    for port in (NoScale, WrongBackward, OneNaN, Flat, OtherRate):
        report = recorded(port).report(live=False, eager=False)
        assert not report.ok and report.rows, port
    assert "other dropout masks" in str(report)
    for stale in (recorded(Faithful, "renamed"), recorded(Faithful, x=X[:2])):
        with pytest.raises(ParityError) as caught:
            stale.report(live=False)
        assert str(stale) in str(caught.value)


def test_two_cases_of_one_name_are_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "path_of", lambda case: tmp_path / "none.safetensors")
    with pytest.raises(ParityError, match="a name of its own"):
        golden.record([recorded(Faithful), recorded(NoScale)])
    assert not list(tmp_path.iterdir())
