"""`Rule.optional`: one of several ways in which files have a tensor."""

import numpy as np
import pytest
from flax import nnx

from flax_attn import weights
from flax_attn.parity import Rule, judge
from parity_tests.core.backends.refusal import told

FUSED, APART = "qkv.weight -> {q,k}.kernel", "{one,two} -> {q,k}"
RULES = (
    Rule.optional(FUSED, "(n o) i -> n i o", o=(2, 4)),
    Rule.optional(FUSED, "(n o) i -> n i o"),
    Rule.optional(APART),
)


def layer(*outs):
    made = {name: nnx.Linear(3, out, use_bias=False, rngs=nnx.Rngs(0)) for name, out in outs}
    return nnx.Dict(made)


def drawn(*shape):
    return np.random.RandomState(sum(shape)).standard_normal(shape).astype(np.float32)


def loaded(arrays, *outs):
    mine = layer(*outs)
    weights.load(mine, arrays, rules=RULES)
    return [np.asarray(mine[name].kernel[...]) for name, _ in outs]


@pytest.mark.nightly
def test_an_optional_rule_applies_where_names_and_sizes_match():
    whole, outs = drawn(6, 3), (("q", 2), ("k", 4))
    for got, want in zip(loaded({"qkv.weight": whole}, *outs), (whole[:2], whole[2:]), strict=True):
        assert judge.exact(got, want.T).ok
    whole = drawn(8, 3)
    for got, want in zip(
        loaded({"qkv.weight": whole}, ("q", 4), ("k", 4)), np.split(whole, 2), strict=True
    ):
        assert judge.exact(got, want.T).ok
    one, two = drawn(2, 3), drawn(4, 3)
    for got, want in zip(
        loaded({"one.weight": one, "two.weight": two}, *outs), (one, two), strict=True
    ):
        assert judge.exact(got, want.T).ok


def test_nothing_is_left_unfilled_and_nothing_filled_twice():
    outs = (("q", 2), ("k", 4))
    with told(weights.CheckpointError, "k.kernel [3, 4] is filled by nothing"):
        loaded({"q.weight": drawn(2, 3)}, *outs)
    both = {"qkv.weight": drawn(6, 3), "one.weight": drawn(2, 3), "two.weight": drawn(4, 3)}
    with told(weights.CheckpointError, "is filled twice"):
        loaded(both, *outs)
    with told(weights.CheckpointError, "qkv.weight [7, 3] goes to", "does not have"):
        loaded({"qkv.weight": drawn(7, 3)}, *outs)


def test_a_plain_rule_must_match():
    with told(weights.CheckpointError, "matches no tensor left"):
        weights.load(layer(("q", 2)), {"q.weight": drawn(2, 3)}, rules=[Rule("p -> q")])


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Rule.optional("a -> b").inside("h.*", "g.*"), 'Rule.optional("h.*.a -> g.*.b")'),
        (Rule.skip("a").made_optional(), 'Rule.skip("a")'),
        (Rule.shifted("a -> b", by=1.0).made_optional(), 'Rule.shifted("a -> b", by=1.0)'),
    ],
)
def test_an_optional_rule_prints_as_its_call(rule, text):
    assert str(rule) == text and rule.may_miss
