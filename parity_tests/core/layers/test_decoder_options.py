"""What layers of modern decoders may not be given, and how the indexer chooses among equals."""

import numpy as np
import pytest
from flax import nnx

from flax_attn import (
    CrossLayerAttention,
    DifferentialAttention,
    GatedQueryAttention,
    IndexedSparseAttention,
    LatentAttention,
    RMSNorm,
    Rotary,
    SharedKeyValueAttention,
    Window,
)
from flax_attn.parity import judge
from parity_tests.core.backends.refusal import refused

X = np.random.RandomState(0).standard_normal((2, 7, 11)).astype(np.float32)
LATENT = {
    **{"in_features": 11, "num_heads": 3, "kv_rank": 8},
    **{"nope_dim": 6, "rotary_dim": 4, "value_dim": 5},
}
INDEX = {"index_heads": 16, "index_dim": 9, "top_k": 2}


def grouped(cls, **given):
    return cls(11, 6, 2, 4, **{"rngs": nnx.Rngs(0), **given})


def sparse(**given):
    return IndexedSparseAttention(**{**LATENT, **INDEX, "rngs": nnx.Rngs(0), **given})


WRONG = {
    "gate": (GatedQueryAttention, {"gate": "row"}, "gate must be one of 'head', 'full'"),
    "activation": (GatedQueryAttention, {"activation": "tanh"}, "activation must be one of"),
    "fused": (GatedQueryAttention, {"gate": "head", "fused": True}, "got gate='head'"),
    "norms": (
        CrossLayerAttention,
        {"k_norm": RMSNorm(4, eps=1e-6)},
        "leave k_norm out",
    ),
    "depth": (DifferentialAttention, {"depth": -1}, "depth must be a whole number of at least 0"),
}


@pytest.mark.nightly(but=["depth", "fused", "norms"])
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name):
    cls, given, words = WRONG[name]
    with refused(ValueError, words):
        grouped(cls, **given)


def test_an_odd_count_of_heads_has_no_pairs():
    with refused(ValueError, "num_kv_heads must be even", "num_kv_heads=3"):
        DifferentialAttention(11, 6, 3, 4, 1, rngs=nnx.Rngs(0))


@pytest.mark.nightly
def test_keys_and_values_come_from_one_place():
    first, later = grouped(SharedKeyValueAttention), grouped(CrossLayerAttention)
    k, v = first.keys_and_values_of(X)
    with refused(TypeError, "keys_and_values"):
        later(X)
    with refused(TypeError, "keys_and_values"):
        first(X, keys_and_values=(k, v))
    with refused(ValueError, "two of *B T K H = (2, 7, 2, 4); got (2, 7, 2, 4), (2, 6, 2, 4)."):
        later(X, keys_and_values=(k, v[:, :6]))
    with refused(TypeError, "keys_and_values must be floating; got int32"):
        later(X, keys_and_values=(k, v.astype(np.int32)))


OLD = r"^SharedKeyValueAttention\(across_layers=True\) is now called CrossLayerAttention"


@pytest.mark.nightly
def test_the_old_argument_makes_the_new_layer_and_says_so():
    with pytest.warns(DeprecationWarning, match=OLD) as caught:
        before = SharedKeyValueAttention(11, 6, 2, 4, across_layers=True, rngs=nnx.Rngs(0))
    assert caught[0].filename == __file__
    after = grouped(CrossLayerAttention)
    assert nnx.graphdef(before) == nnx.graphdef(after)
    pair = grouped(SharedKeyValueAttention).keys_and_values_of(X)
    assert judge.exact(before(X, keys_and_values=pair), after(X, keys_and_values=pair)).ok
    with pytest.warns(DeprecationWarning, match=OLD):
        first = grouped(SharedKeyValueAttention, across_layers=False, own_values=True)
    assert type(first) is SharedKeyValueAttention and "across_layers" not in vars(first)


def test_the_old_argument_still_refuses_values_of_its_own():
    for own in ({"own_values": True}, {"v_norm": RMSNorm(4, eps=1e-6)}):
        with pytest.warns(DeprecationWarning, match=OLD):
            with refused(ValueError, "leave v_norm and own_values=True out"):
                grouped(SharedKeyValueAttention, across_layers=True, **own)


def test_the_indexer_refuses_what_its_rotary_cannot_turn():
    with refused(ValueError, "index_dim must be at least rotary_dim", "index_dim=2, rotary_dim=4"):
        sparse(index_dim=2, index_rotary=Rotary())
    with refused(ValueError, "top_k must be a whole number of at least 1; got 0."):
        sparse(top_k=0)


@pytest.mark.nightly
def test_of_equal_scores_the_earlier_keys_are_taken():
    layer = sparse()
    layer.indexer.weights_proj.kernel[...] *= 0  # so that all scores are equal
    plain = LatentAttention(**LATENT, rngs=nnx.Rngs(0))  # its weights are drawn first
    earlier = np.tri(7, dtype=bool) & (np.arange(7) < 2)
    call = nnx.jit(lambda layer, x, mask: layer(x, mask=mask))
    found = call(layer, X, None)
    assert judge.allclose(found, call(plain, X, earlier))
    assert not judge.allclose(found, call(plain, X, None))


@pytest.mark.nightly
def test_as_many_keys_as_there_are_is_latent_attention():
    layer, plain = sparse(top_k=9), LatentAttention(**LATENT, rngs=nnx.Rngs(0))
    assert judge.allclose(layer(X, mask=Window(2, 1)), plain(X, mask=Window(2, 1)))
