"""Mistakes of people who come from elsewhere: the error says what works, and that does work."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_attn as fa
from flax_attn import weights
from flax_attn._internal.known_elsewhere import NAMES
from flax_attn.parity import compare, port

NAME = re.compile(r"(?:flax_attn\.)?[A-Za-z_]\w*(?:\.[a-z_]+)*")


@pytest.mark.parametrize("other", NAMES)
def test_suggested_replacements_exist(other):
    with pytest.raises(AttributeError, match="; take "):
        getattr(fa, other)
    place = fa
    for part in NAME.match(NAMES[other])[0].removeprefix("flax_attn.").split("."):
        place = getattr(place, part)


@pytest.mark.parametrize("other", ["MultiheadAttention", "scaled_dot_product_attention", "RoPE"])
def test_other_spellings_of_known_names_are_recognised(other):
    with pytest.raises(AttributeError, match="; take "):
        getattr(fa, other)


def test_unknown_names_get_no_suggestion():
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing_like_it'$"):
        fa.nothing_like_it  # noqa: B018
    with pytest.raises(AttributeError, match=r"did you mean CAUSAL\?"):
        fa.CAUSSAL  # noqa: B018
    assert not hasattr(fa, "__wrapped__")


LAYERS = {
    "grouped": (fa.GroupedQueryAttention, (12, 6, 3, 4)),
    "rotated": (fa.GroupedQueryAttention, (12, 6, 3, 4)),
    "latent": (fa.LatentAttention, (12, 3, 5, 6, 4, 7)),
    "t5": (fa.T5Attention, (12, 3, 5)),
}


@pytest.mark.nightly(but=["valid-rows1-t5"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("rows", [3, (), (2, 1)])
@pytest.mark.parametrize("more", ["", "valid", "positions"])
def test_a_cache_of_another_batch_is_named_as_the_problem(name, rows, more):
    kind, sizes = LAYERS[name]
    options = {"rotary": fa.Rotary()} if name == "rotated" else {}
    options |= {"bidirectional": False, "mask": fa.CAUSAL} if name == "t5" else {}
    layer, x = kind(*sizes, **options, rngs=nnx.Rngs(0)), jnp.ones((2, 5, 12))
    call = {"valid": jnp.ones((2, 5), bool)} if more == "valid" else {}
    call = {"positions": jnp.arange(5)} if more == "positions" else call
    with pytest.raises(ValueError, match=r"The cache is for a batch of .*init_cache\(2, length\)"):
        layer(x, cache=layer.init_cache(rows, 8), **call)


def test_swapped_sides_are_named_as_the_problem():
    torch = pytest.importorskip("torch", reason="compare needs it")
    theirs, mine = torch.nn.Linear(3, 2), nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="The torch module comes first: swap them"):
        compare(mine, theirs, np.ones((4, 3)))
    with pytest.raises(TypeError, match=r"a state_dict, .* is loaded by flax_attn.weights.load"):
        port(theirs.state_dict(), mine)


def state_dict(layers):
    shapes = {"q_proj": (24, 12), "k_proj": (12, 12), "v_proj": (12, 12), "o_proj": (12, 24)}
    attention = {f"self_attn.{name}.weight": np.ones(x, np.float32) for name, x in shapes.items()}
    layer = {**attention, "mlp.up_proj.weight": np.ones((30, 12), np.float32)}
    whole = {f"model.layers.{i}.{name}": x for i in range(layers) for name, x in layer.items()}
    return {"model.embed_tokens.weight": np.ones((7, 12), np.float32), **whole}


@pytest.mark.parametrize(("layers", "more"), [(1, ""), (3, " (2 more prefixes fit)")])
def test_a_forgotten_prefix_is_named(layers, more):
    layer = fa.GroupedQueryAttention(12, 6, 3, 4, rngs=nnx.Rngs(0))
    arrays = state_dict(layers)
    with pytest.raises(weights.CheckpointError) as error:
        weights.load(layer, arrays)
    prefix = "model.layers.0.self_attn"
    assert str(error.value).endswith(f"Pass prefix={prefix!r}{more}.")
    weights.load(layer, arrays, prefix=prefix)
    assert (layer.q_proj.kernel[...] == 1).all()
