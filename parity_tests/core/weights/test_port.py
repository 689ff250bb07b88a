"""`port`: bit for bit, both ways, strict, sharing nothing, and clear about what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import MultiHeadAttention, TransformerMultiHeadAttention
from flax_attn.parity import ParityError, Rule, judge, plan, port
from flax_attn.parity.port import flax_values
from flax_attn.parity.torch_module import read

torch = pytest.importorskip("torch", reason="port carries torch's weights")


def rngs():
    return nnx.Rngs(0)


class Torch(torch.nn.Module):
    """Holds parts by name."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Flax(nnx.Module):
    """Holds parts by name."""

    def __init__(self, **parts):
        for name, part in parts.items():
            setattr(self, name, part)


def linear(i, o, **kwargs):
    return nnx.Linear(i, o, rngs=rngs(), **kwargs)


def mha(**kwargs):
    return torch.nn.MultiheadAttention(12, 3, **kwargs)


PAIRS = {
    "linear": lambda: (torch.nn.Linear(3, 2), linear(3, 2), ()),
    "square": lambda: (torch.nn.Linear(3, 3), linear(3, 3), ()),
    "embedding": lambda: (torch.nn.Embedding(5, 3), nnx.Embed(5, 3, rngs=rngs()), ()),
    "layer norm": lambda: (torch.nn.LayerNorm(5), nnx.LayerNorm(5, rngs=rngs()), ()),
    "rms norm": lambda: (torch.nn.RMSNorm(5), nnx.RMSNorm(5, rngs=rngs()), ()),
    "packed attention": lambda: (mha(), TransformerMultiHeadAttention(12, 3, rngs=rngs()), ()),
    "separate attention": lambda: (
        mha(kdim=7, vdim=10),
        TransformerMultiHeadAttention(12, 3, kdim=7, vdim=10, rngs=rngs()),
        (),
    ),
    "parameter": lambda: (
        Torch(W=torch.nn.Parameter(torch.randn(3, 2))),
        Flax(W=nnx.Param(jnp.zeros((3, 2)))),
        (),
    ),
    "three into one": lambda: (
        Torch(q=torch.nn.Linear(5, 4), k=torch.nn.Linear(5, 4), v=torch.nn.Linear(5, 4)),
        Flax(qkv=linear(5, 12)),
        (
            Rule("{q,k,v}.weight -> qkv.kernel", "n o i -> i (n o)"),
            Rule("{q,k,v}.bias -> qkv.bias", "n o -> (n o)"),
        ),
    ),
    "one into three, by heads": lambda: (
        Torch(c_attn=torch.nn.Parameter(torch.randn(6, 3 * 4 * 5))),
        Flax(**{n: Flax(kernel=nnx.Param(jnp.zeros((6, 4, 5)))) for n in "qkv"}),
        (Rule("c_attn -> {q,k,v}.kernel", "d (n h k) -> n d h k", h=4),),
    ),
    "a list with stars": lambda: (
        Torch(h=torch.nn.ModuleList([torch.nn.Linear(3, 2) for _ in range(2)])),
        Flax(blocks=nnx.List([Flax(fc=linear(3, 2)) for _ in range(2)])),
        (Rule("h.* -> blocks.*.fc"),),
    ),
    "bfloat16": lambda: (
        torch.nn.Linear(3, 2).bfloat16(),
        linear(3, 2, param_dtype=jnp.bfloat16),
        (),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", PAIRS)
def test_porting_to_flax_and_back_is_bit_exact(name):
    source, flax, rules = PAIRS[name]()
    want = read(source)
    assert port(source, flax, rules) is flax
    back, _, _ = PAIRS[name]()
    assert port(flax, back, rules) is back
    got = read(back)
    assert set(got) == set(want) and want
    for key, value in want.items():
        assert judge.exact(got[key], value).ok, key


def test_a_square_weight_is_transposed():
    source, flax, _ = PAIRS["square"]()
    port(source, flax)
    weight = source.weight.detach().numpy()
    assert judge.exact(np.asarray(flax.kernel[...]), weight.T.copy()).ok


def test_float64_weights_are_not_rounded_where_x64_is_off():
    source = torch.nn.Linear(3, 2).double()
    with jax.enable_x64(True):
        flax = nnx.Linear(3, 2, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    with jax.enable_x64(False):
        port(source, flax)
    assert judge.exact(np.asarray(flax.kernel[...]), source.weight.detach().numpy().T.copy()).ok


def test_packed_projections_are_query_key_value():
    source, flax, _ = PAIRS["packed attention"]()
    port(source, flax)
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        part = source.in_proj_weight.detach().numpy()[12 * i : 12 * (i + 1)]
        assert judge.exact(np.asarray(getattr(flax, name).kernel[...]), part.T.copy()).ok


@pytest.mark.nightly
def test_ported_weights_share_no_memory_with_torch():
    """Neither what was written nor what was read: torch's tensors change in place."""

    def shift():
        with torch.no_grad():
            for tensor in source.parameters():
                tensor.add_(1.0)

    for name in ("linear", "embedding", "packed attention", "parameter"):
        source, flax, _ = PAIRS[name]()
        port(source, flax)
        unchanged(flax_values, flax, shift)
        port(flax, source)
        unchanged(flax_values, flax, shift)


def refusal(source, flax, *rules):
    """The sentence, the same in both directions, after checking that nothing changed."""
    with pytest.raises(ParityError) as back:
        unchanged(read, source, lambda: port(flax, source, rules))
    with pytest.raises(ParityError) as caught:
        unchanged(flax_values, flax, lambda: port(source, flax, rules))
    assert str(back.value) == str(caught.value)
    return str(caught.value)


def unchanged(look, module, act):
    """Does `act`, and checks afterwards that the module holds what it held."""
    before = look(module)
    assert before
    try:
        act()
    finally:
        after = look(module)
        assert set(after) == set(before)
        for name, value in before.items():
            assert judge.exact(after[name], value).ok, name


def test_what_is_missing_and_left_over_is_named_at_once():
    source = Torch(a=torch.nn.Linear(3, 2), extra=torch.nn.Linear(5, 4, bias=False))
    text = refusal(source, Flax(a=linear(3, 2), other=linear(7, 6, use_bias=False)))
    assert "extra.weight [4, 5] goes to extra.kernel, which Flax does not have" in text
    assert "other.kernel [7, 6] is filled by nothing" in text


def test_a_shape_mismatch_names_both_shapes():
    text = refusal(torch.nn.Linear(3, 2, bias=False), linear(3, 4, use_bias=False))
    assert "weight [2, 3] would fill kernel as [3, 2], but it is [3, 4]" in text


def test_an_unknown_layer_type_needs_a_rule():
    held = Flax(a=Flax(kernel=nnx.Param(jnp.zeros((3, 2)))))
    assert "say Rule(" in refusal(Torch(a=torch.nn.Linear(3, 2, bias=False)), held)


def test_rules_that_do_not_fit():
    source, flax = torch.nn.Linear(3, 2, bias=False), linear(3, 2, use_bias=False)
    assert "matches no tensor" in refusal(source, flax, Rule("nothing -> kernel"))
    assert "does not fit" in refusal(
        source, flax, Rule("weight -> kernel", "(a b) i -> i a b", a=5)
    )
    assert "names 1 axes" in refusal(source, flax, Rule("weight -> kernel", "a -> a"))
    for bad in ("weight", "a -> b -> c", "{a,b}{c,d} -> x"):
        with pytest.raises(ParityError, match=r"rule|Rule|One"):
            Rule(bad, "a -> a")
    with pytest.raises(ParityError, match="needs a layout"):
        Rule("{a,b} -> c")


def tied():
    embed = torch.nn.Embedding(5, 3)
    head = torch.nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    return Torch(embed=embed, head=head)


def test_ties_must_agree():
    apart = Flax(embed=nnx.Embed(5, 3, rngs=rngs()), head=linear(3, 5, use_bias=False))
    assert "is tied in torch" in refusal(tied(), apart)
    alone = Flax(embed=nnx.Embed(5, 3, rngs=rngs()))
    assert "head.kernel, which Flax does not have" in refusal(tied(), alone)
    port(tied(), alone, [Rule.tied("head.weight -> embed.weight")])
    untied = Torch(embed=torch.nn.Embedding(5, 3), head=torch.nn.Linear(3, 5, bias=False))
    text = refusal(untied, alone, Rule.tied("head.weight -> embed.weight"))
    assert "not one tensor in torch" in text


def test_ties_on_both_sides_are_carried_once():
    one = linear(3, 3)
    flax, first = Flax(a=one, b=one), torch.nn.Linear(3, 3)
    found = plan(Torch(a=first, b=first), flax)
    assert found.tied == ("b.weight", "b.bias") and len(found.moves) == 2
    port(Torch(a=first, b=first), flax)
    apart = Torch(a=torch.nn.Linear(3, 3), b=torch.nn.Linear(3, 3))
    assert "is filled twice" in refusal(apart, flax)


def test_skip_leaves_out_and_says_so():
    source = Torch(a=torch.nn.Linear(3, 2), extra=torch.nn.Linear(5, 4))
    found = plan(source, Flax(a=linear(3, 2)), [Rule.skip("extra")])
    assert set(found.skipped) == {"extra.weight", "extra.bias"}
    assert "extra.weight: skipped by rule" in str(found)


@pytest.mark.nightly
def test_a_registered_mask_is_a_constant():
    from torch_ref.multi_head import MultiHeadAttention as Twin

    found = plan(Twin(3, 2, 6, 0.0, 2), MultiHeadAttention(3, 2, 6, 0.0, 2, rngs=rngs()))
    assert found.constants == ("mask",)


def test_a_cast_that_rounds_values_is_refused():
    wide, narrow = torch.nn.Linear(3, 2).double(), linear(3, 2)
    with pytest.raises(ParityError, match=r"float64 into float32.*") as caught:
        unchanged(flax_values, narrow, lambda: port(wide, narrow))
    assert "kernel" in str(caught.value) and "param_dtype" in str(caught.value)
    for half in (torch.nn.Linear(3, 2).bfloat16(), torch.nn.Linear(3, 2).half()):
        with pytest.raises(ParityError, match=r"weight: float32 into b?float16"):
            unchanged(read, half, lambda half=half: port(narrow, half))
        port(half, narrow)  # every bfloat16 and every float16 is a float32
        assert judge.exact(read(half)["bias"].astype(np.float32), np.asarray(narrow.bias[...])).ok
    with pytest.raises(ParityError, match="float16 into bfloat16"):
        port(torch.nn.Linear(3, 2).half(), linear(3, 2, param_dtype=jnp.bfloat16))
    port(narrow, wide)  # and every float32 a float64


def test_two_of_a_kind_are_refused():
    with pytest.raises(TypeError, match=r"one torch\.nn\.Module and one flax\.nnx\.Module"):
        port(torch.nn.Linear(3, 2), torch.nn.Linear(3, 2))
    with pytest.raises(TypeError, match="got Linear and Linear"):
        port(linear(3, 2), linear(3, 2))
