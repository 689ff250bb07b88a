"""Rules that split, join and carry parts of unequal size: published layouts, there and back."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_attn.parity import ParityError, Rule, judge, plan, port
from flax_attn.weights.einops_layout import sizes_of
from flax_attn.weights.move import Move

IN, HEADS, GROUPS, WIDTH = 18, 6, 2, 4
QKV = "qkv.weight -> {q,k,v}.kernel"


class Flax(nnx.Module):
    """Holds parts by name."""

    def __init__(self, **parts):
        for name, part in parts.items():
            setattr(self, name, part)


def kernels(**shapes):
    return Flax(
        **{name: Flax(kernel=nnx.Param(jnp.zeros(shape))) for name, shape in shapes.items()}
    )


def drawn(*shape):
    return np.random.RandomState(0).standard_normal(shape)


def falcon(weight):
    """As FalconAttention._split_heads of the new decoder cuts its rows."""
    rows = weight.reshape(GROUPS, HEADS // GROUPS + 2, WIDTH, IN)
    parts = rows[:, :-2], rows[:, -2], rows[:, -1]
    return [part.reshape(-1, IN).T for part in parts]


def multi_query(weight):
    rows = weight.reshape(HEADS + 2, WIDTH, IN)
    return [
        rows[:-2].transpose(2, 0, 1),
        rows[-2:-1].transpose(2, 0, 1),
        rows[-1:].transpose(2, 0, 1),
    ]


def phi(weight):
    return [part.T for part in np.split(weight, [HEADS * WIDTH, (HEADS + GROUPS) * WIDTH])]


def latent(weight):
    """As DeepSeek's attention cuts what kv_b_proj gives: head by head, keys 6 and values 5 wide."""
    keys, values = np.split(weight.reshape(3, 11, IN), [6], axis=1)
    return [keys.transpose(2, 0, 1), values.transpose(2, 0, 1)]


G = HEADS // GROUPS
LAYOUTS = {
    "Phi-3": (Rule(QKV, "(n o) i -> n i o", o=(24, 8, 8)), (40, IN), phi),
    "Falcon, in heads": (
        Rule(QKV, "(k n o h) i -> n i (k o h)", o=(G, 1, 1), h=WIDTH),
        (40, IN),
        falcon,
    ),
    "Falcon, in rows": (
        Rule(QKV, "(k n o) i -> n i (k o)", o=(G * WIDTH, WIDTH, WIDTH)),
        (40, IN),
        falcon,
    ),
    "multi-query": (
        Rule(QKV, "(n o h) i -> n i o h", o=[HEADS, 1, 1], h=WIDTH),
        (32, IN),
        multi_query,
    ),
    "latent": (
        Rule("kv_b.weight -> {k,v}.kernel", "(h n o) i -> n i h o", o=(6, 5)),
        (33, IN),
        latent,
    ),
}


def moved(rule, *shapes):
    """The move of a rule, with every size known, as the mapping makes it."""
    here, there = (side.count(",") + 1 for side in rule.sides)
    sizes = sizes_of(rule.layout, shapes, there, dict(rule.sizes))
    sources, targets = ([f"{w}{i}" for i in range(n)] for w, n in (("a", here), ("b", there)))
    return Move(tuple(sources), tuple(targets), rule.layout, sizes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_layouts_are_cut_as_their_models_cut_them(name):
    rule, shape, want = LAYOUTS[name]
    weight = drawn(*shape)
    move = moved(rule, shape)
    got = move.forward({"a0": weight})
    for part, expected in zip(got.values(), want(weight), strict=True):
        assert judge.exact(part, np.ascontiguousarray(expected)).ok
    assert judge.exact(move.back(got)["a0"], weight).ok


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_parts_are_joined_the_other_way(name):
    rule, shape, _ = LAYOUTS[name]
    theirs, mine = rule.sides
    left, right = rule.layout.split("->")
    joined = Rule(f"{mine} -> {theirs}", f"{right.strip()} -> {left.strip()}", **dict(rule.sizes))
    parts = list(moved(rule, shape).forward({"a0": drawn(*shape)}).values())
    move = moved(joined, *(part.shape for part in parts))
    got = move.forward({f"a{i}": part for i, part in enumerate(parts)})
    assert judge.exact(got["b0"], drawn(*shape)).ok
    back = move.back(got)
    assert all(judge.exact(back[f"a{i}"], part).ok for i, part in enumerate(parts))


def test_one_dimensional_biases_go_with_them():
    rule = Rule("qkv.bias -> {q,k,v}.bias", "(k n o) -> n (k o)", o=(12, 4, 4))
    move, bias = moved(rule, (40,)), drawn(40)
    got = list(move.forward({"a0": bias}).values())
    rows = bias.reshape(2, 20)
    want = rows[:, :12], rows[:, 12:16], rows[:, 16:]
    assert all(judge.exact(g, w.ravel().copy()).ok for g, w in zip(got, want, strict=True))


def test_parts_on_both_sides_are_carried_one_by_one():
    rule = Rule("{q,k}.weight -> {a,b}.kernel", "n (o h) i -> n i o h", o=(6, 2), h=4)
    move = moved(rule, (24, IN), (8, IN))
    one, two = drawn(24, IN), drawn(8, IN)
    got = move.forward({"a0": one, "a1": two})
    assert judge.exact(got["b0"], one.reshape(6, 4, IN).transpose(2, 0, 1).copy()).ok
    assert judge.exact(got["b1"], two.reshape(2, 4, IN).transpose(2, 0, 1).copy()).ok
    assert judge.exact(move.back(got)["a1"], two).ok


@st.composite
def cuts(draw):
    """A bracket with parts of unequal size, axes before and after, perhaps one turned round."""
    parts = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)))
    before, after = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    turn = draw(st.sampled_from(["", "~"]))
    order = " ".join(draw(st.permutations(["k", "i", f"{turn}o", "h"])))
    return parts, before, after, order


@pytest.mark.nightly
@given(cuts())
@settings(max_examples=60, deadline=None)
def test_every_cut_is_the_one_that_is_written_and_can_be_undone(drawn_cut):
    parts, before, after, order = drawn_cut
    names = ",".join(f"p{i}" for i in range(len(parts)))
    rule = Rule(f"w -> {{{names}}}", f"i (k n o h) -> n {order}", o=parts, k=before, h=after)
    shape = (5, before * sum(parts) * after)
    weight = drawn(*shape)
    move = moved(rule, shape)
    got = move.forward({"a0": weight})
    pieces = np.split(weight.reshape(5, before, sum(parts), after), np.cumsum(parts)[:-1], 2)
    letters = order.replace("~", "").split()
    for part, piece in zip(got.values(), pieces, strict=True):
        piece = np.flip(piece, 2) if "~" in order else piece
        want = piece.transpose([("i", "k", "o", "h").index(letter) for letter in letters])
        assert judge.exact(part, want.copy()).ok
    assert judge.exact(move.back(got)["a0"], weight).ok


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rule(QKV, "(n o) i -> n i o", o=(24, 8)), r"o=\(24, 8\) has 2 parts.* 3 names"),
        (lambda: Rule("a -> b", "(n o) -> n o", o=(2, 3)), "has 2 parts.* no names in braces"),
        (lambda: Rule("a -> {b}", "(n o) -> n o", o=(2,)), "has 1 parts.* no names in braces"),
        (lambda: Rule(QKV, "(o n) i -> n i o", o=(24, 8, 8)), r"\(n o\) has a place for o="),
        (lambda: Rule(QKV, "(n h o) i -> n i h o", o=(24, 8, 8)), "in one bracket"),
        (lambda: Rule(QKV, "n o i -> n i o", o=(24, 8, 8)), "in one bracket"),
        (lambda: Rule(QKV, "(n o) i -> n i o", n=(1, 1, 1)), "other braces"),
        (lambda: Rule(QKV, "(n o) i -> n i o", n=2, o=(24, 8, 8)), "other braces"),
        (lambda: Rule("{a,b} -> {c,d}", "n m o -> m n o", o=(2, 3)), "other braces"),
        (lambda: Rule(QKV, "(n o) i -> n i o", o=(24, 0, 8)), "no axis of such a size: o="),
        (lambda: Rule(QKV, "(n o) i -> n i o", o=()), "no axis of such a size: o="),
        (lambda: Rule(QKV, "(n o) i -> n i o", o="24"), "no axis of such a size: o='24'"),
        (lambda: Rule(QKV, "(n o) i -> n i o", o=(24, 8.0, 8)), "no axis of such a size: o="),
        (lambda: Rule(QKV, "(n o h) i -> n i o h", o=(3, 1, 1), h=(1, 2, 3)), "One axis alone"),
    ],
)
def test_a_rule_that_cannot_be_read(make, words):
    with pytest.raises(ParityError, match=words):
        make()


def test_a_rule_is_data_and_prints_as_it_is_written():
    rule = Rule(QKV, "(n o) i -> n i o", o=[np.int64(24), 8, 8])
    assert eval(str(rule), {"Rule": Rule}) == rule and {rule: 1}
    assert str(rule) == f'Rule("{QKV}", "(n o) i -> n i o", o=(24, 8, 8))'


def linear(torch, outs):
    holder = torch.nn.Module()
    for name, out in outs.items():
        setattr(holder, name, torch.nn.Linear(IN, out, bias=False))
    return holder


PARTS = {"q": (IN, 24), "k": (IN, 8), "v": (IN, 8)}


@pytest.mark.parametrize(
    ("outs", "mine", "rule", "words"),
    [
        (
            {"qkv": 41},
            PARTS,
            Rule(QKV, "(n o) i -> n i o", o=(24, 8, 8)),
            r"with o=\(24, 8, 8\) \(40 in all\) does not fit \[41, 18\]",
        ),
        (
            {"qkv": 40},
            PARTS,
            Rule(QKV, "(k n o) i -> n i (k o)", o=(3, 1, 1), k=2),
            r"with k=2, o=\(3, 1, 1\) \(5 in all\) does not fit \[40, 18\]",
        ),
        (
            {"q": 24, "k": 9, "v": 8},
            {"qkv": (IN, 40)},
            Rule("{q,k,v}.weight -> qkv.kernel", "n o i -> i (n o)", o=(24, 8, 8)),
            r"with o=\(24, 8, 8\) does not fit \[24, 18\] \[9, 18\] \[8, 18\]",
        ),
        (
            {"q": 24, "k": 8, "v": 8},
            {"qkv": (IN, 40)},
            Rule("{q,k,v}.weight -> qkv.kernel", "n o i -> i (n o)"),
            "takes parts of one shape, these are .* size of each part, as in o=",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_told_with_those_there_are(outs, mine, rule, words):
    torch = pytest.importorskip("torch", reason="weights are carried from torch")
    with pytest.raises(ParityError, match=words) as caught:
        plan(linear(torch, outs), kernels(**mine), [rule])
    told = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    assert len(told) == 1, told


def test_torch_to_flax_to_torch_is_bit_equal():
    torch = pytest.importorskip("torch", reason="weights are carried from torch")
    source, rule = linear(torch, {"qkv": 40}), LAYOUTS["Falcon, in heads"][0]
    mine = port(source, kernels(**PARTS), [rule])
    want = falcon(source.qkv.weight.detach().numpy())
    for name, part in zip("qkv", want, strict=True):
        assert judge.exact(np.asarray(getattr(mine, name).kernel[...]), part.copy()).ok
    back = port(mine, linear(torch, {"qkv": 40}), [rule])
    assert torch.equal(back.qkv.weight, source.qkv.weight)
    assert "(k n o h) i -> n i (k o h)" in str(plan(source, mine, [rule]))
