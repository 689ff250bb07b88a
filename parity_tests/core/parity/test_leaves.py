"""Whatever goes into a module and comes out of it is compared, in whatever it is wrapped."""

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx, struct

from flax_attn.parity import ParityError, assert_parity, compare, judge
from flax_attn.parity.compare import make_pair
from flax_attn.parity.options import Options
from flax_attn.parity.sides.run import RunRequest
from flax_attn.parity.sides.torch.live import Live
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")
ONCE = {"dtypes": ("float64",), "eager": False}
X = np.random.RandomState(0).standard_normal((3, 5, 6))


def call(module, *args, **kwargs):
    return module(*args, **kwargs)


@pytest.mark.nightly
def test_inputs_of_submodules_are_recorded_on_both_sides():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(6, 4)

        def forward(self, x):
            return self.up(self.up(x + 1)[..., [0, 1, 2, 3, 0, 1]])

    class Port(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(6, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.up(self.up(x + 1)[..., np.array([0, 1, 2, 3, 0, 1])])

    request = RunRequest((X,), {}, seed=0, train=False, grads=True, taps=True)
    original = Live(Twice(), call, request)
    pair = make_pair(original, Port(), Options(flax_call=call))
    for mode, (got, _, truth) in pair.run("float64", ["eager", "jit"]):
        assert set(got.inputs) == set(got.taps) == {"up", "up#2"}, mode
        for name, inputs in got.inputs.items():
            (want,) = truth.calls[name].inputs.values()
            assert judge.same_function(inputs[0], want).ok and len(inputs) == 1


class Theirs(torch.nn.Module):
    """A linear layer, its output wrapped by `how`."""

    def __init__(self, how):
        super().__init__()
        self.up, self.how = torch.nn.Linear(6, 4), how

    def forward(self, x):
        return self.how(self.up(x))


class Mine(nnx.Module):
    """The same in Flax."""

    def __init__(self, how):
        self.up, self.how = nnx.Linear(6, 4, rngs=nnx.Rngs(0)), how

    def __call__(self, x):
        return self.how(self.up(x))


@dataclass
class Both:
    y: Any
    more: Any = None


class Named(NamedTuple):
    y: Any
    more: Any = None


@struct.dataclass
class Struct:
    y: Any
    more: Any = struct.field(pytree_node=False, default=None)


@jax.tree_util.register_pytree_with_keys_class
class Tree:
    """What is no dataclass, but registered with JAX."""

    def __init__(self, y, more=None):
        self.y, self.more = y, more

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("y"), self.y), (key("more"), self.more)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def detached(y):
    return y.detach().numpy() if torch.is_tensor(y) else y


# What torch's module returns of y, and Flax's; both with a factor by which Flax's may be wrong.
WRAPPED = {
    "a dataclass": (lambda y: Both(y), lambda y, f: Both(f * y)),
    "a dataclass in a dict": (lambda y: {"a": Both(y)}, lambda y, f: {"a": Both(f * y)}),
    "a named tuple": (lambda y: Named(y), lambda y, f: Named(f * y)),
    "flax.struct": (lambda y: Both(y), lambda y, f: Struct(f * y)),
    "a pytree": (lambda y: Both(y), lambda y, f: Tree(f * y)),
    "a dict against a dataclass": (lambda y: {"y": y}, lambda y, f: Both(f * y)),
    "a list of dicts": (lambda y: [{"y": y}], lambda y, f: [{"y": f * y}]),
    "a Python number": (lambda y: (y, 0.5), lambda y, f: (y, f * 0.5)),
    "an int beside": (lambda y: {"y": y, "n": 3}, lambda y, f: {"y": y, "n": int(f * 3)}),
    "a numpy array": (
        lambda y: (y, np.arange(1, 4) / 3),
        lambda y, f: (y, f * np.arange(1, 4) / 3),
    ),
    "a string": (lambda y: Both(y, "left"), lambda y, f: Both(y, "left" if f == 1 else "right")),
    "torch's sizes": (lambda y: (y, y.size()), lambda y, f: (y, (*y.shape[:2], int(f * 4)))),
    "a namespace": (lambda y: SimpleNamespace(y=y), lambda y, f: SimpleNamespace(y=f * y)),
    "an nnx.Variable": (lambda y: {"y": y}, lambda y, f: {"y": nnx.Variable(f * y)}),
    "a bool": (lambda y: (y, True), lambda y, f: (y, f == 1)),
    "a number where torch has a tensor": (
        lambda y: (y, torch.tensor(0.5, dtype=y.dtype)),
        lambda y, f: (y, f * 0.5),
    ),
    "None": (lambda y: (y, None), lambda y, f: (y, None if f == 1 else y)),
    "keys of one name": (lambda y: {1: y, "1": 2 * y}, lambda y, f: {1: y, "1": 2 * f * y}),
}


TURNS = [(how, i % 2 == 1) for i, how in enumerate(WRAPPED)]  # each once


@pytest.mark.nightly(
    but=["a namespace-False", "a number where torch has a tensor-True", "a string-False"]
)
@pytest.mark.parametrize(
    ("how", "jit"), with_nightly(product(WRAPPED, [False, True]), commit=TURNS)
)
def test_every_leaf_of_an_output_is_compared(how, jit):
    theirs, mine = WRAPPED[how]
    options = {"eager": not jit, "jit": jit, "dtypes": ("float64",)}
    equal = compare(Theirs(theirs), Mine(lambda y: mine(y, 1)), X, **options)
    assert equal.ok, equal
    assert not compare(Theirs(theirs), Mine(lambda y: mine(y, -7)), X, **options).ok


@pytest.mark.nightly
def test_in_narrow_dtypes_too():
    for how in ("a Python number", "an int beside", "a numpy array", "flax.struct"):
        theirs, mine = WRAPPED[how]
        dtypes = ("float32", "bfloat16")
        assert compare(Theirs(theirs), Mine(lambda y: mine(y, 1)), X, dtypes=dtypes).ok, how  # noqa: B023
        for dtype in dtypes:
            wrong = compare(Theirs(theirs), Mine(lambda y: mine(y, -7)), X, dtypes=(dtype,))  # noqa: B023
            assert not wrong.ok, how


@pytest.mark.nightly
def test_a_model_output_of_transformers_is_a_container():
    pytest.importorskip("transformers", reason="its outputs are the example")
    from transformers.modeling_outputs import BaseModelOutput

    def theirs(y):
        return BaseModelOutput(last_hidden_state=y, hidden_states=(y, 2 * y))

    def mine(f):
        return lambda y: {"last_hidden_state": y, "hidden_states": (y, f * y)}

    assert_parity(Theirs(theirs), Mine(mine(2)), X, **ONCE)
    assert not compare(Theirs(theirs), Mine(mine(3)), X, **ONCE).ok


REFUSED = {
    "generator at output": (lambda y: (part for part in y), "tuple(m(*xs))"),
    "map at output.y": (lambda y: {"y": map(abs, y)}, "tuple(m(*xs))"),
    "object at output[1]": (lambda y: (y, object()), "return the arrays it holds"),
    "set at output[1]": (lambda y: (y, {1}), "return the arrays it holds"),
}


@pytest.mark.nightly(but=["generator at output-Flax"])
@pytest.mark.parametrize("side", ["Flax", "torch"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_compared_is_refused_by_name(what, side):
    how, advice = REFUSED[what]
    one = (how, lambda y: y) if side == "torch" else (lambda y: y, how)
    with pytest.raises(ParityError) as caught:
        compare(Theirs(one[0]), Mine(one[1]), X, **ONCE)
    assert f"{side} returns" in str(caught.value) and what in str(caught.value)
    assert advice in str(caught.value) and f"{side.lower()}_call" in str(caught.value)


def test_leaves_of_submodules_are_taps():
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Theirs(lambda y: Both(y, 0.5))

        def forward(self, x):
            found = self.inner(x)
            return found.y * found.more

    class Port(nnx.Module):
        def __init__(self, factor):
            self.inner = Mine(lambda y: Struct(y * factor, 0.5 / factor))

        def __call__(self, x):
            found = self.inner(x)
            return found.y * found.more

    assert_parity(Outer(), Port(1.0), X, dtypes=("float64",))
    report = compare(Outer(), Port(2.0), X, dtypes=("float64",))
    differs = {row.name for row in report.rows if row.kind == "tap" and row.verdict.differs}
    assert differs == {"inner.y", "inner.more"}, report


@pytest.mark.nightly
@pytest.mark.parametrize("factor", [1, 7])
def test_nested_inputs_are_inputs(factor):
    class Nested(torch.nn.Module):
        def forward(self, x, cache):
            pair, last = cache["pair"], cache["last"]
            return x * pair[0] + pair[1] * last.y * pair[2]

    class Port(nnx.Module):
        def __call__(self, x, cache):
            pair, last = cache["pair"], cache["last"]
            return x * pair[0] + factor * pair[1] * last.y * pair[2]

    cache = {"pair": (X + 1, X - 1, 3), "last": Both(2 * X, "text")}
    report = compare(Nested(), Port(), X, kwargs={"cache": cache}, dtypes=("float64",))
    names = {row.name for row in report.rows if row.kind == "gradient"}
    inputs = ("0", "cache.pair[0]", "cache.pair[1]", "cache.last.y")
    assert names == {f"input {name}" for name in inputs}
    assert report.ok is (factor == 1), report
    assert isinstance(cache["last"].y, np.ndarray)


def test_constants_are_not_differentiated():
    class Masked(torch.nn.Module):
        def forward(self, x, mask, more):
            return torch.softmax(x + mask + more["bias"][0], dim=-1)

    class Port(nnx.Module):
        def __call__(self, x, mask, more):
            x = x + jax.lax.stop_gradient(mask + more["bias"][0])
            return jax.nn.softmax(x, axis=-1)

    inputs = (X, 2 * X, {"bias": (0.5 * X,)})
    assert not compare(Masked(), Port(), *inputs, **ONCE).ok
    for constants in (("1", "2.bias[0]"), ("1", "2")):
        report = assert_parity(Masked(), Port(), *inputs, constants=constants, **ONCE)
        assert [row.name for row in report.rows if row.kind == "gradient"] == ["input 0"]
    kwargs = {"mask": 2 * X, "more": {"bias": (0.5 * X,)}}
    assert_parity(Masked(), Port(), X, kwargs=kwargs, constants=("mask", "more.bias"), **ONCE)
    with pytest.raises(ValueError, match=r"'scale'.* 0, mask, more.bias\[0\]"):
        compare(Masked(), Port(), X, kwargs=kwargs, constants=("scale",), **ONCE)
    with pytest.raises(TypeError, match="tuple"):
        compare(Masked(), Port(), X, kwargs=kwargs, constants="mask", **ONCE)


@pytest.mark.parametrize("dtype", with_nightly(["float64", "float32", "bfloat16"], commit=1))
def test_integers_are_compared_by_value_whatever_their_width(dtype):
    def theirs(y):
        return {"y": y, "best": y.argmax(-1), "two": y.topk(2)[1], "sorted": y.argsort(-1)}

    def mine(shift):
        def how(y):
            best = y.argmax(-1).astype(np.int16)
            two = jax.lax.top_k(y, 2)[1]
            return {"y": y, "best": best, "two": two, "sorted": y.argsort(-1) + shift}

        return how

    right = assert_parity(Theirs(theirs), Mine(mine(0)), X, dtypes=(dtype,))
    assert "output.best is int16 beside int64" in str(right), right
    wrong = compare(Theirs(theirs), Mine(mine(1)), X, dtypes=(dtype,))
    assert {r.name for r in wrong.failed} == {"output.sorted"}, wrong
