"""Whole models: repeated layers, layers stacked for a scan, progress messages and memory."""

import gc
import weakref
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, Rule, compare, plan, port
from flax_attn.parity.options import Options
from flax_attn.parity.sides.calls import plain_call
from flax_attn.parity.sides.run import RunRequest
from flax_attn.parity.sides.torch.live import Live
from flax_attn.weights.in_order import defined, paired_in_order

torch = pytest.importorskip("torch", reason="the harness compares with torch")
whole = import_module("flax_attn.parity.compare")

D, LAYERS = 6, 4
IDS = np.random.RandomState(0).randint(0, 11, (2, 5))
QUICK = {"dtypes": ("float64",), "jit": False}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(D)
        self.up, self.down = torch.nn.Linear(D, 8), torch.nn.Linear(8, D)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    """An embedding, blocks that are counted, a head that is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(11, D)
        self.h = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(D, 11, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


class Port(nnx.Module):
    def __init__(self, rngs, epsilon=1e-5):
        self.ln = nnx.LayerNorm(D, epsilon=epsilon, use_fast_variance=False, rngs=rngs)
        self.fc, self.proj = nnx.Linear(D, 8, rngs=rngs), nnx.Linear(8, D, rngs=rngs)

    def __call__(self, x):
        return x + self.proj(jax.nn.relu(self.fc(self.ln(x))))


class Counted(nnx.Module):
    def __init__(self, faulty=-1):
        rngs = nnx.Rngs(0)
        self.wte = nnx.Embed(11, D, rngs=rngs)
        epsilons = [1e-3 if i == faulty else 1e-5 for i in range(LAYERS)]
        self.layers = nnx.List([Port(rngs, epsilon) for epsilon in epsilons])

    def __call__(self, ids):
        x = self.wte(ids)
        for block in self.layers:
            x = block(x)
        return self.wte.attend(x)


class Stacked(nnx.Module):
    def __init__(self, layers=LAYERS):
        self.wte = nnx.Embed(11, D, rngs=nnx.Rngs(0))
        make = nnx.vmap(lambda key: Port(nnx.Rngs(key)))
        self.layers = make(jax.random.split(jax.random.key(0), layers))

    def __call__(self, ids):
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.wte.attend(run(self.wte(ids), self.layers))


RULES = [
    Rule("h.*.{norm,up,down} -> layers.*.{ln,fc,proj}"),
    Rule.tied("head.weight -> wte.weight"),
]


@pytest.mark.nightly
def test_layers_that_torch_counts_fill_a_stack_and_come_back():
    theirs, mine = Model(), Stacked()
    assert compare(theirs, mine, IDS, rules=RULES, **QUICK).ok
    port(theirs, mine, RULES)
    np.testing.assert_array_equal(
        mine.layers.fc.kernel[2], theirs.h[2].up.weight.detach().numpy().T
    )
    again = Model()
    port(mine, again, RULES)
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert "h.0.norm.weight ... h.3.norm.weight -> layers.ln.scale" in str(
        plan(theirs, mine, RULES)
    )


@pytest.mark.nightly
def test_a_fused_weight_of_counted_layers_fills_stacked_parts():
    theirs = torch.nn.Module()
    theirs.h = torch.nn.ModuleList(torch.nn.Linear(5, 9, bias=False) for _ in range(3))
    parts = nnx.vmap(
        lambda key: nnx.Dict(
            a=nnx.Linear(5, 4, use_bias=False, rngs=nnx.Rngs(key)),
            b=nnx.Linear(5, 5, use_bias=False, rngs=nnx.Rngs(key)),
        )
    )
    mine = Part()
    mine.layers = Part()
    stack = parts(jax.random.split(jax.random.key(0), 3))
    mine.layers.a, mine.layers.b = stack["a"], stack["b"]
    port(theirs, mine, [Rule("h.*.weight -> layers.*.{a,b}.kernel", "(n o) i -> n i o", o=(4, 5))])
    for i, layer in enumerate(theirs.h):
        got = np.concatenate([mine.layers.a.kernel[i], mine.layers.b.kernel[i]], -1)
        np.testing.assert_array_equal(got, layer.weight.detach().numpy().T)


class Part(nnx.Module):
    """Holds what it is given."""


def test_a_stack_of_another_number_of_layers_is_refused_by_both_shapes():
    with pytest.raises(
        ParityError, match=r"fill layers.fc.kernel as \[4, 6, 8\], but it is \[3, 6"
    ):
        plan(Model(), Stacked(3), RULES)
    twice = [Rule("h.*.norm -> layers.*.ln"), *RULES[1:], Rule("h.1.up -> layers.0.fc")]
    twice += [Rule("h.*.{up,down} -> layers.*.{fc,proj}")]
    with pytest.raises(
        ParityError, match=r"Layer 0 of layers.fc.kernel is filled twice: by h.1.up"
    ):
        plan(Model(), Stacked(), twice)


def test_braces_without_a_layout_rename_modules_in_pairs():
    rule = Rule("a.{q,k} -> {query,key}")
    groups = rule.groups(["a.q.weight", "a.k.weight", "a.k.bias"])
    assert groups == [
        (("a.q.weight",), ("query.weight",)),
        (("a.k.weight",), ("key.weight",)),
        (("a.k.bias",), ("key.bias",)),
    ]
    with pytest.raises(ParityError, match="A rule of 1 names onto 2 needs a layout"):
        Rule("qkv -> {q,k}")


@pytest.mark.nightly
def test_repeated_layers_are_printed_as_one_line_and_a_fault_is_located_in_its_layer():
    equal = compare(Model(), Counted(), IDS, rules=RULES, **QUICK)
    assert equal.ok and "layers.0 ... layers.3: equal, worst layers." in str(equal)
    report = compare(Model(), Counted(faulty=2), IDS, rules=RULES, **QUICK)
    assert report.first.tap == "layers.2.ln" and "another epsilon" in report.first.hint
    assert "layers.0 ... layers.3: equal but for layers.2, worst of the others" in str(report)


@pytest.mark.nightly
def test_only_a_large_comparison_prints_progress(capsys, monkeypatch):
    compare(Model(), Counted(), IDS, rules=RULES, **QUICK)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("flax_attn.parity.watch.LARGE", 1)
    compare(Model(), Counted(), IDS, rules=RULES, **QUICK)
    lines = capsys.readouterr().err.splitlines()
    told = [line.partition(" (")[0] for line in lines]
    assert told[:2] == [
        "Counted against Model: Flax in float64, eagerly",
        "Counted against Model: torch in float64",
    ]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    compare(Model(), Counted(), IDS, rules=RULES, **QUICK)
    assert capsys.readouterr().err.startswith("\rCounted against Model: Flax in float64, eagerly (")


def test_recording_torch_does_not_copy_its_weights():
    request = RunRequest((IDS,), {}, 0, False, True, True)
    original = Live(Model(), plain_call, request).with_weights("random", None)
    _, truth = original.run("float64", ())
    for name, call in truth.calls.items():
        for role, x in call.params.items():
            held = original.values.get(f"{name}.{role}", original.values["wte.weight"])
            assert np.shares_memory(x, held), (name, role)


@pytest.mark.nightly
def test_compare_keeps_no_reference_to_torch_modules(monkeypatch):
    copies = []
    module = import_module("flax_attn.parity.sides.torch.side")
    plain = module.ready

    def ready(*args):
        made = plain(*args)
        copies.append(weakref.ref(made))
        return made

    monkeypatch.setattr(module, "ready", ready)
    compare(Model(), Counted(), IDS, rules=RULES, **QUICK)
    gc.collect()
    assert copies and not any(copy() is not None for copy in copies)


@pytest.mark.nightly
@pytest.mark.parametrize(("times", "runs"), [(2.0, 1), (1e-30, 3)])
def test_noise_is_measured_once_for_large_errors_and_three_times_near_the_limit(
    monkeypatch, times, runs
):
    """Near is what more of torch's noise could excuse: here the error is torch's noise itself."""
    asked = []
    plain = Live.noisy

    def noisy(self, dtype, keeps):
        for run in plain(self, dtype, keeps):
            asked.append(dtype)
            yield run

    monkeypatch.setattr(Live, "noisy", noisy)
    monkeypatch.setattr("flax_attn.parity.judge.NOISE", times)
    monkeypatch.setattr("flax_attn.parity.judge.SAME_FUNCTION", min(times, 1.0) * 1e-12)
    epsilon = 1e-3 if runs == 1 else 1e-5
    compare(Block(), Port(nnx.Rngs(0), epsilon), X, rules=NAMED, **QUICK)
    assert len(asked) == runs


X = np.random.RandomState(1).standard_normal((3, 5, D))
NAMED = [Rule("{norm,up,down} -> {ln,fc,proj}")]


def test_layers_without_matching_names_are_paired_in_definition_order():
    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.ModuleDict({"LayerNorm": torch.nn.LayerNorm(D)})
            self.output = torch.nn.ModuleDict({"LayerNorm": torch.nn.LayerNorm(D)})

    class Mine(nnx.Module):
        def __init__(self):
            self.norm_z, self.norm_a = (nnx.LayerNorm(D, rngs=nnx.Rngs(0)) for _ in range(2))

    assert defined(Mine()) == ["norm_z", "norm_a"]
    with pytest.raises(ParityError) as caught:
        plan(Theirs(), Mine())
    text = str(caught.value)
    assert 'Rule("attention.LayerNorm -> norm_z")' in text
    assert 'Rule("output.LayerNorm -> norm_a")' in text
    assert "norm_z and norm_a fit either way, and no name tells" in text
    alike = {("q", "query"): 0.9, ("q", "key"): 0.2, ("k", "query"): 0.1, ("k", "key"): 0.9}
    assert paired_in_order(alike, ["k", "q"], ["query", "key"]) == {}


@pytest.mark.nightly
def test_a_rule_for_one_tensor_pairs_its_two_modules():
    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = torch.nn.Linear(D, D, bias=False), torch.nn.LayerNorm(D)

        def forward(self, x):
            return self.norm(self.first(x))

    class Mine(nnx.Module):
        def __init__(self):
            self.one = nnx.Linear(D, D, use_bias=False, rngs=nnx.Rngs(0))
            self.norm = nnx.LayerNorm(D, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(self.one(x))

    rule = Rule("first.weight -> one.kernel", "o i -> o i")
    report = compare(Theirs(), Mine(), X, rules=[rule], **QUICK)
    assert report.first.tap == "one" and report.first.hint == "first.weight untransposed"


def test_an_error_raised_by_a_module_is_shown_in_full():
    class Fails(nnx.Module):
        def __call__(self, x):
            raise ValueError("shapes differ:\n  3 rows\n  4 rows")

    with pytest.raises(ParityError) as caught:
        compare(torch.nn.Identity(), Fails(), X, **QUICK)
    assert "shapes differ:\n  3 rows\n  4 rows.\nAt " in str(caught.value)


@pytest.mark.nightly
def test_the_advised_tap_halves_what_lies_between():
    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(7)))
            self.out = torch.nn.Linear(D, 4)

        def forward(self, x):
            return self.out(self.steps(x))

    class Mine(nnx.Module):
        def __init__(self):
            self.out = nnx.Linear(D, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            for _ in range(6):
                x = jnp.tanh(x)
            return self.out(x)

    first = compare(Theirs(), Mine(), X, **QUICK).first
    assert first.kind == "between", first
    assert "tap('steps.4', ...)" in first.advice or "tap('steps.3', ...)" in first.advice, (
        first.advice
    )


@pytest.mark.nightly
def test_the_arrays_of_a_run_are_freed_before_the_next_run():
    request = RunRequest((X,), {}, 0, False, True, True)
    original = Live(Block(), plain_call, request)
    pair = whole.make_pair(original, Port(nnx.Rngs(0)), Options(rules=NAMED))
    made, told = [], []

    def at(part):
        gc.collect()
        told.append((part, [run() is not None for run in made]))

    pair.watch.at = at
    for _, (got, *_) in pair.run("float64", ["eager", "jit"]):
        made.append(weakref.ref(got))
        del got, _
    assert ("Flax in float64, under jit", [False]) in told, told
