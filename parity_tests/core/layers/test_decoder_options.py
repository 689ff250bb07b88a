"""Layers of modern decoders: shared keys and values, the indexer, and the absorbed form."""

import numpy as np
import pytest
from flax import nnx

from flax_attn import (
    CrossLayerAttention,
    IndexedSparseAttention,
    LatentAttention,
    SharedKeyValueAttention,
    Window,
)
from flax_attn.layers import _self_attention
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


@pytest.mark.nightly
def test_keys_and_values_are_checked_by_both_layers_that_share_them():
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


@pytest.mark.nightly
def test_the_indexer_takes_the_earlier_of_keys_with_equal_scores():
    layer = sparse()
    layer.indexer.weights_proj.kernel[...] *= 0  # so that all scores are equal
    plain = LatentAttention(**LATENT, rngs=nnx.Rngs(0))  # its weights are drawn first
    earlier = np.tri(7, dtype=bool) & (np.arange(7) < 2)
    call = nnx.jit(lambda layer, x, mask: layer(x, mask=mask))
    found = call(layer, X, None)
    assert judge.allclose(found, call(plain, X, earlier))
    assert not judge.allclose(found, call(plain, X, None))


@pytest.mark.nightly
def test_indexed_attention_over_all_keys_equals_latent_attention():
    layer, plain = sparse(top_k=9), LatentAttention(**LATENT, rngs=nnx.Rngs(0))
    assert judge.allclose(layer(X, mask=Window(2, 1)), plain(X, mask=Window(2, 1)))


@pytest.mark.parametrize("absorbed", [False, True])
def test_absorbed_latent_attention_has_one_key_per_token(absorbed, monkeypatch):
    shapes = []

    def spy(request, *how):
        arrays = request.q, request.k, request.v
        shapes.append((*(x.shape for x in arrays), request.rules.scale))
        return dispatch(request, *how)

    dispatch = _self_attention.dispatch
    monkeypatch.setattr(_self_attention, "dispatch", spy)
    nnx.eval_shape(lambda: LatentAttention(**LATENT, absorbed=absorbed, rngs=nnx.Rngs(0))(X))
    expanded = ((2, 7, 3, 10), (2, 7, 3, 10), (2, 7, 3, 5), 10**-0.5)
    one_key = ((2, 7, 3, 12), (2, 7, 1, 12), (2, 7, 1, 8), 10**-0.5)
    assert shapes == [one_key if absorbed else expanded]
