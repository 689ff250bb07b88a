"""What `compare` takes beside modules and numpy arrays, and its words for an unusable side."""

import functools
from dataclasses import dataclass
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, Recording, Rule, compare, plan, record

torch = pytest.importorskip("torch", reason="originals are torch's")
X = np.random.RandomState(0).standard_normal((3, 7))
ONCE = {"dtypes": ("float64",), "eager": False}
F = torch.nn.functional


THEIRS = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Dropout(0.5))


class Requires(nnx.Module):
    def __call__(self, x, *, deterministic):
        return jnp.tanh(x)


class Off(nnx.Module):
    """Its dropout is off unless the call turns it on."""

    def __init__(self):
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x, deterministic=True):
        return self.drop(jnp.tanh(x), deterministic=deterministic)


class Keyless(nnx.Module):
    def __init__(self):
        self.drop = nnx.Dropout(0.5)

    def __call__(self, x):
        return self.drop(x)


def raises(x):
    return x.reshape(4, 9)


class Linen(flax.linen.Module):
    def __call__(self, x):
        return x


HERE = rf"At .*{__name__.rpartition('.')[2]}.py:\d+: `return x.reshape\(4, 9\)`. "
REFUSED = {
    "deterministic": (Requires, False, r"flax_call=lambda m, x: m\(x, deterministic=True\)"),
    "in train mode": (Requires, True, r"deterministic=True\); False if it trains"),
    "dropout off": (Off, True, r"turns it off: flax_call=.*deterministic=False\)"),
    "no keys": (Keyless, True, r"rngs=nnx.Rngs\(0\)"),
    "the line": (lambda: raises, False, HERE),
    "linen": (Linen, False, r"Linen is a flax.linen module.*nnx.bridge.ToNNX\("),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_side_that_cannot_run_is_refused_with_the_way_out(name):
    kind, train, words = REFUSED[name]
    with pytest.raises((ParityError, TypeError), match=words):
        compare(THEIRS, kind(), X, train=train, **ONCE)


@pytest.mark.parametrize("sides", [(jnp.tanh, raises), (raises, jnp.tanh)])
def test_the_line_of_an_error_is_named_for_two_jax_sides(sides):
    with pytest.raises(ParityError, match=HERE[:-1]):
        compare(*sides, X, **ONCE)


def test_the_proposed_calls_work():
    call = {"flax_call": lambda m, x: m(x, deterministic=False)}
    assert compare(THEIRS, Off(), X, train=True, **call, **ONCE).ok
    linen = flax.linen.Dense(4)
    port = nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(0)).lazy_init(X)
    rules = [Rule("weight -> kernel", "o i -> i o")]
    assert compare(torch.nn.Linear(7, 4), port, X, rules=rules, **ONCE).ok


@dataclass
class Output:
    state: Any
    attentions: Any


def both(x):
    return torch.tanh(x), torch.sin(x)


def test_an_object_beside_a_tuple_is_told_by_its_fields():
    one, two = (lambda x: Output(*both(x))), (lambda x: (jnp.tanh(x), jnp.sin(x)))
    report = str(compare(one, two, X, **ONCE))
    assert "torch returns an object with state, attentions; Flax a tuple of 2" in report
    names = ("state", "attentions")
    call = f"flax_call=lambda m, *xs: dict(zip({names}, m(*xs)))"
    assert call in report
    assert compare(one, two, X, flax_call=eval(call.partition("=")[2]), **ONCE).ok


def test_braces_of_unequal_shapes_are_two_rules():
    theirs = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(2, 3, False), "b": torch.nn.Linear(2, 5, False)}
    )
    mine = nnx.Dict(r=nnx.Param(jnp.ones((2, 3))), s=nnx.Param(jnp.ones((2, 5))))
    with pytest.raises(ParityError, match="or write 2 rules, one for each"):
        plan(theirs, mine, [Rule("{a,b}.weight -> {r,s}", "n o i -> n i o")])
    plan(theirs, mine, [Rule(f"{x}.weight -> {y}", "o i -> i o") for x, y in ("ar", "bs")])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_jax_arrays_are_inputs_beside_torch(dtype):
    x = jnp.asarray(X, dtype)
    report = compare(torch.nn.Tanh(), jnp.tanh, x, dtypes=("float64", "bfloat16"))
    assert report.ok and {row.dtype for row in report.rows} == {"float64", "bfloat16"}
    assert not compare(torch.nn.Tanh(), jnp.sin, x, **ONCE).ok
    with pytest.raises(TypeError, match="torch array for input 0"):
        compare(torch.nn.Tanh(), jnp.tanh, torch.ones(3), **ONCE)


TANH = torch.nn.Tanh()


def helper(x):
    return F.gelu(x)


exact = functools.partial(jax.nn.gelu, approximate=False)
ORIGINALS = {
    "of torch": F.gelu,
    "a builtin": torch.tanh,
    "a lambda": lambda x: torch.tanh(x),
    "a helper's": lambda x: helper(x),
    "a module's": lambda x: TANH(x),
    "a partial": functools.partial(F.gelu, approximate="none"),
    "bound": TANH.forward,
    "a tensor's method": torch.Tensor.tanh,
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_torch_function_is_an_original(name):
    original = ORIGINALS[name]
    port = exact if name in ("of torch", "a helper's", "a partial") else jnp.tanh
    assert compare(original, port, X, **ONCE).ok


def test_a_torch_function_can_be_the_original_and_be_recorded(tmp_path):
    assert not compare(F.gelu, jax.nn.gelu, X, **ONCE).ok  # approximate by default
    file = record(F.gelu, (X,), tmp_path / "gelu.safetensors", dtypes=("float64",))
    assert compare(Recording(file), exact, **ONCE).ok
    with pytest.raises(TypeError, match="torch or JAX as the original"):
        compare(jnp.tanh, torch.tanh, X, **ONCE)
    assert compare(lambda x: x + 1, lambda x: 1 + x, X, **ONCE).ok  # of JAX, as before


class Down(torch.nn.Module):
    def __init__(self, padding):
        super().__init__()
        self.conv = torch.nn.Conv1d(2, 3, 3, stride=2, padding=padding)

    def forward(self, x):
        return self.conv(x.mT).mT


class Same(nnx.Module):
    def __init__(self, padding="SAME"):
        self.conv = nnx.Conv(2, 3, (3,), strides=2, padding=padding, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.conv(x)


def test_same_padding_that_is_equal_at_this_size_only_is_noted():
    x = X[..., None] * [1, 2]  # B T C, of length 7
    note = "conv of Flax pads SAME, by its input's size and stride, torch always (1,): equal at"
    report = compare(Down(1), Same(), x, **ONCE)
    assert report.ok and note in str(report)
    assert "pads SAME" not in str(compare(Down(1), Same(1), x, **ONCE))
    assert not compare(Down(1), Same(), x[:, 1:], **ONCE).ok
