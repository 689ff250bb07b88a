"""`suggest` of fused projections: parts by name, both orders, unequal parts."""

import jax.numpy as jnp
import pytest
from flax import nnx

from flax_attn.parity import ParityError, judge, plan, port, suggest
from flax_attn.parity.torch_module import read

from .test_mapping import Flax, Torch, linear, zeros

torch = pytest.importorskip("torch", reason="weights are carried from torch")
T = torch.nn
D = 24


def told(source, flax):
    """The rules that are proposed, as they are printed, without biases."""
    return [str(rule) for rule in suggest(source, flax) if "bias" not in rule.names]


def fused(outs=3 * D, name="qkv", **facts):
    source = Torch(**{name: T.Linear(D, outs, bias=False)})
    for fact, value in facts.items():
        setattr(source, fact, value)
    return source


def flat(names, outs=(D, D, D), **facts):
    parts = {n: linear(D, out, use_bias=False) for n, out in zip(names, outs, strict=True)}
    flax = Flax(**parts)
    for fact, value in facts.items():
        setattr(flax, fact, value)
    return flax


def heads(**shapes):
    return Flax(**{name: Flax(kernel=zeros(D, *shape)) for name, shape in shapes.items()})


NAMES = {
    "letters": ("q", "k", "v"),
    "words": ("query", "key", "value"),
    "plural": ("queries", "keys", "values"),
    "w": ("wq", "wk", "wv"),
    "W_": ("W_query", "W_key", "W_value"),
    "camel": ("toQ", "toK", "toV"),
    "_proj": ("q_proj", "k_proj", "v_proj"),
    "proj": ("qproj", "kproj", "vproj"),
    "linear_": ("linear_q", "linear_k", "linear_v"),
    "_layer": ("query_layer", "key_layer", "value_layer"),
}
FUSED = ("qkv", "in_proj", "c_attn", "query_key_value", "Wqkv", "qkv_proj", "to_qkv", "fused")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("whole", FUSED[:2])
def test_query_key_and_value_stand_in_this_order_however_they_are_called(kind, whole):
    names = NAMES[kind]
    want = f"{whole}.weight -> {{{','.join(names)}}}.kernel"
    for order in (names, names[::-1], (names[0], names[2], names[1])):
        rules = told(fused(name=whole), flat(order))
        assert rules == [f'Rule("{want}", "(n o) i -> n i o")']
    parts = Torch(**{n: T.Linear(D, D, bias=False) for n in names[::-1]})
    rules = told(parts, Flax(**{whole: linear(D, 3 * D, use_bias=False)}))
    assert rules == [f'Rule("{{{",".join(names)}}}.weight -> {whole}.kernel", "n o i -> i (n o)")']


@pytest.mark.nightly
@pytest.mark.parametrize("whole", FUSED)
@pytest.mark.parametrize("more", ["dense", "gate", "g", "out", "o_proj", "Dense_0"])
def test_nothing_else_stands_among_them(whole, more):
    """Neither one by one, where all are square, nor as a fourth of four."""
    for names in (("query", "key", "value", more), (more, "value", "key", "query")):
        source = fused(name=whole)
        source.other = T.Linear(D, D, bias=False)
        rules = told(source, flat(names, (D,) * 4))
        assert f'Rule("{whole}.weight -> {{query,key,value}}.kernel", "(n o) i -> n i o")' in rules
        assert set(rules) - {rules[0], rules[1]} == set() and len(rules) == 2
        assert f'Rule("other -> {more}")' in rules
    assert told(fused(4 * D, name=whole), flat(("q", "k", "v", more), (D,) * 4)) == []


def test_a_key_is_never_filled_by_what_is_none():
    assert told(Torch(dense=T.Linear(D, D, bias=False)), flat(("q", "k", "v"))) == []
    parts = Torch(**{n: T.Linear(D, D, bias=False) for n in ("q_proj", "v_proj", "k_proj")})
    rules = told(parts, flat(("values", "keys", "queries")))
    want = {"q_proj -> queries", "k_proj -> keys", "v_proj -> values"}
    assert {rule.names for rule in suggest(parts, flat(("values", "keys", "queries")))} == want
    assert len(rules) == 3
    normed = flat(("q", "k", "v"))
    normed.k_norm = linear(D, D, use_bias=False)
    normed.q_norm = linear(D, D, use_bias=False)
    assert 'Rule("qkv.weight -> {q,k,v}.kernel", "(n o) i -> n i o")' in told(fused(), normed)


def test_key_and_value_of_one_weight_leave_the_query_alone():
    source = fused(2 * D, name="kv_proj")
    source.q_proj = T.Linear(D, D, bias=False)
    want = {"kv_proj.weight -> {k,v}.kernel", "q_proj -> q"}
    assert {rule.names for rule in suggest(source, flat(("q", "v", "k")))} == want


ORDERS = ("(n h k) i -> n i h k", "(h n k) i -> n i h k")


def test_both_orders_of_a_fused_weight_are_offered():
    source, flax = fused(), heads(q=(6, 4), k=(6, 4), v=(6, 4))
    names = "qkv.weight -> {q,k,v}.kernel"
    rules = suggest(source, flax)
    assert [str(rule) for rule in rules] == [f'Rule("{names}", "{o}", h=6)' for o in ORDERS]
    for rule in rules:  # either solves the mapping, and there are two of one name, so not both
        back = port(port(source, heads(q=(6, 4), k=(6, 4), v=(6, 4)), [rule]), fused(), [rule])
        assert judge.exact(read(back)["qkv.weight"], read(source)["qkv.weight"]).ok
    with pytest.raises(ParityError) as caught:
        plan(source, flax)
    text = str(caught.value)
    assert "of two rules with the same names take one" in text
    assert text.splitlines()[-2:] == [f"  {rule}" for rule in rules]


@pytest.mark.parametrize("where", ["flax", "torch", "config"])
def test_of_flat_kernels_the_number_of_heads_is_taken_from_what_says_it(where):
    config = type("Config", (), {})()
    config.num_attention_heads = 6
    mine = {"num_heads": 6} if where == "flax" else {}
    facts = {"torch": {"n_head": 6}, "config": {"config": config}}.get(where, {})
    rules = told(fused(name="query_key_value", **facts), flat(("q", "k", "v"), **mine))
    start = 'Rule("query_key_value.weight -> {q,k,v}.kernel"'
    assert rules == [f'{start}, "(n o) i -> n i o")', f'{start}, "(h n k) i -> n i (h k)", h=6)']


def test_both_orders_are_offered_of_biases_and_of_weights_that_are_joined():
    source = Torch(qkv=T.Linear(D, 3 * D), num_heads=6)
    flax = Flax(**{name: linear(D, D) for name in "qkv"})
    layouts = [rule.layout for rule in suggest(source, flax) if "bias" in rule.names]
    assert layouts == ["(n o) -> n o", "(h n k) -> n (h k)"]
    parts = Torch(**{n: T.Linear(D, D, bias=False) for n in "vkq"}, num_heads=6)
    start = 'Rule("{q,k,v}.weight -> qkv.kernel"'
    rules = told(parts, Flax(qkv=linear(D, 3 * D, use_bias=False)))
    assert rules == [f'{start}, "n o i -> i (n o)")', f'{start}, "n (h k) i -> i (h n k)", h=6)']


UNEQUAL = {
    "rows": (
        fused(40),
        lambda: flat("vqk", (8, 24, 8)),
        ['"(n o) i -> n i o", o=(24, 8, 8)'],
    ),
    "rows, and groups that are known": (
        fused(40, num_kv_heads=2, num_heads=6),
        lambda: flat("vqk", (8, 24, 8)),
        ['"(n o) i -> n i o", o=(24, 8, 8)', '"(h n k) i -> n i (h k)", k=(12, 4, 4)'],
    ),
    "heads": (
        fused(40),
        lambda: heads(v=(2, 4), q=(6, 4), k=(2, 4)),
        [
            '"(n h k) i -> n i h k", h=(6, 2, 2)',
            '"(g n h k) i -> n i (g h) k", g=2, h=(3, 1, 1)',
        ],
    ),
    "one key head": (
        fused(32),
        lambda: heads(v=(1, 4), q=(6, 4), k=(1, 4)),
        ['"(n h k) i -> n i h k", h=(6, 1, 1)'],
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_parts_are_told_with_their_sizes(name):
    source, build, want = UNEQUAL[name]
    rules = suggest(source, build())
    start = 'Rule("qkv.weight -> {q,k,v}.kernel", '
    assert [str(rule) for rule in rules] == [f"{start}{end})" for end in want]
    for rule in rules:
        back = port(port(source, build(), [rule]), fused(source.qkv.out_features), [rule])
        assert judge.exact(read(back)["qkv.weight"], read(source)["qkv.weight"]).ok


def test_latent_keys_and_values_lie_head_by_head():
    for names in (("k_nope", "v"), ("k_up", "v_up"), ("key", "value")):
        flax = heads(**dict(zip(names[::-1], ((3, 5), (3, 6)), strict=True)))
        start = f'Rule("kv_b_proj.weight -> {{{",".join(names)}}}.kernel", '
        assert told(fused(33, name="kv_b_proj"), flax) == [
            f'{start}"(h n k) i -> n i h k", k=(6, 5))'
        ]


@pytest.mark.nightly
def test_unequal_parts_are_joined_and_inputs_first_is_kept():
    parts = Torch(
        **{n: T.Linear(D, out, bias=False) for n, out in zip("vkq", (8, 8, 24), strict=True)}
    )
    (rule,) = told(parts, Flax(qkv=linear(D, 40, use_bias=False)))
    assert rule == 'Rule("{q,k,v}.weight -> qkv.kernel", "n o i -> i (n o)", o=(24, 8, 8))'
    source = Torch(c_attn=T.Parameter(torch.randn(D, 40)))
    (rule,) = told(source, flat("qkv", (24, 8, 8)))
    assert rule == 'Rule("c_attn -> {q,k,v}.kernel", "i (n o) -> n i o", o=(24, 8, 8))'


def test_layers_of_a_list_are_told_at_once():
    source = Torch(h=T.ModuleList([fused(40) for _ in range(2)]))
    flax = Flax(blocks=nnx.List([flat("qkv", (24, 8, 8)) for _ in range(2)]))
    (rule,) = told(source, flax)
    start = 'Rule("h.*.qkv.weight -> blocks.*.{q,k,v}.kernel", '
    assert rule == f'{start}"(n o) i -> n i o", o=(24, 8, 8))'
    assert jnp.shape(port(source, flax, suggest(source, flax)).blocks[1].k.kernel[...]) == (D, 8)
