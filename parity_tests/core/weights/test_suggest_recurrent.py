"""`suggest` of a GRU, LSTM or RNN for a user's module: gates in torch's order."""

import pytest
from flax import nnx

from flax_attn.parity import ParityError, Rule, judge, plan, port, suggest
from flax_attn.parity.port import flax_values
from flax_attn.parity.torch_module import read

from .test_mapping import Flax, Torch, linear, zeros

torch = pytest.importorskip("torch", reason="weights are carried from torch")
T = torch.nn
H = 4
GRU, LSTM = ("r", "z", "n"), ("i", "f", "g", "o")


def layers(names, sizes=(3, H), **options):
    """A module with a Linear of each name for the input, and for the hidden state."""
    parts = ({name: linear(size, H, **options) for name in names} for size in sizes)
    return dict(zip("xh", (Flax(**each) for each in parts), strict=True))


def rules(owner, x, h, weight="(n o) i -> n i o", bias="(n o) -> n o"):
    """The rules of all four tensors onto Linears."""
    return [
        f'Rule("{owner}.{kind}_{of}_l0 -> {owner}.{to}.{leaf}", "{layout}")'
        for kind, leaf, layout in (("weight", "kernel", weight), ("bias", "bias", bias))
        for of, to in (("ih", x), ("hh", h))
    ]


def printed(source, flax, given=()):
    return [str(rule) for rule in suggest(source, flax, given)]


NAMES = {
    "GRU": [
        ("r", "z", "n"),
        ("reset", "update", "new"),
        ("reset_gate", "update_gate", "candidate"),
        ("W_r", "W_z", "W_n"),
        ("Wr", "Wu", "Wc"),
    ],
    "LSTM": [
        ("i", "f", "g", "o"),
        ("input", "forget", "cell", "output"),
        ("in_gate", "forget_gate", "candidate", "out_gate"),
        ("W_i", "W_f", "W_c", "W_o"),
        ("gate_i", "gate_f", "gate_g", "gate_o"),
    ],
}


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "names"), [(kind, n) for kind in NAMES for n in NAMES[kind]])
@pytest.mark.parametrize("sizes", [(3, H), (H, H)])
def test_gates_stand_in_torchs_order_and_biases_beside_their_weights(kind, names, sizes):
    source = Torch(net=getattr(T, kind)(sizes[0], H))
    listing = "{" + ",".join(names) + "}"
    want = rules("net", f"x.{listing}", f"h.{listing}")
    for order in (names, names[::-1], sorted(names)):
        assert printed(source, Flax(net=Flax(**layers(order, sizes)))) == want


@pytest.mark.nightly
@pytest.mark.parametrize("kind", NAMES)
def test_each_gate_gets_its_own_rows(kind):
    names = {"GRU": GRU, "LSTM": LSTM}[kind]
    source, flax = (
        Torch(net=getattr(T, kind)(H, H)),
        Flax(net=Flax(**layers(sorted(names), (H, H)))),
    )
    found = suggest(source, flax)
    port(source, flax, found)
    values, theirs = flax_values(flax), read(source)
    for side, of in (("x", "ih"), ("h", "hh")):
        for i, name in enumerate(names):
            rows = slice(i * H, (i + 1) * H)
            weight, bias = (theirs[f"net.{role}_{of}_l0"][rows] for role in ("weight", "bias"))
            assert judge.exact(values[f"net.{side}.{name}.kernel"], weight.T).ok
            assert judge.exact(values[f"net.{side}.{name}.bias"], bias).ok
    back = Torch(net=getattr(T, kind)(H, H))
    port(flax, back, found)
    assert all(judge.exact(value, theirs[name]).ok for name, value in read(back).items())


SIDES = ["xh", ("input", "hidden"), ("in", "state"), ("i2h", "h2h"), ("Wx", "Wh"), ("W", "U")]
FLAT = {
    "GRU": ("{}_reset", "{}_update", "{}_new"),
    "LSTM": ("{}_input", "{}_forget", "{}_cell", "{}_output"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FLAT)
@pytest.mark.parametrize("sides", SIDES)
def test_gates_of_both_sides_may_lie_beside_each_other(kind, sides):
    names = [[name.format(side) for name in FLAT[kind]] for side in sides]
    flat = {name: linear(H, H) for each in names[::-1] for name in each[::-1]}
    ours = ["{" + ",".join(each) + "}" for each in names]
    assert printed(Torch(net=getattr(T, kind)(H, H)), Flax(net=Flax(**flat))) == rules("net", *ours)


def test_params_of_ones_own_are_told_by_letters_and_then_by_their_order():
    torchs = {
        f"{p}_{s}{g}": zeros(*[H] * r)
        for p, r in (("W", 2), ("b", 1))
        for s in "hi"
        for g in "figo"
    }
    found = printed(Torch(net=T.LSTM(H, H)), Flax(net=Flax(**torchs)))
    assert [name.partition('"')[2].partition('"')[0] for name in found] == [
        "net.weight_ih_l0 -> net.{W_ii,W_if,W_ig,W_io}",
        "net.weight_hh_l0 -> net.{W_hi,W_hf,W_hg,W_ho}",
        "net.bias_ih_l0 -> net.{b_ii,b_if,b_ig,b_io}",
        "net.bias_hh_l0 -> net.{b_hi,b_hf,b_hg,b_ho}",
    ]
    short = {f"W{s}{g}": zeros(H, H) for s in "hx" for g in "nrz"}
    found = [
        rule.names for rule in suggest(Torch(net=T.GRU(H, H, bias=False)), Flax(net=Flax(**short)))
    ]
    assert found == [
        "net.weight_ih_l0 -> net.{Wxr,Wxz,Wxn}",
        "net.weight_hh_l0 -> net.{Whr,Whz,Whn}",
    ]
    book = {
        f"{p}_{g}": zeros(*[H] * r)
        for p, r in (("U", 2), ("W", 2), ("c", 1), ("b", 1))
        for g in GRU
    }
    found = [rule.names for rule in suggest(Torch(net=T.GRU(H, H)), Flax(net=Flax(**book)))]
    assert found == [
        "net.weight_ih_l0 -> net.{W_r,W_z,W_n}",
        "net.weight_hh_l0 -> net.{U_r,U_z,U_n}",
        "net.bias_ih_l0 -> net.{c_r,c_z,c_n}",
        "net.bias_hh_l0 -> net.{b_r,b_z,b_n}",
    ]


def test_gates_that_hold_both_sides():
    gates = {
        name: Flax(x=linear(H, H), h=linear(H, H)) for name in ("update", "candidate", "reset")
    }
    want = rules("net", "{reset,update,candidate}.x", "{reset,update,candidate}.h")
    assert printed(Torch(net=T.GRU(H, H)), Flax(net=Flax(**gates))) == want


@pytest.mark.nightly
def test_where_no_name_tells_the_order_is_that_of_the_definition_and_is_told():
    source, flax = Torch(net=T.LSTM(3, H)), Flax(net=Flax(**layers(("p", "k", "b", "a"))))
    assert printed(source, flax) == rules("net", "x.{p,k,b,a}", "h.{p,k,b,a}")
    with pytest.raises(ParityError) as caught:
        plan(source, flax)
    last = caught.value.full.splitlines()[-1]
    assert "net.x.{p,k,b,a}.kernel and net.h.{p,k,b,a}.kernel" in last
    assert "no name tells which gate is which: the rows of torch's LSTM are i, f, g, o" in last
    assert "in the order in which they are defined" in last
    with pytest.raises(ParityError) as caught:
        plan(source, Flax(net=Flax(**layers(LSTM))))
    assert "no name tells" not in str(caught.value)


def test_gates_that_are_told_twice_or_not_all_are_not_told():
    for names in (("r", "z", "reset"), ("r", "z", "a")):
        flax = Flax(net=Flax(**layers(names)))
        assert (
            printed(Torch(net=T.GRU(3, H)), flax)[0]
            == rules("net", f"x.{{{','.join(names)}}}", "")[0]
        )
        with pytest.raises(
            ParityError,
            match="no name tells which gate is which: the rows of torch's GRU are r, z, n",
        ):
            plan(Torch(net=T.GRU(3, H)), flax)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
@pytest.mark.parametrize("sides", ["xh", ("inputs", "hidden"), ("ih", "hh"), ("W", "U")])
def test_all_gates_in_one_linear(kind, sides):
    outs = H * {"GRU": 3, "LSTM": 4, "RNN": 1}[kind]
    flax = Flax(net=Flax(**{side: linear(H, outs) for side in sides[::-1]}))
    want = rules("net", *sides, weight="o i -> i o", bias="")
    want[2:] = [rule.replace(', ""', "") for rule in want[2:]]
    assert printed(Torch(net=getattr(T, kind)(H, H)), flax) == want


def test_a_bias_that_flax_has_not_is_not_put_on_the_other_side():
    parts = layers(GRU, (H, H)) | {"x": layers(GRU, (H, H), use_bias=False)["x"]}
    x, h = "x.{r,z,n}", "h.{r,z,n}"
    want = rules("net", x, h)
    assert printed(Torch(net=T.GRU(H, H)), Flax(net=Flax(**parts))) == [*want[:2], want[3]]
    nameless = {"a": parts["x"], "b": parts["h"]}
    want = rules("net", "a.{r,z,n}", "b.{r,z,n}")
    assert printed(Torch(net=T.GRU(H, H)), Flax(net=Flax(**nameless))) == [*want[:2], want[3]]


@pytest.mark.nightly
def test_layers_follow_each_other_and_networks_their_names():
    cells = nnx.List([Flax(**layers(GRU, (size, H))) for size in (3, H)])
    found = [
        rule.names for rule in suggest(Torch(net=T.GRU(3, H, num_layers=2)), Flax(cells=cells))
    ]
    assert found == [
        f"net.{kind}_{of}_l{i} -> cells.{i}.{to}.{{r,z,n}}.{leaf}"
        for i in (0, 1)
        for kind, leaf in (("weight", "kernel"), ("bias", "bias"))
        for of, to in (("ih", "x"), ("hh", "h"))
    ]
    source = Torch(dec=T.GRU(H, H, bias=False), enc=T.GRU(H, H, bias=False))
    ours = {name: Flax(**layers(GRU, (H, H), use_bias=False)) for name in ("encoder", "decoder")}
    found = {rule.names for rule in suggest(source, Flax(**ours))}
    assert found == {
        f"{torchs}.weight_{of}_l0 -> {ours}.{to}.{{r,z,n}}.kernel"
        for torchs, ours in (("dec", "decoder"), ("enc", "encoder"))
        for of, to in (("ih", "x"), ("hh", "h"))
    }


def test_layers_of_one_list_are_one_rule_and_a_cell_is_as_a_network():
    source = Torch(h=T.ModuleList([T.GRUCell(3, H) for _ in range(2)]))
    flax = Flax(blocks=nnx.List([Flax(**layers(sorted(GRU))) for _ in range(2)]))
    found = [rule.names for rule in suggest(source, flax)]
    assert found == [
        f"h.*.{kind}_{of} -> blocks.*.{to}.{{r,z,n}}.{leaf}"
        for kind, leaf in (("weight", "kernel"), ("bias", "bias"))
        for of, to in (("ih", "x"), ("hh", "h"))
    ]


def test_what_the_porter_has_said_is_followed():
    source, flax = Torch(net=T.GRU(H, H)), Flax(net=Flax(**layers(GRU, (H, H))))
    said = Rule("net.weight_ih_l0 -> net.h.{r,z,n}.kernel", "(n o) i -> n i o")
    other = Rule("net.weight_hh_l0 -> net.x.{r,z,n}.kernel", "(n o) i -> n i o")
    want = rules("net", "h.{r,z,n}", "x.{r,z,n}")
    assert printed(source, flax, [said, other]) == want[2:]


def test_a_word_before_the_side_may_say_the_gate():
    flat = {f"{gate}_{side}": linear(H, H) for side in ("h", "in") for gate in "nrz"}
    want = rules("net", "{r_in,z_in,n_in}", "{r_h,z_h,n_h}")
    assert printed(Torch(net=T.GRU(H, H)), Flax(net=Flax(**flat))) == want


def test_names_above_both_sides_say_neither():
    parts = dict(zip("ab", layers(GRU, (H, H)).values(), strict=True))
    want = [r.replace("-> net", "-> hidden") for r in rules("net", "a.{r,z,n}", "b.{r,z,n}")]
    assert printed(Torch(net=T.GRU(H, H)), Flax(hidden=Flax(**parts))) == want


def test_gates_are_no_heads():
    flax = Flax(net=Flax(**layers(GRU)), num_heads=2)
    assert printed(Torch(net=T.GRU(3, H)), flax) == rules("net", "x.{r,z,n}", "h.{r,z,n}")


def test_gates_that_are_named_come_before_what_only_fits():
    others = Flax(**{name: linear(H, H, use_bias=False) for name in "abc"})
    flax = Flax(net=Flax(early=others, **layers(GRU, (H, H))))
    assert printed(Torch(net=T.GRU(H, H)), flax) == rules("net", "x.{r,z,n}", "h.{r,z,n}")


def test_no_bias_goes_to_the_other_side_or_to_a_matrix():
    params = {f"W{s}{g}": zeros(H, H) for s in "xh" for g in GRU} | {
        f"bh{g}": zeros(H) for g in GRU
    }
    found = [rule.names for rule in suggest(Torch(net=T.GRU(H, H)), Flax(net=Flax(**params)))]
    assert found == [
        "net.weight_ih_l0 -> net.{Wxr,Wxz,Wxn}",
        "net.weight_hh_l0 -> net.{Whr,Whz,Whn}",
        "net.bias_hh_l0 -> net.{bhr,bhz,bhn}",
    ]
    flax = Flax(net=Flax(x=zeros(3, 12), h=zeros(12, 12), table=zeros(3, H)))
    found = [rule.names for rule in suggest(Torch(net=T.RNN(3, 12)), flax)]
    assert found == ["net.weight_ih_l0 -> net.x", "net.weight_hh_l0 -> net.h"]


SAID = {
    "GRU": (
        "weight_ih_l0 and weight_hh_l0, whose rows are the gates r, z, n in this order",
        'as Rule("net.weight_ih_l0 -> path.{r,z,n}.kernel", "(n o) i -> n i o")',
        'their biases with "(n o) -> n o".',
    ),
    "LSTM": (
        "weight_ih_l0 and weight_hh_l0, whose rows are the gates i, f, g, o in this order",
        'as Rule("net.weight_ih_l0 -> path.{i,f,g,o}.kernel", "(n o) i -> n i o")',
        'their biases with "(n o) -> n o".',
    ),
    "RNN": (
        "weight_ih_l0 and weight_hh_l0, as",
        'Rule("net.weight_ih_l0 -> path.kernel", "o i -> i o")',
        "their biases with no layout.",
    ),
}
CELLS = {"GRU": nnx.GRUCell, "LSTM": nnx.OptimizedLSTMCell, "RNN": nnx.SimpleCell}


@pytest.mark.nightly(but=["RNN"])
@pytest.mark.parametrize("kind", SAID)
def test_where_flax_has_no_cell_the_sentence_says_a_rule_for_each_weight(kind):
    source = Torch(net=getattr(T, kind)(3, H))
    cells = 'say Rule("net.*_l0 -> path.of.the.cell.*")'
    with pytest.raises(ParityError) as caught:
        plan(source, Flax(net=Flax(x=linear(3, 7))))
    text = str(caught.value)
    assert all(part in text for part in SAID[kind]) and cells not in text
    assert f"net is a torch {kind}, and Flax has no nnx.{CELLS[kind].__name__} for it" in text
    with pytest.raises(ParityError) as caught:
        plan(source, Flax(run=nnx.RNN(CELLS[kind](3, H, rngs=nnx.Rngs(0)))))
    assert cells in str(caught.value) and "for it: say a Rule" not in str(caught.value)
