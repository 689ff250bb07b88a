"""The classes of the source notebooks equal the layers; at most one rule ports each."""

import numpy as np
import pytest
from flax import nnx

import flax_attn as fa
from flax_attn.parity import Rule, compare, judge, plan, port
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the notebooks' classes are torch's")
block_size, n_embd = 9, 11


class SelfAttention_v1(torch.nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.W_query = torch.nn.Parameter(torch.rand(d_in, d_out))
        self.W_key = torch.nn.Parameter(torch.rand(d_in, d_out))
        self.W_value = torch.nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x):
        keys, queries, values = x @ self.W_key, x @ self.W_query, x @ self.W_value
        scores = queries @ keys.transpose(-2, -1)
        return torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1) @ values


class SelfAttention_v2(torch.nn.Module):
    def __init__(self, d_in, d_out, qkv_bias=False):
        super().__init__()
        self.W_query = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = torch.nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x):
        keys, queries, values = self.W_key(x), self.W_query(x), self.W_value(x)
        scores = queries @ keys.transpose(-2, -1)
        return torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1) @ values


class SelfAttention_v2_W_keys(torch.nn.Module):
    """As in the notebook that prints `W_keys`."""

    def __init__(self, d_in, d_out, qkv_bias=False):
        super().__init__()
        self.W_query = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_keys = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = torch.nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x):
        keys, queries, values = self.W_keys(x), self.W_query(x), self.W_value(x)
        scores = queries @ keys.transpose(-2, -1)
        return torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1) @ values


class CasualAttention(torch.nn.Module):
    """Spelt as printed."""

    def __init__(self, d_in, d_out, context_size, dropout, qkv_bias=False):
        super().__init__()
        self.d_out = d_out
        self.W_query = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = torch.nn.Dropout(dropout)
        ones = torch.ones(context_size, context_size)
        self.register_buffer("mask", torch.triu(ones, diagonal=1))

    def forward(self, x):
        num_tokens = x.shape[1]
        keys, queries, values = self.W_key(x), self.W_query(x), self.W_value(x)
        scores = queries @ keys.transpose(1, 2)
        scores.masked_fill_(self.mask.bool()[:num_tokens, :num_tokens], -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        return self.dropout(weights) @ values


class Head(torch.nn.Module):
    """One head of the small GPT, its sizes taken from around it."""

    def __init__(self, head_size, scaled=False):
        super().__init__()
        self.scaled = scaled
        self.key = torch.nn.Linear(n_embd, head_size, bias=False)
        self.query = torch.nn.Linear(n_embd, head_size, bias=False)
        self.value = torch.nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        T = x.shape[1]
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * (k.shape[-1] ** -0.5 if self.scaled else 1.0)
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return torch.nn.functional.softmax(wei, dim=-1) @ self.value(x)


class MultiHeadAttentionWrapper(torch.nn.Module):
    def __init__(self, d_in, d_out, context_size, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.heads = torch.nn.ModuleList(
            CasualAttention(d_in, d_out, context_size, dropout, qkv_bias) for _ in range(num_heads)
        )

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1)


class MultiHeadAttention(torch.nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.d_out, self.num_heads, self.head_dim = d_out, num_heads, d_out // num_heads
        self.W_query = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = torch.nn.Linear(d_out, d_out)
        self.dropout = torch.nn.Dropout(dropout)
        ones = torch.ones(context_length, context_length)
        self.register_buffer("mask", torch.triu(ones, diagonal=1))

    def forward(self, x):
        b, num_tokens, _ = x.shape
        keys = self.W_key(x).view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        values = self.W_value(x).view(b, num_tokens, self.num_heads, self.head_dim)
        queries = self.W_query(x).view(b, num_tokens, self.num_heads, self.head_dim)
        scores = queries.transpose(1, 2) @ keys.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:num_tokens, :num_tokens], -torch.inf)
        weights = self.dropout(torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1))
        context = (weights @ values.transpose(1, 2)).transpose(1, 2)
        return self.out_proj(context.contiguous().view(b, num_tokens, self.d_out))


class MultiHeadAttentionCombinedQKV(torch.nn.Module):
    def __init__(self, d_in, d_out, num_heads, context_length, dropout=0.0, qkv_bias=False):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_out // num_heads
        self.qkv = torch.nn.Linear(d_in, 3 * d_out, bias=qkv_bias)
        self.proj = torch.nn.Linear(d_out, d_out)
        self.dropout = torch.nn.Dropout(dropout)
        ones = torch.ones(context_length, context_length)
        self.register_buffer("mask", torch.triu(ones, diagonal=1))

    def forward(self, x):
        b, num_tokens, _ = x.shape
        qkv = self.qkv(x).view(b, num_tokens, 3, self.num_heads, self.head_dim)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = queries @ keys.transpose(-2, -1)
        scores = scores.masked_fill(self.mask.bool()[:num_tokens, :num_tokens], -torch.inf)
        weights = self.dropout(torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1))
        return self.proj((weights @ values).transpose(1, 2).reshape(b, num_tokens, -1))


class MHAEinsum(torch.nn.Module):
    """Multiplies by `W` where the comment says `W^T`: the weights lie as (in, out)."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_out // num_heads
        self.W_query = torch.nn.Parameter(torch.randn(d_out, d_in))
        self.W_key = torch.nn.Parameter(torch.randn(d_out, d_in))
        self.W_value = torch.nn.Parameter(torch.randn(d_out, d_in))
        self.register_parameter("bias_q", None)
        self.out_proj = torch.nn.Linear(d_out, d_out)
        self.dropout = torch.nn.Dropout(dropout)
        ones = torch.ones(context_length, context_length)
        self.register_buffer("mask", torch.triu(ones, diagonal=1))

    def forward(self, x):
        b, n, _ = x.shape
        weights = (self.W_query, self.W_key, self.W_value)
        parts = (torch.einsum("bnd,do->bno", x, w) for w in weights)
        q, k, v = (y.view(b, n, self.num_heads, self.head_dim).transpose(1, 2) for y in parts)
        scores = torch.einsum("bhnd,bhmd->bhnm", q, k) / self.head_dim**0.5
        scores = scores.masked_fill(self.mask[:n, :n].bool(), -torch.inf)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        context = torch.einsum("bhnm,bhmd->bhnd", weights, v)
        return self.out_proj(context.transpose(1, 2).reshape(b, n, -1))


def ours(cls, *arguments, **options):
    return cls(*arguments, **options, rngs=nnx.Rngs(0))


WIDE, HEADS, SQUARE = (11, 6, 9, 0.5), (11, 6, 9, 0.5, 3), (6, 6, 9, 0.5, 3)
THREE = "{W_query,W_key,W_value}"
# Theirs, ours, the rule if it takes one.
PAIRS = {
    "v1": lambda: (SelfAttention_v1(11, 4), ours(fa.SelfAttentionV1, 11, 4)),
    "v2": lambda: (SelfAttention_v2(11, 4), ours(fa.SelfAttentionV2, 11, 4)),
    "v2 with W_keys": lambda: (
        SelfAttention_v2_W_keys(11, 4, True),
        ours(fa.SelfAttentionV2, 11, 4, True),
        Rule("W_keys -> W_key"),
    ),
    "casual": lambda: (CasualAttention(*WIDE), ours(fa.CausalAttention, *WIDE)),
    "head": lambda: (Head(4), ours(fa.SingleHeadAttention, 11, 4)),
    "head, scaled": lambda: (Head(4, True), ours(fa.SingleHeadAttention, 11, 4, scale=True)),
    "wrapper": lambda: (
        MultiHeadAttentionWrapper(*HEADS, qkv_bias=True),
        ours(fa.MultiHeadAttentionWrapper, *HEADS, qkv_bias=True),
    ),
    "multi-head": lambda: (
        MultiHeadAttention(*HEADS, qkv_bias=True),
        ours(fa.MultiHeadAttention, *HEADS, qkv_bias=True),
    ),
    "combined": lambda: (
        MultiHeadAttentionCombinedQKV(11, 6, 3, 9, 0.5, True),
        ours(fa.MultiHeadAttentionCombined, *HEADS, True),
        Rule("proj -> out_proj"),
    ),
    "einsum": lambda: (
        MHAEinsum(*SQUARE),
        ours(fa.MultiHeadAttentionEinsum, *SQUARE),
        Rule(f"{THREE} -> {THREE}", "n i o -> n o i"),
    ),
    "exercise, v2 in v1": lambda: (
        SelfAttention_v2(11, 4),
        ours(fa.SelfAttentionV1, 11, 4),
        Rule("*.weight -> *", "o i -> i o"),
    ),
    "exercise, v1 in v2": lambda: (
        SelfAttention_v1(11, 4),
        ours(fa.SelfAttentionV2, 11, 4),
        Rule("* -> *.kernel", "i o -> i o"),
    ),
}
CONSTANTS = {
    "head": ("tril",),
    "head, scaled": ("tril",),
    "wrapper": tuple(f"heads.{n}.mask" for n in range(3)),
    **dict.fromkeys(("casual", "multi-head", "combined", "einsum"), ("mask",)),
}


def words(mine, rows=7):
    """Two sentences, shorter than the context."""
    width = 6 if isinstance(mine, fa.MultiHeadAttentionEinsum) else n_embd
    return np.random.RandomState(1).standard_normal((2, rows, width))


DROP = ("casual", "wrapper", "multi-head", "combined", "einsum")


@pytest.mark.nightly
def test_every_class_with_dropout_is_compared_in_training():
    for name, pair in PAIRS.items():
        parts = pair()[0].modules()
        assert (name in DROP) == any(isinstance(part, torch.nn.Dropout) for part in parts)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "train"),
    with_nightly([(name, False) for name in PAIRS] + [(name, True) for name in DROP], commit=4),
)
def test_a_class_of_the_notebook_equals_the_layer(name, train):
    theirs, mine, *rules = PAIRS[name]()
    dtypes = ("float64",) if train else ("float64", "float32")
    x = words(mine)
    report = compare(theirs, mine, x, rules=rules, train=train, dtypes=dtypes, eager=False)
    assert report.ok, report
    assert {row.name for row in report.rows} >= {"output", "input 0"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", PAIRS)
def test_masks_registered_as_buffers_are_treated_as_constants(name):
    theirs, mine, *rules = PAIRS[name]()
    found = plan(theirs, mine, rules)
    assert found.constants == CONSTANTS.get(name, ())
    assert not found.skipped and not found.tied


@pytest.mark.nightly
@pytest.mark.parametrize("name", PAIRS)
def test_its_weights_give_its_outputs(name):
    """Carried by `port`, and back: the layer as a person would use it, in float64."""
    theirs, mine, *rules = PAIRS[name]()
    twin, _, *_ = PAIRS[name]()
    x = words(mine, rows=9).astype(np.float32)
    port(port(theirs, mine, rules), twin, rules)
    for key, value in theirs.state_dict().items():
        assert judge.exact(twin.state_dict()[key].numpy(), value.numpy()).ok, key
    theirs.eval(), mine.eval()
    with torch.no_grad():
        own, truth = theirs(torch.tensor(x)), theirs.double()(torch.tensor(x).double())
    assert judge.same_precision(np.asarray(mine(x)), own.numpy(), truth.numpy(), "float32").ok


def test_the_exercise_with_a_rule_for_each_weight():
    """Version two's weights in version one: transposed, and the outputs are the same."""
    second, first = SelfAttention_v2(7, 7), ours(fa.SelfAttentionV1, 7, 7)  # no shape would tell
    names = ("W_query", "W_key", "W_value")
    port(second, first, [Rule(f"{name}.weight -> {name}", "o i -> i o") for name in names])
    for name in names:
        weight = getattr(second, name).weight.detach().numpy()
        assert judge.exact(np.asarray(getattr(first, name)[...]), weight.T.copy()).ok


def test_without_its_rule_a_name_is_missed():
    theirs, mine, _ = PAIRS["v2 with W_keys"]()
    with pytest.raises(AssertionError, match=r"W_keys\.weight.*W_key"):
        plan(theirs, mine)
