"""Weights that cannot be ported are refused in one sentence that names what would work."""

from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_attn.parity import ParityError, Rule, draw, judge, plan, port
from flax_attn.parity.port import flax_values
from flax_attn.parity.torch_module import describe, read
from flax_attn.weights.described import Source
from flax_attn.weights.einops_layout import axis_sizes
from flax_attn.weights.known_layers import flax_params, flax_path, flax_state
from flax_attn.weights.move import Move
from flax_attn.weights.plan import make_plan

from .test_mapping import Flax, Torch, linear, rngs, zeros

torch = pytest.importorskip("torch", reason="weights are carried from torch")
T = torch.nn


def refusal(source, flax, *rules):
    with pytest.raises(ParityError) as caught:
        plan(source, flax, rules)
    return str(caught.value)


@pytest.mark.nightly
def test_a_whole_recurrent_network_asks_for_cells():
    text = refusal(T.LSTM(3, 4, num_layers=2), nnx.RNN(nnx.OptimizedLSTMCell(3, 4, rngs=rngs())))
    assert "the module is a torch LSTM, and nnx has cells, one for each layer" in text
    assert text.count("is a torch LSTM") == 1 and 'say Rule("*_l0 -> path.of.the.cell.*")' in text
    assert 'Rule("*_l0 -> cell.*")' in text.partition("you may mean:")[2]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ours", "theirs", "role", "parts"),
    [
        (T.GRUCell, nnx.GRUCell, "bias_hh", "its dense_h by"),
        (T.RNNCell, nnx.SimpleCell, "bias_hh", "its dense_h by"),
        (T.LSTMCell, nnx.OptimizedLSTMCell, "bias_ih", "its dense_i by"),
        (T.LSTMCell, nnx.LSTMCell, "bias_ih", "its ii, if_, ig and io by"),
    ],
)
def test_the_second_bias_of_a_cell(ours, theirs, role, parts):
    source, flax = Torch(cell=ours(3, 4)), Flax(cell=theirs(3, 4, rngs=rngs()))
    text = refusal(source, flax)
    assert f"cell.{role} has no place: nnx.{theirs.__name__} is built with one bias" in text
    assert parts in text and f'say Rule.skip("cell.{role}")' in text
    port(source, flax, [Rule.skip(f"cell.{role}")])
    assert "Flax needs use_bias=False" in refusal(Torch(cell=ours(3, 4, bias=False)), flax)


@pytest.mark.nightly
def test_a_zero_bias_is_skipped_and_stays_zero():
    source, flax = T.LSTMCell(3, 4), nnx.OptimizedLSTMCell(3, 4, rngs=rngs())
    with torch.no_grad():
        source.bias_ih.zero_()
    want = read(source)
    port(source, flax, [Rule.skip("bias_ih")])
    port(flax, source, [Rule.skip("bias_ih")])
    assert all(judge.exact(value, want[name]).ok for name, value in read(source).items())


def upside(**kwargs):
    return nnx.ConvTranspose(4, 6, (3,), **kwargs, rngs=rngs())


SENTENCES = {
    "Bilinear": (
        lambda: (T.Bilinear(2, 3, 4), linear(2, 4)),
        "weight [4, 2, 3] belongs to a Bilinear, which nnx does not have: hold it as a Param",
    ),
    "groups": (
        lambda: (T.ConvTranspose1d(4, 6, 3, groups=2), upside()),
        "weight [4, 3, 3] has 2 groups for 6 outputs, and nnx.ConvTranspose has none",
    ),
    "bias_k": (
        lambda: (
            T.MultiheadAttention(4, 2, add_bias_kv=True),
            nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs()),
        ),
        "bias_k: a MultiHeadAttention has no bias_k; torch needs add_bias_kv=False",
    ),
    "instance statistics": (
        lambda: (
            T.InstanceNorm1d(4, affine=True, track_running_stats=True),
            nnx.InstanceNorm(4, rngs=rngs()),
        ),
        "running_mean: nnx.InstanceNorm has no statistics; torch needs track_running_stats=False",
    ),
    "no statistics": (
        lambda: (T.BatchNorm1d(4, track_running_stats=False), nnx.BatchNorm(4, rngs=rngs())),
        "mean [4] is filled by nothing: torch keeps no statistics there, it needs",
    ),
    "no bias": (
        lambda: (T.Linear(2, 4, bias=False), linear(2, 4)),
        "bias [4] is filled by nothing: torch has no bias there, so Flax needs use_bias=False",
    ),
    "another type": (
        lambda: (T.Conv1d(4, 4, 4), nnx.ConvTranspose(4, 4, (4,), rngs=rngs())),
        "weight of a Conv meets the module, a ConvTranspose, where a Conv would be known: say Rule",
    ),
    "axes out of order": (
        lambda: (T.Linear(6, 4), nnx.LinearGeneral((2, 3), 4, axis=(-1, -2), rngs=rngs())),
        "weight of a Linear meets the module, a LinearGeneral",
    ),
    "general, another size": (
        lambda: (T.Linear(5, 4), nnx.LinearGeneral((2, 3), 4, axis=(-2, -1), rngs=rngs())),
        "weight [4, 5] cannot fill kernel [2, 3, 4]:",
    ),
}


@pytest.mark.nightly(
    but=[
        "Bilinear",
        "axes out of order",
        "bias_k",
        "general, another size",
        "instance statistics",
        "no statistics",
    ]
)
@pytest.mark.parametrize("name", SENTENCES)
def test_what_has_no_place_is_told_with_what_would_work(name):
    build, sentence = SENTENCES[name]
    assert sentence in refusal(*build())


def test_a_rule_onto_a_known_layer_of_another_kind_needs_a_layout():
    source, flax = T.MultiheadAttention(4, 2, kdim=3, vdim=3, bias=False), Flax(q=linear(4, 4))
    text = refusal(source, flax, Rule("q_proj_weight -> q.kernel"))
    assert 'say Rule("q_proj_weight -> q.kernel", "layout")' in text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rule("a -> b", "o i -> i"), "must be reversible"),
        (lambda: Rule("a -> b", "o o -> o"), "must be reversible"),
        (lambda: Rule("a -> b", "(o i -> i o"), "A layout reads"),
        (lambda: Rule("a -> b", "o, i -> i o"), "A layout reads"),
        (lambda: Rule("a -> b", "(o ...) -> o ..."), "A layout reads"),
        (lambda: Rule("a -> b", "o i -> i o", h=3), "has no axis of such a size: h=3"),
        (lambda: Rule("a -> b", "o i -> i o", i=0), "has no axis of such a size: i=0"),
        (lambda: Rule("a -> b", h=3), "Sizes belong to a layout"),
        (lambda: Rule("a -> {b,c}", "(n o) i -> (n o) i"), "are its first axis"),
        (lambda: Rule("{a,b} -> c", "(n o) i -> n o i"), "are its first axis"),
        (lambda: Rule("h.*.a -> b"), r"as many \* on each side"),
        (lambda: Rule.tied("h.* -> b"), r"as many \* on each side"),
        (lambda: Rule.tied("h"), 'reads "second -> first"'),
        (lambda: Rule.skip("a -> b"), "takes torch's name alone"),
    ],
)
def test_a_rule_that_cannot_be_read(make, words):
    with pytest.raises(ParityError, match=words):
        make()


def test_braces_give_as_many_as_there_are_names():
    flax = Flax(**{name: Flax(kernel=zeros(3, 4)) for name in "qkv"})
    source = Torch(fused=T.Parameter(torch.randn(3, 2 * 4)))
    rule = Rule("fused -> {q,k,v}.kernel", "i (n o) -> n i o", n=2)
    assert "gives 2 arrays for 3 names" in refusal(source, flax, rule)


SHAPE = (2, 3, 5, 7)


@pytest.mark.parametrize("order", list(permutations("abcd")), ids="".join)
def test_of_sizes_that_differ_one_layout_alone_is_taken(order):
    """Every other permutation is refused with both shapes."""
    source = Source("w", "Parameter", SHAPE, "float32")
    flax = Flax(w=zeros(7, 2, 5, 3))
    rule = Rule("w -> w", f"a b c d -> {' '.join(order)}")
    if order == tuple("dacb"):
        assert make_plan([source], flax, [rule]).moves
    else:
        with pytest.raises(
            ParityError, match=r"  - w \[2, 3, 5, 7\] would fill w as .* \[7, 2, 5, 3\]"
        ):
            make_plan([source], flax, [rule])


@st.composite
def layouts(draw_from):
    """Any reversible layout: axes in any order and brackets, some turned round."""
    axes = [f"a{i}" for i in range(draw_from(st.integers(1, 5)))]
    sizes = {axis: draw_from(st.integers(1, 4)) for axis in axes}

    def side():
        order, text, i = draw_from(st.permutations(axes)), [], 0
        while i < len(order):
            count = draw_from(st.integers(1, len(order) - i))
            some = [draw_from(st.sampled_from(["", "~"])) + axis for axis in order[i : i + count]]
            text.append(some[0] if count == 1 else f"({' '.join(some)})")
            i += count
        return " ".join(text)

    return side(), side(), sizes


@pytest.mark.nightly
@given(layouts())
@settings(max_examples=150, deadline=None)
def test_every_layout_that_is_taken_can_be_undone(drawn):
    left, right, sizes = drawn
    layout = f"{left} -> {right}"
    Rule("w -> v", layout, **sizes)
    grouped = [piece for piece in left.replace("~", "").replace("(", " ( ").split(" ") if piece]
    shape, inside = [], None
    for piece in grouped:
        if piece == "(":
            inside = 1
        elif inside is None:
            shape.append(sizes[piece])
        else:
            inside *= sizes[piece.rstrip(")")]
            if piece.endswith(")"):
                shape.append(inside)
                inside = None
    value = np.arange(np.prod(shape)).reshape(shape)
    move = Move(("w",), ("v",), layout, axis_sizes(layout, tuple(shape), 1, sizes))
    assert judge.exact(move.back(move.forward({"w": value}))["w"], value).ok


@pytest.mark.nightly
def test_a_transposed_convolution_is_mirrored_unless_flax_does():
    source = T.ConvTranspose2d(4, 6, (3, 5))
    for turn in (False, True):
        flax = nnx.ConvTranspose(4, 6, (3, 5), transpose_kernel=turn, rngs=rngs())
        port(source, flax)
        weight = source.weight.detach().numpy()
        want = (
            weight.transpose(2, 3, 1, 0) if turn else weight[..., ::-1, ::-1].transpose(2, 3, 0, 1)
        )
        assert judge.exact(np.asarray(flax.kernel[...]), want.copy()).ok


def test_running_statistics_are_loaded_as_state():
    source, flax = Torch(norm=T.BatchNorm2d(4)), Flax(norm=nnx.BatchNorm(4, rngs=rngs()))
    assert set(flax_params(flax)) == {"norm.scale", "norm.bias"}
    assert set(flax_state(flax)) == {"norm.scale", "norm.bias", "norm.mean", "norm.var"}
    kinds = {s.name: s.kind for s in describe(source)}
    assert kinds["norm.running_var"] == "BatchNorm"
    assert plan(source, flax).constants == ("norm.num_batches_tracked",)
    drawn = draw.parameter(0, "norm.running_var", "BatchNorm", (400,))
    assert (drawn > 0).all() and len({*drawn}) == len(drawn)
    renamed = Flax(bn=nnx.BatchNorm(4, rngs=rngs()))
    assert plan(source, renamed, [Rule("norm -> bn")]).constants == ("norm.num_batches_tracked",)


def test_a_shared_norm_is_carried_once():
    one, two = T.BatchNorm1d(4), nnx.BatchNorm(4, rngs=rngs())
    found = plan(Torch(a=one, b=one), Flax(a=two, b=two))
    assert len(found.moves) == 4 and set(found.tied) == {
        f"b.{role}" for role in ("weight", "bias", "running_mean", "running_var")
    }


def tied():
    embed, head = T.Embedding(5, 3), T.Linear(3, 5, bias=False)
    head.weight = embed.weight
    return Torch(embed=embed, head=head)


@pytest.mark.parametrize(
    "rule", [Rule.tied("embed.weight -> head.weight"), Rule.skip("embed.weight")]
)
def test_of_tied_tensors_either_may_be_the_one_that_is_carried(rule):
    source, flax = tied(), Flax(head=linear(3, 5, use_bias=False))
    port(source, flax, [rule])
    (move,) = plan(source, flax, [rule]).moves
    assert move.sources == ("embed.weight",)  # torch tells its gradient by the first name
    want = source.embed.weight.detach().numpy()
    assert judge.exact(np.asarray(flax.head.kernel[...]), want.T.copy()).ok
    back = port(flax, tied(), [rule])
    assert judge.exact(read(back)["embed.weight"], want).ok


def test_paths_that_are_not_there_are_named_not_crashed_on():
    source = Torch(a=T.ModuleList([T.Linear(2, 4)]), keys=T.Linear(2, 4))
    text = refusal(source, Flax(a=nnx.List([]), b=nnx.Dict(c=linear(3, 5))))
    assert "a.0.weight [4, 2] goes to a.0.kernel, which Flax does not have" in text
    assert "b.c.kernel [3, 5] is filled by nothing" in text
    net = Flax(net=nnx.Sequential(linear(2, 4)))
    assert flax_path(net, "net.0.kernel") == "net.layers.0.kernel"


@pytest.mark.nightly
def test_float64_weights_are_not_rounded_without_x64():
    with jax.enable_x64(True):
        flax = nnx.Linear(2, 4, param_dtype=jnp.float64, rngs=rngs())
    source = T.Linear(2, 4).double()
    port(source, flax)
    assert judge.exact(flax_values(flax)["kernel"], read(source)["weight"].T.copy()).ok


def test_sources_are_written_down_and_read_again():
    module = Torch(norm=T.BatchNorm1d(4), up=T.ConvTranspose1d(2, 4, 3), cell=T.GRUCell(2, 3))
    sources = describe(module)
    assert {s.kind for s in sources} == {"BatchNorm", "ConvTranspose", "GRUCell", "buffer"}
    assert [Source.from_json(s.to_json()) for s in sources] == sources


@pytest.mark.nightly
def test_the_nearest_names_are_of_the_same_role_and_sizes_first():
    text = refusal(Torch(net=T.GRU(3, 4)), Flax(net=Flax(r=linear(3, 4), z=linear(4, 12))))
    lines = [line.strip(" -") for line in text.splitlines() if "nearest in torch" in line]
    near = {line.split(" is ")[0]: line.split("torch: ")[1] for line in lines}
    assert near["net.r.bias [4]"].startswith("net.bias_ih_l0, net.bias_hh_l0")
    assert near["net.r.kernel [3, 4]"].startswith("net.weight_ih_l0, net.weight_hh_l0")
    assert near["net.z.kernel [4, 12]"].startswith("net.weight_hh_l0, ")
    text = refusal(Torch(net=T.GRU(3, 4)), Flax(net=Flax(weight_ih_bias=zeros(5))))
    assert "nearest in torch: net.bias_ih_l0, " in text
    text = refusal(
        Torch(one=T.Linear(3, 4), two=T.Linear(5, 7)), Flax(two=Flax(w=zeros(4, 3), b=zeros(7)))
    )
    assert "two.w [4, 3] is filled by nothing; nearest in torch: one.weight" in text
    assert "one.bias [4] goes to one.bias, which Flax does not have; nearest: two.b" in text
