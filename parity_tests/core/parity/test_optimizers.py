"""Optimizers: every one against torch over its options, step by step; refusals; the notes."""

import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from flax_attn.parity import judge
from flax_attn.parity.rows.optimizers import (
    CLASSES,
    DEFAULTS,
    NOTES,
    REFUSED,
    Optimizer,
    make,
)

ADAM = dict(lr=0.03, betas=(0.8, 0.9), eps=0.05, weight_decay=0.1)
OPTIONS = {
    "sgd": [
        dict(lr=0.1, momentum=0.9),
        dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2),
        dict(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.2, maximize=True),
        dict(lr=0.1, dampening=0.3, weight_decay=0.2),
    ],
    "adam": [
        ADAM,
        ADAM | dict(amsgrad=True, maximize=True),
        ADAM | dict(decoupled_weight_decay=True),
    ],
    "adamw": [ADAM, ADAM | dict(amsgrad=True), ADAM | dict(maximize=True, weight_decay=0)],
    "rmsprop": [
        dict(lr=0.03, alpha=0.8, eps=0.05, weight_decay=0.1),
        dict(lr=0.03, alpha=0.8, eps=0.05, momentum=0.7, maximize=True),
        dict(lr=0.03, alpha=0.8, eps=0.05, momentum=0.7, weight_decay=0.1, centered=True),
    ],
    "adagrad": [
        dict(lr=0.03, eps=0.05, lr_decay=0.3, weight_decay=0.1),
        dict(lr=0.03, initial_accumulator_value=0.2, maximize=True),
    ],
    "adamax": [ADAM, ADAM | dict(maximize=True)],
    "radam": [ADAM, ADAM | dict(decoupled_weight_decay=True, maximize=True)],
    "adadelta": [dict(rho=0.7, eps=0.05, weight_decay=0.1), dict(lr=0.3, maximize=True)],
}
EACH = [(name, options) for name, cases in OPTIONS.items() for options in [{}, *cases]]
STEPS = 9  # radam begins to rectify at the sixth
SHAPES = {"kernel": (5, 3), "bias": (3,), "gain": ()}


def draws(count: int) -> list[dict[str, np.ndarray]]:
    """Random trees, small numbers and one zero among them; the first stands for parameters."""
    random = np.random.RandomState(3)
    trees = [
        {k: np.asarray(random.standard_normal(s)) for k, s in SHAPES.items()} for _ in range(count)
    ]
    for i, tree in enumerate(trees[1:]):
        tree["kernel"][0] *= 10.0**-i
        tree["bias"][0] = 0.0
    return trees


def by_torch(optimizer, start, gradients) -> list[dict[str, np.ndarray]]:
    torch = pytest.importorskip("torch", reason="torch steps beside")

    params = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in start.items()}
    made, seen = optimizer.torch(list(params.values())), []
    assert type(made).__name__ == CLASSES[optimizer.name]
    for tree in gradients:
        for name, param in params.items():
            param.grad = torch.tensor(tree[name])
        made.step()
        seen.append({k: p.detach().numpy().copy() for k, p in params.items()})
    return seen


def by_optax(optimizer, start, gradients) -> list[dict[str, np.ndarray]]:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params, seen = jax.tree.map(jnp.asarray, start), []
        state = optimizer.optax.init(params)
        for tree in gradients:
            updates, state = optimizer.optax.update(jax.tree.map(jnp.asarray, tree), state, params)
            params = jax.tree.map(jnp.add, params, updates)
            seen.append({k: np.asarray(p) for k, p in params.items()})
    return seen


@pytest.mark.nightly(but=["adagrad-options18", "sgd-options3"])
@pytest.mark.parametrize(("name", "options"), EACH, ids=lambda x: x if isinstance(x, str) else None)
def test_steps_equal_torch(name, options):
    optimizer = make(name, options)
    start, *gradients = draws(1 + STEPS)
    ours, theirs = (walk(optimizer, start, gradients) for walk in (by_optax, by_torch))
    for step, (got, want) in enumerate(zip(ours, theirs, strict=True), 1):
        for key in SHAPES:
            verdict = judge.same_function(got[key], want[key])
            assert verdict.ok, (step, key, verdict)


def test_jitted_steps_are_the_same():
    optimizer = make("adam", ADAM | dict(amsgrad=True))
    jitted = replace(optimizer, optax=optax_jitted(optimizer.optax))
    start, *gradients = draws(1 + STEPS)
    for got, want in zip(
        *(by_optax(o, start, gradients) for o in (jitted, optimizer)), strict=True
    ):
        assert all(judge.same_function(got[key], want[key]).ok for key in SHAPES)


def optax_jitted(transformation):
    return optax.GradientTransformation(transformation.init, jax.jit(transformation.update))


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_torchs(name):
    torch = pytest.importorskip("torch", reason="torch steps beside")

    signature = inspect.signature(getattr(torch.optim, CLASSES[name])).parameters
    assert {k: signature[k].default for k in DEFAULTS[name]} == DEFAULTS[name]
    left = {"foreach", "capturable", "differentiable", "fused"}  # how, not what
    assert set(signature) - set(DEFAULTS[name]) - left == {"params"}


NAIVE = {  # what one would write, and what differs then
    "sgd": (dict(lr=0.1, momentum=0.9, dampening=0.3), optax.sgd(0.1, 0.9)),
    "adam": (dict(amsgrad=True), optax.amsgrad(1e-3)),
    "adamw": ({}, optax.adamw(1e-3)),
    "rmsprop": (dict(alpha=0.9), optax.rmsprop(1e-2)),
    "adagrad": ({}, optax.adagrad(1e-2)),
    "radam": ({}, optax.radam(1e-3)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAIVE)
def test_the_naive_optax_call_differs_from_torch(name):
    options, naive = NAIVE[name]
    start, *gradients = draws(1 + STEPS)
    want = by_torch(make(name, options), start, gradients)[-1]
    got = by_optax(replace(make(name, options), optax=naive), start, gradients)[-1]
    assert not judge.same_function(got["kernel"], want["kernel"]).ok


REFUSED_OPTAX = {
    "nadam": ("NAdam", dict(lr=0.01), optax.nadam(0.01)),
    "rprop": ("Rprop", dict(lr=0.01), optax.rprop(0.01)),
    "adafactor": ("Adafactor", dict(lr=0.01), optax.adafactor(0.01)),
    "muon": ("Muon", dict(lr=0.01, weight_decay=0.0), optax.contrib.muon(0.01)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", REFUSED_OPTAX)
def test_refused_options_differ_from_torch(name, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch steps beside")

    kind, options, naive = REFUSED_OPTAX[name]
    monkeypatch.setitem(CLASSES, name, kind)
    optimizer = Optimizer(
        name, options, lambda params: getattr(torch.optim, kind)(params, **options), naive, ()
    )
    start, gradient = ({"kernel": tree["kernel"]} for tree in draws(2))
    got, want = (walk(optimizer, start, [gradient])[0] for walk in (by_optax, by_torch))
    assert not judge.same_function(got["kernel"], want["kernel"]).ok


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_why_and_what_there_is(name):
    with pytest.raises(
        ValueError, match=f"^{name} cannot be compared: .*; these can: sgd, adam"
    ) as caught:
        make(name)
    assert REFUSED[name] in str(caught.value)


WRONG = [
    ("sgdd", {}, "No optimizer is called 'sgdd'; there are sgd, adam, "),
    ("Adam", {}, "No optimizer is called 'Adam'; "),
    ("sgd", dict(betas=(0.9, 0.99)), "sgd has no option 'betas'; it has lr, momentum, "),
    ("adam", dict(b1=0.9, b2=0.99), "adam has no option 'b1', 'b2'; it has lr, betas, "),
    ("adam", dict(betas=(0.9, 1.0)), "betas of adam must be two in [0, 1); got (0.9, 1.0)."),
    ("adam", dict(betas=0.9), "betas of adam must be two in [0, 1); got 0.9."),
    ("adam", dict(lr=-1.0), "lr of adam must be a number, not negative; got -1.0."),
    ("adam", dict(lr=float("nan")), "lr of adam must be a number, not negative; got nan."),
    ("adam", dict(lr=True), "lr of adam must be a number, not negative; got True."),
    ("adam", dict(amsgrad=1), "amsgrad of adam must be True or False; got 1."),
    ("sgd", dict(nesterov=True), "nesterov needs momentum and no dampening; got momentum=0.0, "),
]


@pytest.mark.parametrize(("name", "options", "says"), WRONG)
def test_bad_options_are_refused_in_one_sentence(name, options, says):
    with pytest.raises(ValueError) as caught:
        make(name, options)
    assert str(caught.value).startswith(says)


def test_notes_are_of_the_options_in_use():
    assert make("adam").notes == ()
    assert make("adam", dict(amsgrad=True)).notes == (NOTES["adam"]["amsgrad"],)
    assert make("adamw").notes == (NOTES["adamw"]["weight_decay"],)
    assert make("sgd", dict(momentum=0.9)).notes == ()


def test_options_are_not_shared():
    options = dict(lr=0.5)
    optimizer = make("sgd", options)
    options["lr"] = 0.25
    assert optimizer.options["lr"] == 0.5 and make("sgd").options["lr"] == DEFAULTS["sgd"]["lr"]
