"""What holds for every hint: none raises, none absolves a fault, none reads fills as results."""

from importlib import import_module

import numpy as np
import pytest

from flax_attn.parity import judge
from flax_attn.parity.diagnosis import hints
from flax_attn.parity.diagnosis.hints.conditioning import conditioning
from flax_attn.parity.diagnosis.hints.evidence import Evidence
from flax_attn.parity.diagnosis.hints.fills import large, other_fills, without_fills
from flax_attn.parity.diagnosis.hints.fitting import parallel
from flax_attn.parity.diagnosis.hints.norms import norm
from flax_attn.parity.diagnosis.hints.recompute import Attention
from flax_attn.parity.diagnosis.hints.rounding import other_rounding
from flax_attn.parity.diagnosis.hints.state_changes import changed_alone
from flax_attn.parity.sides.match import Layout
from flax_attn.parity.sides.run import Call, Run, Step

RANDOM = np.random.RandomState(3)
LEAST = float(np.finfo(np.float64).min)


def seen(got, want, call=None, tap="output", truth=None):
    layout = Layout.plain(lambda x: x)
    return Evidence(tap, got, want, want, layout, call or Call("output"), truth or Run())


def explained(evidence):
    """The whole difference, or one in part."""
    return hints.explained(evidence) or hints.explained_in_part(evidence)


def test_a_gradient_of_zeros_is_stopped_and_one_with_zeros_in_part():
    want, part = np.asarray([1.0, -2.0, 3.0]), np.asarray([1.0, 0.0, 3.0])
    assert hints._backward_hint(0 * want, want) == "a gradient that is stopped"
    assert hints._backward_hint(part, want) == "a gradient that is stopped in part"


WARNED = {"first": "raising", "later": "raising", "made": "made", "judged": "throughout"}


@pytest.mark.parametrize("step", WARNED)
def test_a_guess_that_raises_is_no_guess(monkeypatch, step):
    """It is named in a warning; neither it nor its search takes the verdict away."""
    want = RANDOM.standard_normal((3, 4))

    def raising(evidence):
        if step == "later":
            yield "none", evidence.plain + 1
        if step == "judged":
            yield "this", lambda share: 1 / 0
        raise ValueError("cannot reshape array")

    def made(evidence):
        raise ValueError("cannot reshape array")

    monkeypatch.setattr(hints, "submodule", made if step == "made" else raising)
    with pytest.warns(RuntimeWarning) as heard:
        assert explained(seen(-want, want)) == "the other sign"
    assert any(f"The hint '{WARNED[step]}' failed by " in str(x.message) for x in heard)


def test_a_number_may_be_all_there_is():
    assert not large(np.float64(3.0)) and large(np.float64(-1e30))


class Names:
    tap = staticmethod(lambda name: name)
    carried = staticmethod(lambda found: {})


def test_whatever_raises_there_is_no_hint(monkeypatch):
    want = RANDOM.standard_normal((3, 4))
    row = type("Row", (), {"name": "a"})()
    runs = Run(taps={"a": -want}), Run(taps={"a": want}, calls={"a": Call("Odd")})
    assert hints.hint(row, *runs, Names()) == "the other sign"
    monkeypatch.setattr(hints, "explained", None)
    monkeypatch.setattr(hints, "_evidence", None)
    with pytest.warns(RuntimeWarning, match="The hint 'of a tap' failed by TypeError"):
        assert hints.hint(row, *runs, Names()) == ""
    with pytest.warns(RuntimeWarning, match="The hint 'of a gradient' failed"):
        assert hints.backward_hint(want, None) == ""


def test_taps_of_one_name_that_are_no_attention_give_none():
    """Linears called query and key beside the points of another product."""
    shapes = {"query": (4, 5, 6), "key": (4, 5, 6), "scores": (8, 3, 6, 6), "weights": (8, 3, 6, 6)}
    taps = {name: RANDOM.standard_normal(shape) for name, shape in shapes.items()}
    truth = Run(taps=taps, calls={name: Call(name) for name in taps})
    step = Step("mul", 0, (None, 2.0), (8, 3, 6, 6))
    truth.calls["scores"] = Call("scores", steps=[step])
    assert Attention.of(seen(taps["scores"], taps["scores"], tap="scores", truth=truth)) is None


def linear(near, **more):
    """A linear layer of terms that nearly cancel."""
    half, x = RANDOM.standard_normal((4, 4)), RANDOM.standard_normal((5, 4))
    weight = np.concatenate([half, -half * (1 + near * RANDOM.standard_normal((4, 4)))], 1)
    x = np.concatenate([x, x], -1)
    want = x @ weight.T
    call = Call("Linear", {"0": x, **more}, {"weight": weight})
    return x[:, ::-1] @ weight[:, ::-1].T, want, call


@pytest.mark.parametrize("near", [1e-6, 1e-8])
def test_a_sum_in_another_order_is_told(near):
    got, want, call = linear(near)
    assert "this input cannot tell" in conditioning(seen(got, want, call, tap="down"))


def test_no_fault_is_absolved():
    got, want, call = linear(1e-8)
    assert not conditioning(seen(got * 1.5, want, call, tap="down"))
    assert not conditioning(seen(got, want * 1.01, call, tap="down"))  # not what torch computed
    filled = np.where(np.arange(4) == 1, -np.inf, want)
    assert not conditioning(seen(got, filled, call, tap="down"))
    score = 3 * RANDOM.standard_normal((2, 5, 7))
    want = 1 / (1 + np.exp(-score))
    got = np.exp(score) / np.exp(score).sum(-1, keepdims=True)
    call = Call("weights", {"scores": score})
    assert not conditioning(seen(got, want, call, tap="weights"))


def test_fills_are_no_results():
    want = RANDOM.standard_normal((3, 4))
    shown, want[0, 0] = want.copy(), LEAST
    said = other_fills(seen(shown, want))
    assert said == "another mask: torch hides [0, 0], Flax does not"
    assert other_fills(seen(want, shown)) == "another mask: Flax hides [0, 0], torch does not"
    got = np.where(want == LEAST, -1e9, -want)
    assert other_fills(seen(got, want)) == ""
    assert explained(without_fills(seen(got, want))) == "the other sign"


def rounding(x, dtype):
    ml_dtypes = import_module("ml_dtypes")
    return x.astype(getattr(ml_dtypes, dtype, dtype)).astype(np.float64)


def test_roundings_to_16_bits_are_told_and_what_is_as_small_is_not():
    x = RANDOM.standard_normal((5, 7))
    for dtype, other in (("bfloat16", "float16"), ("float16", "bfloat16")):
        said = other_rounding(seen(x, rounding(x, dtype)))
        assert said == f"torch rounds to {dtype} here, Flax does not"
        said = other_rounding(seen(rounding(x, dtype), x))
        assert said == f"Flax rounds to {dtype} here, torch does not"
        said = other_rounding(seen(rounding(x, other), rounding(x, dtype)))
        assert dtype in said and other in said and "not" not in said
    want = rounding(x, "bfloat16")
    assert other_rounding(seen(want * (1 + 1e-5), want)) == ""
    assert other_rounding(seen(want * 1.01, want)) == ""


def test_the_side_that_changes_its_state_is_told():
    run, truth = Run(state={"n": np.array(3)}), Run(state={"n": np.array(4)}, changed=["n"])
    said = changed_alone("n", run, truth, Names())
    assert said == "a counter that is not counted up: torch changes n in this call, Flax does not"
    run.changed, truth.changed = ["n"], []
    assert changed_alone("n", run, truth, Names()) == "Flax changes n in this call, torch does not"
    truth.changed = ["n"]
    assert changed_alone("n", run, truth, Names()) == ""


def test_a_number_is_found_however_little_there_is_of_its_fault():
    x = 20 * RANDOM.standard_normal((4, 9))
    for share in (1.0, 1e-4):
        got = x + share * (7.3 * np.tanh(x / 7.3) - x)
        found = parallel(lambda at: 10**at * np.tanh(x / 10**at), x, got, np.linspace(-1, 4, 51))
        assert found is not None and judge.allclose(np.array(10**found), np.array(7.3))


@pytest.mark.nightly(but=["", "n - 1"])
@pytest.mark.parametrize("spread", ["", "n - 1", "outside"])
def test_no_norm_has_another_epsilon_of_the_same_number(spread):
    """Nor is its own input another one."""
    x = 0.02 * RANDOM.standard_normal((5, 6))
    gap, gain = x - x.mean(-1, keepdims=True), RANDOM.standard_normal(6)
    by = {
        "": np.sqrt((gap**2).mean(-1, keepdims=True) + 1e-5),
        "n - 1": np.sqrt((gap**2).sum(-1, keepdims=True) / 5 + 1e-5),
        "outside": np.sqrt((gap**2).mean(-1, keepdims=True)) + 1e-5,
    }
    call = Call("Norm", {"0": x}, {"weight": gain}, {"eps": 1e-5})
    want = gap / by[spread] * gain
    truth = Run(taps={"up": x, "norm": want}, calls={"up": Call("Linear"), "norm": call})
    for other in by.keys() - {spread}:
        got = gap / by[other] * gain
        for share in (1.0, 1e-4):
            mixed = want + share * (got - want)
            said = explained(seen(mixed, want, call, "norm", truth))
            assert said.startswith("divided by "), said
    said = [what for what, _ in norm(seen(want, want, call, "norm", truth), x, gain)]
    assert not any("1e-05, not 1e-05" in what or "input is up" in what for what in said)
