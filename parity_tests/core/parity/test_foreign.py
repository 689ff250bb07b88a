"""Modules that the harness has never seen: equal ports pass, faults are found where they are."""

import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, assert_parity, compare, port
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="compares with torch")

from parity_tests.foreign import conv_block, gru_encoder, x_attention  # noqa: E402

pytestmark = pytest.mark.nightly

ONCE = {"dtypes": ("float64",), "eager": False}


def conv(kind=conv_block.Port):
    """Arguments and options of a comparison of the convolutional block."""
    pair = conv_block.Theirs(), kind(rngs=nnx.Rngs(0)), conv_block.images()
    return pair, {"torch_call": conv_block.torch_call}


def gru(kind=gru_encoder.Port, gates="reset,update,new"):
    """Arguments and options of a comparison of the encoder."""
    pair = gru_encoder.Theirs(), kind(rngs=nnx.Rngs(0)), *gru_encoder.sentences()
    return pair, {"rules": gru_encoder.rules(gates)}


def attention(kind=x_attention.Port):
    """Arguments and options of a comparison of x-transformers' attention."""
    pytest.importorskip("x_transformers", reason="its attention is the original")
    pair = x_attention.theirs(), kind(rngs=nnx.Rngs(0))
    return pair, {"kwargs": x_attention.inputs()}


@pytest.mark.parametrize("pair", with_nightly([conv, gru, attention], commit=[gru]))
def test_an_equal_port_passes(pair):
    arguments, options = pair()
    report = assert_parity(*arguments, eager=False, **options)
    kinds = {(row.kind, row.dtype) for row in report.rows}
    assert {(k, d) for k in ("output", "gradient") for d in ("float64", "float32")} <= kinds


@pytest.mark.parametrize("pair", [conv, attention])
def test_an_equal_port_passes_in_train_mode(pair):
    arguments, options = pair()
    report = assert_parity(*arguments, train=True, **ONCE, **options)
    assert pair is attention or {"norm.mean", "norm.var"} <= {
        row.name for row in report.rows if row.kind == "state"
    }


FAULTS = {
    "gelu by tanh": (lambda: conv(conv_block.TanhGELU), "act"),
    "reset before the product": (lambda: gru(gru_encoder.OtherGRU), "gru[1]"),
    "gates in another order": (lambda: gru(gates="update,reset,new"), "gru[1]"),
    "heads repeated, not tiled": (lambda: attention(x_attention.Repeats), "attend.scores"),
    "mask one late": (lambda: attention(x_attention.SeesOneMore), "attend.scores"),
    "values repeated, not tiled": (lambda: attention(x_attention.RepeatsValues), "attend.context"),
}


NOW = ["gelu by tanh", "gates in another order", "mask one late"]


@pytest.mark.parametrize("fault", with_nightly(FAULTS, commit=NOW))
def test_a_fault_is_found_in_its_place(fault):
    made, place = FAULTS[fault]
    arguments, options = made()
    with pytest.raises(ParityError) as caught:
        assert_parity(*arguments, **ONCE, **options)
    assert caught.value.report.first.tap == place, caught.value


def test_another_momentum_is_found_in_train_mode_alone():
    arguments, options = conv(conv_block.TorchsMomentum)
    assert compare(*arguments, **ONCE, **options).ok
    report = compare(*arguments, train=True, **ONCE, **options)
    different = {(row.kind, row.name) for row in report.rows if not row.verdict.ok}
    assert different == {("state", "norm.mean"), ("state", "norm.var")}, report


def test_the_variance_that_nnx_keeps_is_told():
    for kind, told in ((conv_block.Plain, True), (conv_block.Port, False)):
        arguments, options = conv(kind)
        report = assert_parity(*arguments, train=True, **ONCE, **options)
        assert any("biased" in note for note in report.notes) is told, report


@pytest.mark.parametrize("pair", [conv, gru, attention])
def test_weights_go_there_and_back(pair):
    (theirs, mine, *_), options = pair()
    rules = options.get("rules", ())
    before = {name: x.clone() for name, x in theirs.state_dict().items()}
    port(theirs, mine, rules)
    for x in theirs.parameters():
        torch.nn.init.zeros_(x)
    port(mine, theirs, rules)
    after = theirs.state_dict()
    assert all(np.array_equal(after[name].numpy(), x.numpy()) for name, x in before.items())
