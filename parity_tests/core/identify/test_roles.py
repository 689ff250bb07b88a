"""Queries, keys, values and the projections that make them, in any style of a module."""

from importlib import import_module

import numpy as np
import pytest

from flax_attn.identify.plain import plainly
from flax_attn.identify.program import Program
from flax_attn.identify.roles import Unclear, roles_of
from flax_attn.parity.call_spec import CallSpec
from flax_attn.parity.sides.calls import plain_call
from flax_attn.parity.sides.torch_fused import attention_formula
from parity_tests.tables import each, with_nightly

torch = pytest.importorskip("torch", reason="the corpus is of torch's modules")
corpus = import_module("parity_tests.core.identify")
subject = import_module("parity_tests.core.identify.subject")

LENGTH, CONTEXT = 7, 9
# Without one softmax over all keys between two products, or not to be differentiated.
UNCLEAR = {
    "blocks_as_axis": "no softmax whose rows are the queries",
    "tiles_of_keys": "no softmax whose rows are the queries",
    "one_query_at_a_time": "no softmax whose rows are the queries",
    "softmax_by_logsumexp": "no softmax between two products",
}
BY_NAME = {s.name: s for s in corpus.ATTENTION}
CLEAR = [name for name in BY_NAME if name not in UNCLEAR]


def module_and_roles(name, seed):
    each_one = BY_NAME[name]
    rng = np.random.RandomState(seed)
    module = each_one.make(rng)
    args, kwargs = each_one.inputs(module, rng, LENGTH)
    call = plainly(plain_call)
    live = CallSpec(args, kwargs, (), 0, False, True, True, call).live(module)
    live = live.with_weights("own", None)
    run = live.alone("float64", None)
    truth = each_one.truth(module)
    keys = CONTEXT if truth["cross"] else LENGTH
    program = Program(run, live.program(run))
    return module, truth, roles_of(program, subject.BATCH, LENGTH, keys)


@pytest.mark.nightly(but=["flex_alibi"])
@pytest.mark.parametrize("name", with_nightly(CLEAR, commit=7))
def test_heads_are_told_apart(name):
    # With a past, which seed 1 draws, keys of earlier tokens come from no projection.
    for seed in (0,) if name == "past_pair" else (0, 1):
        _, truth, roles = module_and_roles(name, seed)
        sizes = (roles.heads, roles.kv_heads, roles.head_dim)
        assert sizes == (truth["heads"], truth["kv_heads"], truth["head_dim"]), roles.parameters
        assert all(roles.parameters[role] for role in ("query", "key", "value"))
        if truth["gate"] == "sigmoid":
            assert roles.parameters["gate"]


@pytest.mark.parametrize("name", with_nightly(UNCLEAR, commit=["softmax_by_logsumexp"]))
def test_what_cannot_be_told_is_said(name):
    errors = (Unclear, import_module("flax_attn.errors").ParityError)
    with pytest.raises(errors, match=UNCLEAR[name]):
        module_and_roles(name, 0)


def test_a_fused_projection_is_split_by_roles():
    """GPT-NeoX's order, (k (g q, k, v) d): the rows of its weight that make each head."""
    _, truth, roles = module_and_roles("fused_groups_outermost", 0)
    parts = roles.query + roles.key + roles.value
    assert len({part.projection.value for part in parts}) == 1
    columns = sorted(c for part in parts for head in part.heads for c in head)
    assert columns == [*range((truth["heads"] + 2 * truth["kv_heads"]) * truth["head_dim"])]


def test_parameters_have_their_roles():
    _, _, roles = module_and_roles("key_without_bias", 0)
    names = roles.parameters
    assert len(names["query"]) == len(names["value"]) == 2 and len(names["key"]) == 1
    _, _, roles = module_and_roles("gate_of_its_own", 0)
    assert roles.gate and not {*roles.parameters["gate"]} & {*roles.parameters["query"]}


@each("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}])
def test_the_formula_is_the_fused_attention(options):
    random = np.random.RandomState(3).standard_normal
    q, k, v = (torch.from_numpy(random((2, n, 5, 6))) for n in (6, 3, 3))
    if "enable_gqa" not in options:
        k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
    got = attention_formula(q, k, v, **options)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(got, want)
