"""`identify` names the layer that a module is, with the type's own options, and no other."""

import math
from importlib import import_module

import numpy as np
import pytest

from flax_attn.parity import identify
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the corpus is of torch's modules")
corpus = import_module("parity_tests.core.identify")
wrong_options = import_module("parity_tests.core.identify.truths").wrong_options

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
BY_NAME = {s.name: s for s in corpus.SUBJECTS}
LENGTH = 7
# What no layer of ours is, or what cannot be measured: the reason that is printed.
UNNAMED = {
    "single_head": "no output projection",
    "block_with_norm_and_residual": "made from the result of native_layer_norm in norm",
    "softmax_by_logsumexp": "no softmax between two products",
    "blocks_as_axis": "no softmax whose rows are the queries",
    "tiles_of_keys": "no softmax whose rows are the queries",
    "one_query_at_a_time": "no softmax whose rows are the queries",
}
NAMED = [s.name for s in corpus.ATTENTION if s.name not in UNNAMED]
AT_COMMIT = ["fused_groups_outermost", "norm_of_heads_after_rotary", "sdpa_window_bool"]


def identified(name, seed=0):
    rng = np.random.RandomState(seed)
    module = BY_NAME[name].make(rng)
    args, kwargs = BY_NAME[name].inputs(module, rng, LENGTH)
    return identify(module, *args, kwargs=kwargs), BY_NAME[name].truth(module)


@pytest.mark.nightly(but=["norm_of_heads_after_rotary"])
@pytest.mark.parametrize("name", with_nightly(NAMED, commit=AT_COMMIT))
def test_modules_are_named_with_their_options(name):
    result, truth = identified(name)
    assert result.layer is not None, result
    assert wrong_options(result, truth) == [], f"{truth}\n{result}"
    assert all(report.ok for report in result.reports) and len(result.reports) >= 3


@pytest.mark.parametrize("name", with_nightly(UNNAMED, commit=["single_head"]))
def test_what_is_not_named_is_said(name):
    result, _ = identified(name)
    assert result.layer is None and UNNAMED[name] in result.why, result


OTHERS = [s.name for s in corpus.OTHERS]


@pytest.mark.nightly(
    but=[
        "additive_logit",
        "random_features",
        "soft_router",
        "sparsemax",
        "squared_relu",
        "token_mixing",
    ]
)
@pytest.mark.parametrize("name", with_nightly(OTHERS, commit=2))
def test_nothing_else_is_named(name):
    result, _ = identified(name)
    assert result.layer is None and result.why


class CappedAlibi(torch.nn.Module):
    """ALiBi's slopes before the softcap, or behind it."""

    def __init__(self, capped_bias):
        super().__init__()
        self.capped_bias, self.slopes = (
            capped_bias,
            torch.tensor([0.5, 0.21, 0.11], dtype=torch.float64),
        )
        self.qkv, self.out = torch.nn.Linear(20, 72, bias=False), torch.nn.Linear(24, 20)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        i = torch.arange(x.shape[1])
        bias = -self.slopes[:, None, None] * (i[:, None] - i).abs()
        logits = q @ k.mT * 0.3 + (bias if self.capped_bias else 0.0)
        logits = 5.0 * torch.tanh(logits / 5.0) + (0.0 if self.capped_bias else bias)
        return self.out((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


SCORES = {
    True: "Alibi([0.5, 0.21, 0.11]) >> Softcap(5.0)",
    False: "Softcap(5.0) >> Alibi([0.5, 0.21, 0.11])",
}


@pytest.mark.nightly
@pytest.mark.parametrize("capped_bias", SCORES)
def test_a_bias_stands_before_or_behind_the_softcap(capped_bias):
    module = CappedAlibi(capped_bias).double()
    result = identify(module, np.random.RandomState(0).standard_normal((3, 9, 20)))
    assert result.layer is not None and SCORES[capped_bias] in result.text, result


@pytest.mark.nightly
def test_the_inputs_are_those_of_the_caller():
    """The first proof is at the caller's tokens and length, though others are measured."""
    seen = set()

    def call(module, x):
        seen.add(tuple(x.shape))
        return module(x, x, x)[0]

    module = torch.nn.MultiheadAttention(12, 3, batch_first=True)
    result = identify(module, np.ones((3, 6, 12)), torch_call=call)
    assert result.layer is not None and (3, 6, 12) in seen


class Banded(torch.nn.Module):
    """Causal attention that looks back `window` tokens, with T5's buckets if it has a distance."""

    def __init__(self, window, max_distance=None):
        super().__init__()
        biased = max_distance is None  # as T5's own
        self.qkv, self.out = torch.nn.Linear(22, 63, biased), torch.nn.Linear(21, 22, biased)
        self.window, self.max_distance = window, max_distance
        self.table = torch.nn.Embedding(8, 3) if max_distance else None

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (3, 7)).mT.transpose(1, 3).mT for y in self.qkv(x).chunk(3, -1))
        back = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        logits = q @ k.mT if self.table else q @ k.mT * 7**-0.5
        if self.table:
            far = torch.log(back.clamp(min=1) / 4) / math.log(self.max_distance / 4)
            bucket = torch.where(back < 4, back, (4 + (far * 4).long()).clamp(max=7)).clamp(min=0)
            logits = logits + self.table(bucket).movedim(-1, 0)
        logits = logits.masked_fill((back < 0) | (back >= self.window), -torch.inf)
        return self.out((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Banded(20), "mask=CAUSAL & Window(19, 0)"),
        (Banded(250).double(), "mask=CAUSAL & Window(249, 0)"),
        (Banded(999, 50), "max_distance=50"),
    ],
)
def test_what_only_far_tokens_show_is_seen(module, text):
    result = identify(module, np.random.RandomState(0).standard_normal((2, 6, 22)))
    assert text in result.text and result.limit == ["not tested: more than 1024 tokens"], result


class FarOnly(torch.nn.Module):
    """Plain attention up to `limit` tokens, another one with more, and none beyond `most`."""

    def __init__(self, kind, limit, most):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(12, 36), torch.nn.Linear(12, 12)
        self.kind, self.limit, self.most = kind, limit, most

    def forward(self, x):
        T = x.shape[1]
        assert T <= self.most, f"{T} tokens"
        q, k, v = (y.unflatten(-1, (3, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.kind == "log-n":
            q = q * max(1.0, math.log(T) / math.log(self.limit))
        if self.kind == "blocks":
            block = torch.floor(torch.arange(1, T + 1) / self.limit)
            q = q * (1 + 0.1 * torch.log(1 + block))[:, None]
        logits = q @ k.mT / 2
        if self.kind == "best keys":
            least = logits.topk(min(self.limit, T)).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        return self.out((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.nightly(but=["best keys-0"])
@pytest.mark.parametrize("seed", with_nightly([0, 1, 2], commit=[0]))
@pytest.mark.parametrize("kind", ["log-n", "blocks", "best keys"])
def test_what_is_another_module_with_more_tokens_is_not_named(kind, seed):
    random = np.random.RandomState(seed)
    most = [40, 2000, random.randint(100, 900)][seed]
    module = FarOnly(kind, random.randint(12, min(most, 1000) - 3), most)
    result = identify(module, random.standard_normal((2, 5, 12)))
    assert result.layer is None and "DIFFERENT" in str(result), result
    same = identify(FarOnly("plain", 0, most), random.standard_normal((2, 5, 12)))
    assert same.layer is not None and f"{min(most, 1024)} tokens" in str(same), same


@pytest.mark.nightly
def test_equal_inputs_are_one_input_and_other_kinds_are_refused():
    module, x = (
        torch.nn.MultiheadAttention(12, 3),
        np.random.RandomState(0).standard_normal((5, 2, 12)),
    )
    result = identify(module, x, x.copy(), x.copy())
    assert "the module takes `T B D`: layer(x.swapaxes(0, 1)).swapaxes(0, 1)" in str(result)
    for inputs, error, match in (
        ([torch.ones(5, 2, 12)], TypeError, "numpy arrays; got a Tensor of shape"),
        ([x[0]], ValueError, "floating numpy array of three axes"),
    ):
        with pytest.raises(error, match=match):
            identify(module, *inputs)
    with pytest.raises(TypeError, match=r"an object of a .*; got MultiheadAttention"):
        identify(torch.nn.MultiheadAttention, x)
