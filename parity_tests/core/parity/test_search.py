"""The search for one change of torch's program: it is recorded, evaluated again, and changed."""

import re
from importlib import import_module

import numpy as np
import pytest

from flax_attn.parity import judge
from flax_attn.parity.search.engine import explained
from flax_attn.parity.search.replay import Change, Replay, in_float64
from flax_attn.parity.search.target import Target
from flax_attn.parity.sides.run import RunRequest
from flax_attn.parity.sides.tape import Ref, Tape

torch = pytest.importorskip("torch", reason="the search changes torch's program")
gradients = import_module("flax_attn.parity.search.gradients").gradients
sides = import_module("flax_attn.parity.sides.torch.side")
F = torch.nn.functional


class InPlace(torch.nn.Module):
    """Writes into views, and into what views see."""

    def forward(self, x):  # B T D
        y = x * 2
        first, rest = y[:, :1], y[:, 1:]
        rest.add_(1.0)
        first.copy_(rest[:, -1:])
        y.mul_(first.clone())
        y[..., 0] = 0.5
        return torch.relu_(y) + rest.sum()


class OfItself(torch.nn.Module):
    """Overwrites what was read before under another name of the same view."""

    def forward(self, x):
        y = x * 2
        before = y.view_as(y) * 3.0
        y.add_(1.0)
        return before + y


class Detached(torch.nn.Module):
    """Stops gradients in two ways, and needs a gradient of the same numbers beside them."""

    def forward(self, x):
        hard = (x > 0).to(x.dtype)
        soft = torch.sigmoid(x)
        with torch.no_grad():
            scale = soft.mean()
        return hard + soft - soft.detach(), soft * scale + x.detach() * x


class Attends(torch.nn.Module):
    """A mask that is built in the forward pass, and a softmax."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(6, 18)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        scores = (q @ k.mT / 6**0.5).masked_fill(~mask, -torch.inf)
        return F.layer_norm(scores.softmax(-1) @ v + x, (6,))


MODULES = {
    "in place": InPlace,
    "in place behind a view": OfItself,
    "detached": Detached,
    "attention": Attends,
    "a GRU": lambda: torch.nn.GRU(6, 4, batch_first=True),
    "an LSTM of two directions": lambda: torch.nn.LSTM(6, 3, bidirectional=True),
    "a batch norm in train mode": lambda: torch.nn.Sequential(
        torch.nn.Conv1d(5, 4, 3), torch.nn.BatchNorm1d(4), torch.nn.ReLU(inplace=True)
    ),
    "torch's own attention": lambda: torch.nn.MultiheadAttention(6, 2, batch_first=True),
}
SLICED = {"a GRU", "an LSTM of two directions"}
X = np.random.RandomState(0).standard_normal((3, 5, 6))


def recorded(module, *inputs, train=False):
    """The tape of a float64 run, and the run."""
    tape, request = Tape(), RunRequest(inputs, {}, 0, train, True, True)
    weights = {k: p.detach().double().numpy() for k, p in module.named_parameters()}
    run = sides.run_torch(module, lambda m, *xs: m(*xs), request, weights, "float64", tape=tape)
    return tape, run, request


@pytest.mark.parametrize("name", MODULES)
def test_replaying_a_recorded_program_gives_the_same_values(name):
    """Bit for bit, but for products of slices, whose bits depend on where in memory these begin."""
    torch.manual_seed(0)
    inputs = (X, X, X) if name == "torch's own attention" else (X,)
    tape, run, request = recorded(MODULES[name](), *inputs, train="train" in name)
    with in_float64():
        again = Replay(tape, {}, whole=True)
        for output, value in run.outputs.items():
            made = again.value(tape.marks[f"output {output}"])
            if name in SLICED:
                assert judge.same_function(made.detach().numpy(), value).ok, output
            else:
                np.testing.assert_array_equal(made.detach().numpy(), value)
        made = gradients(tape, {}, request.cotangent)
    assert made.keys() == run.gradients.keys()
    for path, gradient in run.gradients.items():
        assert judge.same_function(made[path], gradient, zero=True).ok, path


def test_a_change_reaches_all_that_depends_on_it():
    """A change of one write reaches what every other view of that memory gives."""
    tape, run, _ = recorded(InPlace(), X)
    (added,) = (node for node in tape.nodes if node.name == "add" and node.args[-1] == 1.0)
    change = Change(lambda f, a, k: f(a[0], 3.0))
    with in_float64():
        made = Replay(tape, {added.number: change}).value(tape.marks["output output"])

    class Three(InPlace):
        def forward(self, x):
            y = x * 2
            first, rest = y[:, :1], y[:, 1:]
            rest.add_(3.0)
            first.copy_(rest[:, -1:])
            y.mul_(first.clone())
            y[..., 0] = 0.5
            return torch.relu_(y) + rest.sum()

    np.testing.assert_array_equal(made.numpy(), Three()(torch.from_numpy(X)).numpy())
    assert not np.array_equal(made.numpy(), run.outputs["output"])


def test_values_are_those_that_were_computed():
    """Each is as it was before an operation in place: every operation gives its recorded result."""
    for module in (InPlace(), OfItself()):
        tape, _, _ = recorded(module, X)
        for node in tape.nodes:
            args = [tape.values[a.value] if isinstance(a, Ref) else a for a in node.args]
            if node.kwargs or any(isinstance(a, list) for a in args):
                continue
            made = node.func(*args)
            made = made if node.several else [made]
            for number, value in zip(node.outs, made, strict=True):
                np.testing.assert_array_equal(value, tape.values[number], err_msg=node.name)


class Formula(torch.nn.Module):
    def __init__(self, formula):
        super().__init__()
        self.formula = formula

    def forward(self, x):
        return self.formula(x)


def right(x):
    y = F.gelu(x) * 0.7 + x.roll(1, 1)
    return y / y.square().mean(-1, keepdim=True).sqrt()


FAULTS = {
    "another activation": lambda x: wrong(x, act=F.silu),
    "0.7123, torch 0.7": lambda x: wrong(x, factor=0.7123),
    "shifted the other way": lambda x: wrong(x, by=-1),
    "not added, where torch adds it": lambda x: wrong(x, other=0.0 * x),
    "another axis": lambda x: wrong(x, axis=1),
    "tanh GELU": lambda x: wrong(x, act=lambda y: F.gelu(y, approximate="tanh")),
}


def wrong(x, act=F.gelu, factor=0.7, by=1, other=None, axis=-1):
    y = act(x) * factor + (x.roll(by, 1) if other is None else other)
    return y / y.square().mean(axis, keepdim=True).sqrt()


def searched(got):
    tape, run, _ = recorded(Formula(right), X)
    number, want = tape.marks["output output"], run.outputs["output"]
    return tape, explained(tape, Target(number, got, want), frozenset(), tape.names)


@pytest.mark.nightly
@pytest.mark.parametrize("said", FAULTS)
def test_a_change_is_named_and_holds_on_other_numbers(said):
    tape, outcome = searched(FAULTS[said](torch.from_numpy(X)).numpy())
    cause = outcome.cause
    assert cause is not None and said in cause.sentence, outcome
    other = np.random.RandomState(1).standard_normal(X.shape)
    tape, _, _ = recorded(Formula(right), other)
    with in_float64():
        made = Replay(tape, cause.changes).value(tape.marks["output output"])
    expected = FAULTS[said](torch.from_numpy(other)).numpy()
    assert judge.same_function(made.numpy(), expected).ok


@pytest.mark.nightly
def test_an_unexplained_difference_reports_how_many_changes_were_tried():
    _, outcome = searched(np.random.RandomState(2).standard_normal(X.shape))
    assert outcome.cause is None and outcome.tried > 500, outcome
    assert re.search(r" operations tried, in \d+ s of CPU time: none explains it$", str(outcome))


@pytest.mark.nightly
def test_a_data_dependent_factor_is_not_named_as_the_cause():
    x = torch.from_numpy(X)
    _, outcome = searched((right(x) / (1 + x.abs().max())).numpy())
    assert outcome.cause is None, outcome.cause


def gate_of(x):
    return x * torch.sigmoid(1.3 * x + 0.1)


def normed(x, square=lambda y: y**2):
    y = x - x.mean(-1, keepdim=True)
    return y / (square(y).mean(-1, keepdim=True) + 1e-5).sqrt()


def glued(x, gate=torch.sigmoid):
    y = torch.cat([x, 2 * x.roll(1, -1)], -1)
    one, other = y.chunk(2, -1)
    return one * gate(other)


# Torch's program, the wrong one, and words of the cause.
ROWS = {
    "several operations by one function": (
        lambda x: gate_of(x.roll(1, 1)),
        lambda x: torch.tanh(x.roll(1, 1)),
        "tanh in the place of what leads from",
    ),
    "several operations twice": (
        lambda x: gate_of(x.roll(1, 1)) * 0.5,
        lambda x: gate_of(gate_of(x.roll(1, 1))) * 0.5,
        "applied twice",
    ),
    "several operations left out": (
        lambda x: gate_of(torch.tanh(x)) + x,
        lambda x: torch.tanh(x) + x,
        "left out",
    ),
    "inside a norm": (
        lambda x: F.layer_norm(x, x.shape[-1:]) * 0.7,
        lambda x: normed(x, lambda y: y.abs() ** 3) * 0.7,
        "",
    ),
    "a power inside a norm": (
        lambda x: F.layer_norm(x, x.shape[-1:]) * 0.7,
        lambda x: normed(x, lambda y: 2**y) * 0.7,
        "inside the layer norm",
    ),
    "the other half of a gated unit": (
        lambda x: F.glu(torch.cat([x, 2 * x.roll(1, -1)], -1), -1),
        lambda x: 2 * x.roll(1, -1) * torch.sigmoid(x),
        "the first half as the gate",
    ),
    "another gate of a gated unit": (
        lambda x: F.glu(torch.cat([x, 2 * x.roll(1, -1)], -1), -1),
        lambda x: glued(x, torch.tanh),
        "tanh in the place of the gate's sigmoid",
    ),
    "one number a channel for all": (
        lambda x: torch.sin(x * x.mean((0, 1))) + x,
        lambda x: torch.sin(x.mean((0, 1)) * x.mean((0, 1))) + x,
        "the mean",
    ),
    "an earlier value with its axes turned": (
        lambda x: torch.tanh(x.mT.contiguous() * 2).mT + torch.exp(x),
        lambda x: torch.tanh(torch.exp(x)) + torch.exp(x),
        "its axes in the order [0, 2, 1] in the place of",
    ),
    "a constant of one number": (
        lambda x: x.mean() + 0.25 * x.square().mean(),
        lambda x: x.mean() + 0.025 * x.square().mean(),
        "0.025, torch 0.25",
    ),
}


def cause_of(theirs, ours):
    tape, run, _ = recorded(Formula(theirs), X)
    number, want = tape.marks["output output"], run.outputs["output"]
    got = ours(torch.from_numpy(X)).numpy()
    return explained(tape, Target(number, got, want), frozenset(), tape.names).cause


@pytest.mark.nightly(
    but=[
        "a power inside a norm",
        "another gate of a gated unit",
        "several operations by one function",
    ]
)
@pytest.mark.parametrize("row", ROWS)
def test_changes_of_several_operations_and_of_other_operands(row):
    theirs, ours, said = ROWS[row]
    cause = cause_of(theirs, ours)
    if not said:
        assert cause is None, cause
        return
    assert cause is not None and said in cause.sentence, cause
    other = np.random.RandomState(1).standard_normal(X.shape)
    tape, _, _ = recorded(Formula(theirs), other)
    with in_float64():
        made = Replay(tape, cause.changes).value(tape.marks["output output"])
    assert judge.same_function(made.numpy(), ours(torch.from_numpy(other)).numpy(), zero=True).ok


NORMED = {
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:], x[0, 0], x[0, 1], 1e-3),
    "layer norm without weights": lambda x: F.layer_norm(x, x.shape[1:], eps=1e-3),
    "group norm": lambda x: F.group_norm(x.mT, 2, x[0, 0], x[0, 1], 1e-3),
    "batch norm": lambda x: F.batch_norm(x.mT, None, None, x[0, 0], x[0, 1], True, eps=1e-3),
    "batch norm in eval mode": lambda x: F.batch_norm(
        x.mT, x[0, 0].detach(), x[0, 1].detach(), x[0, 2], eps=1e-3
    ),
}


@pytest.mark.parametrize("name", NORMED)
def test_the_formulas_of_norms_equal_those_of_torch(name):
    """Otherwise no change inside it could be found."""
    formulas = import_module("flax_attn.parity.search.inside")
    x = np.random.RandomState(2).standard_normal((3, 5, 6)) ** 2 + 0.1
    tape, run, _ = recorded(Formula(NORMED[name]), x)
    (node,) = (node for node in tape.nodes if node.name in formulas.NORMS)
    args = [tape.values[a.value] if isinstance(a, Ref) else a for a in node.args]
    made = formulas.NORMS[node.name](*args)[0].numpy()
    assert judge.same_function(made, run.outputs["output"]).ok
