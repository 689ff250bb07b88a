"""`suggest`: proposed rules solve the mapping, are shown in the error, and are never applied."""

import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, Rule, judge, plan, port, suggest
from flax_attn.parity.port import flax_values
from flax_attn.parity.torch_module import read

from .test_mapping import Flax, Torch, drawn, linear, rngs, zeros

torch = pytest.importorskip("torch", reason="weights are carried from torch")
T = torch.nn


def names():
    source = Torch(enc=T.Linear(3, 4), norm1=T.LayerNorm(4))
    return source, Flax(encoder=linear(3, 4), norm_1=nnx.LayerNorm(4, rngs=rngs()))


def gpt(i=12, o=24):
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    block = {"c_attn": Conv1D(3 * i, i), "c_proj": Conv1D(i, i), "fc": Conv1D(o, i)}
    parts = {**{name: linear(i, i) for name in ("q", "k", "v", "proj")}, "fc": linear(i, o)}
    return (
        Torch(h=T.ModuleList([Torch(**block) for _ in range(2)])),
        Flax(blocks=nnx.List([Flax(**parts) for _ in range(2)])),
    )


def blocks():
    source, flax = gpt()
    for i in range(2):  # copies, for what is shared above would be tied
        source.h[i] = gpt()[0].h[0]
        flax.blocks[i] = gpt()[1].blocks[0]
    return source, flax


def attention():
    source = Torch(attn=T.MultiheadAttention(12, 3))
    return source, Flax(attention=nnx.MultiHeadAttention(3, 12, decode=False, rngs=rngs()))


def heads():
    return Torch(q=T.Linear(12, 8)), Flax(q=Flax(kernel=zeros(12, 2, 4), bias=zeros(2, 4)))


def fused():
    return (
        Torch(q_proj=T.Linear(3, 4), k_proj=T.Linear(3, 4), v_proj=T.Linear(3, 4)),
        Flax(qkv=linear(3, 12)),
    )


def tied():
    embed, head = T.Embedding(5, 3), T.Linear(3, 5, bias=False)
    head.weight = embed.weight
    return Torch(embed=embed, head=head), Flax(embed=nnx.Embed(5, 3, rngs=rngs()))


def layers():
    cells = [nnx.SimpleCell(i, 4, rngs=rngs()) for i in (3, 4)]
    for cell in cells:
        cell.dense_h = linear(4, 4)
    return T.RNN(3, 4, num_layers=2), Flax(cells=nnx.List(cells))


def own_conv():
    return T.Conv2d(3, 4, (2, 5)), Flax(kernel=zeros(2, 5, 3, 4), bias=zeros(4))


class Vector(T.Module):
    """A Parameter of some shape, as a Snake's `alpha` is."""

    def __init__(self, *shape):
        super().__init__()
        self.alpha = T.Parameter(torch.randn(shape))


def broad():
    shapes = {"a": (1, 12, 1), "b": (12,), "c": (1, 6, 4), "d": (5, 1)}
    wants = {"a": (12,), "b": (1, 12, 1), "c": (6, 1, 4), "d": (1, 5, 1)}
    source = Torch(**{name: Vector(*shape) for name, shape in shapes.items()})
    return source, Flax(**{name: Flax(alpha=zeros(*want)) for name, want in wants.items()})


def normed():
    norm = T.utils.parametrizations.weight_norm
    parts = Flax(original0=zeros(1, 1, 6), original1=zeros(3, 4, 6))
    own = Flax(parametrizations=Flax(weight=parts), bias=zeros(6))
    return Torch(conv=norm(T.Conv1d(4, 6, 3))), Flax(conv=own)


PROPOSED = {
    broad: {f"{name}.alpha -> {name}.alpha" for name in "abcd"},
    normed: {
        f"conv.parametrizations.weight.{part} -> conv.parametrizations.weight.{part}"
        for part in ("original0", "original1")
    },
    names: {"enc -> encoder", "norm1 -> norm_1"},
    blocks: {
        "h.*.fc -> blocks.*.fc",
        "h.*.c_proj -> blocks.*.proj",
        "h.*.c_attn.weight -> blocks.*.{q,k,v}.kernel",
        "h.*.c_attn.bias -> blocks.*.{q,k,v}.bias",
    },
    attention: {"attn -> attention"},
    heads: {"q.weight -> q.kernel", "q.bias -> q.bias"},
    fused: {
        "{q_proj,k_proj,v_proj}.weight -> qkv.kernel",
        "{q_proj,k_proj,v_proj}.bias -> qkv.bias",
    },
    tied: {"head.weight -> embed.weight"},
    layers: {"*_l0 -> cells.0.*", "*_l1 -> cells.1.*"},
    own_conv: {"weight -> kernel"},
}


@pytest.mark.nightly(but=["tied"])
@pytest.mark.parametrize("build", PROPOSED)
def test_proposed_rules_solve_the_mapping(build):
    source, flax = build()
    before = flax_values(flax)
    rules = suggest(source, flax)
    assert {rule.names for rule in rules} == PROPOSED[build]
    with pytest.raises(ParityError) as caught:
        port(source, flax)
    told = caught.value.full.partition("you may mean:\n")[2]
    assert told.splitlines() == [f"  {rule}" for rule in rules]
    after = flax_values(flax)
    assert all(judge.exact(after[path], value).ok for path, value in before.items())
    port(source, flax, rules)
    assert suggest(source, flax, rules) == []
    want, back = read(source), build()[0]
    port(flax, back, rules)
    assert all(judge.exact(value, want[name]).ok for name, value in read(back).items())


def test_a_proposal_can_be_read_back_as_it_is_printed():
    (rule, *_), (source, flax) = suggest(*heads()), heads()
    assert str(rule) == 'Rule("q.weight -> q.kernel", "(h k) i -> i h k", h=2)'
    again = eval(str(rule), {"Rule": Rule})
    assert again == rule and plan(source, flax, [*suggest(source, flax, [again]), again])


@pytest.mark.nightly
def test_nothing_is_proposed_where_nothing_fits_or_nothing_is_missing():
    assert suggest(Torch(a=T.Linear(3, 5)), Flax(b=linear(7, 2))) == []
    with pytest.raises(ParityError) as caught:
        plan(Torch(a=T.Linear(3, 5)), Flax(b=linear(7, 2)))
    assert "you may mean" not in str(caught.value)
    cell = nnx.RNN(nnx.GRUCell(5, 7, rngs=rngs()))
    assert suggest(T.GRU(3, 4), cell) == []
    assert suggest(Torch(a=T.Linear(3, 5)), Flax(a=linear(3, 5))) == []


def test_of_two_fitting_names_the_more_similar_is_proposed():
    source = Torch(first=T.Linear(4, 4), second=T.Linear(4, 4))
    flax = Flax(second_layer=linear(4, 4), first_layer=linear(4, 4))
    found = {rule.names for rule in suggest(source, flax)}
    assert found == {"first -> first_layer", "second -> second_layer"}


def test_a_layer_of_a_sequential_is_no_layer_of_a_stack():
    layers = [
        (T.Linear(7, 5), linear(7, 5)),
        (T.LayerNorm(5), nnx.LayerNorm(5, rngs=rngs())),
        (T.Embedding(6, 5), nnx.Embed(6, 5, embedding_init=drawn, rngs=rngs())),
        (T.Conv2d(3, 5, (2, 4)), nnx.Conv(3, 5, (2, 4), kernel_init=drawn, rngs=rngs())),
        (T.BatchNorm1d(5), nnx.BatchNorm(5, rngs=rngs())),
    ]
    for theirs, mine in layers:
        pair = Torch(a=T.Sequential(T.SiLU(), theirs)), Flax(a=mine)
        assert [str(rule) for rule in suggest(*pair)] == ['Rule("a.1 -> a")']
        with pytest.raises(ParityError, match=r"a\.1\.weight .* a\.1\.\w+, which Flax does not"):
            plan(*pair)


@pytest.mark.parametrize("seed", range(12))
def test_proposals_exchange_no_layers_whose_sizes_agree(seed):
    draw = np.random.RandomState(seed)
    dim = draw.choice([6, 12])
    others = draw.choice(["mod", "film", "head", "pre", "skip"], 3, False)
    theirs = {"attn": Torch(qkv=T.Linear(dim, 3 * dim))}
    mine = {"attn": Flax(**{f"{name}_proj": linear(dim, dim) for name in "qkv"}, num_heads=3)}
    for at, name in enumerate(others[: draw.randint(1, 4)]):
        layer = T.Linear(dim + at, 3 * dim)  # as long a bias as that of qkv, and the first as wide
        theirs[name] = T.Sequential(T.SiLU(), layer) if draw.rand() < 0.6 else layer
        mine[f"{name}{draw.choice(['', '_fc'])}"] = linear(dim + at, 3 * dim)
    pair = Torch(**{name: theirs[name] for name in draw.permutation([*theirs])}), Flax(**mine)
    rules = suggest(*pair)
    for source, target in (rule.sides for rule in rules):
        assert source.split(".")[0] == target.split(".")[0].removesuffix("_fc")
    assert plan(*pair, [rule for rule in rules if "(h n k)" not in (rule.layout or "")])


@pytest.mark.nightly
def test_proposals_stay_few_and_quick():
    source = Torch(**{f"a_{chr(97 + i)}": T.Linear(2, 3) for i in range(20)})
    flax = Flax(**{f"b_{chr(97 + i)}": linear(2, 3) for i in range(20)})
    assert len(suggest(source, flax)) == 12
    many = Torch(h=T.ModuleList([T.Linear(2, 3) for _ in range(60)]))
    stack = Flax(blocks=nnx.List([linear(2, 3) for _ in range(60)]))
    assert [str(rule) for rule in suggest(many, stack)] == ['Rule("h.* -> blocks.*")']


def test_a_param_of_ones_own_is_transposed_only_if_it_is_called_kernel():
    for name, layout in (("kernel", "o i -> i o"), ("W", None)):
        source, flax = Torch(a=T.Linear(4, 4, bias=False)), Flax(b=Flax(**{name: zeros(4, 4)}))
        (rule,) = suggest(source, flax)
        assert rule == Rule(f"a.weight -> b.{name}", layout)


def test_axes_of_size_one_are_put_where_flax_has_them():
    layouts = [rule.layout for rule in suggest(*broad())]
    assert layouts == ["1 a 1 -> a", "a -> 1 a 1", "1 a b -> a 1 b", "a 1 -> 1 a 1"]
    with pytest.raises(ParityError) as caught:
        plan(*broad())
    assert "a.alpha [1, 12, 1] would fill a.alpha as [1, 12, 1], but it is [12]." in str(
        caught.value
    )
    assert suggest(Torch(a=Vector(1, 3, 1)), Flax(a=Flax(alpha=zeros(1, 4)))) == []


def test_what_a_weight_is_computed_from_goes_to_its_own_name_alone():
    source, flax = normed()[0], Flax(conv=Flax(g=zeros(1, 1, 6), v=zeros(3, 4, 6), bias=zeros(6)))
    assert suggest(source, flax) == []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
def test_pointwise_convolutions_become_linear_layers_with_their_own_biases(seed):
    """Names say nothing, and the sizes are such that a kernel left as it is would fit too."""
    draw = np.random.default_rng(seed)
    wide, narrow = (int(n) for n in draw.choice(np.arange(3, 9), 2, replace=False))
    ours, theirs = ([*draw.permutation(list(letters))] for letters in ("pqrs", "wxyz"))
    sizes = [(wide, narrow), (narrow, wide)]
    torch_module, flax_module = T.Module(), nnx.Module()
    for name, other, (inside, outside) in zip(theirs, ours, sizes, strict=False):
        setattr(torch_module, name, T.Conv2d(inside, outside, 1))
        setattr(flax_module, other, nnx.Linear(inside, outside, rngs=nnx.Rngs(0)))
    found = {str(rule) for rule in suggest(torch_module, flax_module)}
    for name, other in zip(theirs[:2], ours, strict=False):
        assert f'Rule("{name}.weight -> {other}.kernel", "o i 1 1 -> i o")' in found
        assert f'Rule("{name}.bias -> {other}.bias")' in found
    assert len(found) == 4
