"""What other libraries do in a port: attention in float32, weights made of others, norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.nn import dot_product_attention as by_name

from flax_attn.parity import ParityError, compare, plan
from flax_attn.parity.sides.flax.float64 import attention_lifted

torch = pytest.importorskip("torch", reason="the harness compares with torch")

D = 12
X = np.random.RandomState(0).standard_normal((2, 5, D))
QUICK = {"dtypes": ("float64",), "eager": False}


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(D, 3 * D)

    def forward(self, x, seen):
        q, k, v = (y.unflatten(-1, (3, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
        return out.transpose(1, 2).flatten(2)


class Port(nnx.Module):
    """`attention` is jax's, as an attribute of `jax.nn` or by a name of this file."""

    def __init__(self, by=""):
        self.qkv, self.by = nnx.Linear(D, 3 * D, rngs=nnx.Rngs(0)), by

    def __call__(self, x, seen):
        attention = by_name if self.by == "name" else jax.nn.dot_product_attention
        q, k, v = (y.reshape(*y.shape[:-1], 3, 4) for y in jnp.split(self.qkv(x), 3, -1))
        scale = 0.5 if self.by != "scale" else 0.4
        return attention(q, k, v, mask=seen, scale=scale).reshape(x.shape)


SEEN = np.tril(np.ones((5, 5), bool))[None, None]


@pytest.mark.nightly
@pytest.mark.parametrize("by", ["attribute", "name"])
def test_jax_attention_is_lifted_to_float64_and_the_report_says_so(by):
    report = compare(Attention(), Port(by), X, SEEN, **QUICK)
    assert report.ok, str(report)
    assert any("lifted to float64" in note for note in report.notes), report.notes
    assert "flax_attn.flax_attention, as attention_fn=" in str(report)


def test_a_wrong_scale_is_found_in_lifted_jax_attention():
    report = compare(Attention(), Port("scale"), X, SEEN, **QUICK)
    assert not report.ok and report.first.error > 1e-3


@pytest.mark.nightly
def test_flax_attention_is_lifted_with_its_gradients():
    theirs = torch.nn.MultiheadAttention(D, 3, batch_first=True)
    mine = nnx.MultiHeadAttention(3, D, decode=False, rngs=nnx.Rngs(0))

    def call(module, x):
        return module(x, x, x, need_weights=False)[0]

    report = compare(theirs, mine, X, torch_call=call, **QUICK)
    assert report.ok and any(row.kind == "gradient" for row in report.rows), str(report)


@pytest.mark.nightly
def test_only_float64_runs_are_lifted_and_the_lift_is_undone():
    plain, notes = jax.nn.dot_product_attention, {}
    q = jnp.asarray(X[..., None, :], jnp.float32)
    with attention_lifted(notes):
        narrow = jax.nn.dot_product_attention(q, q, q)
        assert jax.nn.dot_product_attention is not plain
    assert not notes and jax.nn.dot_product_attention is plain and by_name is plain
    assert narrow.dtype == jnp.float32 and (narrow == plain(q, q, q)).all()


def without(remove):
    """A convolution whose weight is computed, and the same after `remove`."""
    module = torch.nn.Module()
    module.conv = remove(torch.nn.Conv1d(4, 6, 3))
    return module


class Conv(nnx.Module):
    def __init__(self):
        self.conv = nnx.Conv(4, 6, (3,), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_parametrization_names_what_removes_it(norm):
    theirs = without(getattr(torch.nn.utils.parametrizations, norm))
    with pytest.raises(ParityError) as caught:
        plan(theirs, Conv())
    remove = 'torch.nn.utils.parametrize.remove_parametrizations(module.conv, "weight")'
    assert str(caught.value).count(remove) == 1 and "you may mean" not in str(caught.value)
    torch.nn.utils.parametrize.remove_parametrizations(theirs.conv, "weight")
    assert plan(theirs, Conv()).moves


def test_the_older_weight_norm_names_what_removes_it():
    with pytest.warns(FutureWarning, match="deprecated"):
        theirs = without(torch.nn.utils.weight_norm)
    with pytest.raises(ParityError, match=r"torch\.nn\.utils\.remove_weight_norm\(module\.conv\)"):
        plan(theirs, Conv())


class T5LayerNorm(torch.nn.Module):
    """Called a LayerNorm, and takes no mean away."""

    def __init__(self, centred=False):
        super().__init__()
        self.weight, self.centred = torch.nn.Parameter(torch.zeros(D)), centred

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Centred(T5LayerNorm):
    def __init__(self):
        super().__init__(centred=True)


class OfHeads(T5LayerNorm):
    """A gain for each head, as Cohere's norm of queries has."""

    def __init__(self):
        super().__init__(centred=True)
        self.weight = torch.nn.Parameter(torch.ones(3, D))


class Scale(torch.nn.Module):
    """One gain, and no norm, whatever its name."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(D))

    def forward(self, x):
        return x * self.weight


class OfTwo(Scale):
    """Cannot be called with one argument."""

    def forward(self, x, gate):
        return x * gate


OfTwo.__name__ = "GatedRMSNorm"


def holding(norm):
    module = torch.nn.Module()
    module.norm = norm
    return module


class Norm(nnx.Module):
    def __init__(self, kind):
        self.norm = kind(D, rngs=nnx.Rngs(0))


class OwnNorm(nnx.Module):
    def __init__(self, width, rngs):
        self.scale = nnx.Param(jnp.ones(width))


class OwnHeads(nnx.Module):
    def __init__(self, width, rngs):
        self.scale = nnx.Param(jnp.ones((3, width)))


@pytest.mark.parametrize(
    ("theirs", "kinds"),
    [
        (T5LayerNorm, (nnx.RMSNorm, OwnNorm)),
        (Centred, (OwnNorm,)),
        (OfHeads, (OwnHeads,)),
        (OfTwo, (nnx.RMSNorm, OwnNorm)),
    ],
)
def test_a_norm_is_known_by_what_it_computes(theirs, kinds):
    for kind in kinds:
        assert str(plan(holding(theirs()), Norm(kind))) == "norm.weight -> norm.scale"


def test_another_norm_is_refused_by_the_right_name():
    with pytest.raises(ParityError) as caught:
        plan(holding(T5LayerNorm()), Norm(nnx.LayerNorm))
    said = (
        "norm.weight is of an RMSNorm of torch, and norm of Flax is a LayerNorm: another function"
    )
    assert said in str(caught.value) and "nnx.RMSNorm is the same one" in str(caught.value)
    assert "you may mean" not in str(caught.value)
    with pytest.raises(ParityError):
        plan(holding(Scale()), Norm(nnx.RMSNorm))


class Router(torch.nn.Module):
    """Returns `answer(logits)`, as routers of mixtures of experts return tuples and dicts."""

    def __init__(self, answer):
        super().__init__()
        self.weight, self.answer = torch.nn.Parameter(torch.ones(3, D)), answer

    def forward(self, x):
        return self.answer(torch.nn.functional.linear(x, self.weight))


class OwnRouter(nnx.Module):
    def __init__(self, width, rngs):
        self.weight = nnx.Param(jnp.ones((3, width)))


ANSWERS = {
    "logits and indices": lambda y: (y, *y.softmax(-1).topk(2)),
    "dict": lambda y: {"logits": y},
    "None": lambda y: None,
    "number": lambda y: 3.0,
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_module_that_returns_no_tensor_is_no_norm(answer):
    kind = type(f"Router{len(answer)}", (Router,), {})  # what a class computes is asked once
    mapping = plan(holding(kind(ANSWERS[answer])), Norm(OwnRouter))
    assert str(mapping) == "norm.weight -> norm.weight"
