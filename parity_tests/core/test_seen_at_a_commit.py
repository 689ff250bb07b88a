"""A quick test for each planted bug (`core/bugs`) that no other test of a commit sees."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import CAUSAL, DisentangledAttention, attend, families, flax_attention, taps
from flax_attn.backends import blockwise
from flax_attn.backends.blockwise.plan import make_plan
from flax_attn.parity import judge
from flax_attn.parity.diagnosis import backward
from flax_attn.parity.search.target import Target
from flax_attn.rules import Rules, sizes_of
from flax_attn.sharding.specs import places_of
from flax_attn.weights.move import Move

DRAW = np.random.RandomState(0)
B, T, N, H = 2, 6, 3, 4
Q, K, V = (DRAW.standard_normal((B, T, N, H)).astype("float32") for _ in range(3))


def test_gradients_that_are_added_to_others_stay_wide():
    """ring-adds-narrow-gradients."""
    q, k, v = (jnp.asarray(x, "bfloat16") for x in (Q, K, V))
    sizes = sizes_of(q, k)
    rules = Rules(CAUSAL).bind(sizes, H)
    plan = make_plan(sizes, N, rules, "cpu")
    rows = tuple(jnp.ones((B, N, T)) for _ in range(3))
    for adds, dtype in ((True, "float32"), (False, "bfloat16")):
        grads = blockwise.gradients(plan._replace(adds=adds), q, k, v, rules, q, rows)[:3]
        assert [x.dtype for x in grads] == [dtype] * 3


def test_a_difference_in_some_places_is_explained_by_what_it_is_there():
    """partial-differences-unexplained."""
    torch = pytest.importorskip("torch", reason="a target is compared with torch's arrays")
    want = DRAW.standard_normal((4, 5))
    got = np.where(np.arange(4)[:, None] < 3, 2 * want, want)
    target = Target(0, got, want)
    assert target.equals_where_it_differs(torch.from_numpy(2 * want))
    assert not target.equals_where_it_differs(torch.from_numpy(3 * want))
    assert not target.equals(torch.from_numpy(2 * want))


def test_a_gradient_that_passes_in_the_whole_run_is_not_blamed():
    """innocent-gradients-blamed."""

    def row(differs):
        verdict = SimpleNamespace(differs=differs)
        return SimpleNamespace(kind="gradient", dtype="float64", name="x", verdict=verdict)

    local = SimpleNamespace(run=SimpleNamespace(taps={}), feeds={})
    assert backward.unaffected([row(True)], local, [row(False)]) == {"x"}


def test_a_causal_call_of_flax_keeps_its_mask():
    """causal-drops-the-mask."""
    mask = DRAW.rand(B, N, T, T) < 0.6
    mask |= np.eye(T, dtype=bool)
    got = flax_attention(Q, K, V, mask=mask, is_causal=True)
    want = attend(Q, K, V, mask=mask & np.tri(T, dtype=bool))
    assert judge.allclose(np.asarray(got), np.asarray(want))


def layer_of(index, **config):
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 3}
    fields = {**sizes, "num_hidden_layers": 4, **config}
    return nnx.eval_shape(lambda: families.attention(fields, index, rngs=nnx.Rngs(0)))


def test_the_first_upper_layer_has_the_window():
    """upper-window-begins-one-late."""
    config = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
    masks = [str(layer_of(i, model_type="qwen2", **config).mask) for i in range(4)]
    assert ["Window" in mask for mask in masks] == [False, False, True, True]


def test_granite_reads_its_multiplier():
    """granite-default-scale."""
    layer = layer_of(0, model_type="granite", attention_multiplier=0.3)
    assert layer.rules.scale == 0.3


def test_disentangled_attention_with_one_term_scales_by_one_term():
    """disentangled-scale-of-one-term."""
    x, embeddings = DRAW.standard_normal((T, 12)).astype("float32"), jnp.zeros((16, 12))
    options = {"buckets": None, "max_positions": 8, "rngs": nnx.Rngs(0)}
    layer = DisentangledAttention(12, 3, terms=("p2c",), **options)
    projections = layer.query_proj, layer.key_proj, layer.value_proj
    layer.pos_query_proj.bias[...] = jnp.zeros(12)
    q, k, v = (project(x).reshape(T, 3, 4) for project in projections)
    want = attend(q, k, v, scale=(4 * 2) ** -0.5).reshape(T, 12)
    got = np.asarray(layer(x, embeddings))
    assert judge.allclose(got, np.asarray(want))


def test_sinks_are_one_number_a_head():
    """sinks-of-another-length."""
    with pytest.raises(ValueError, match="sinks"):
        attend(Q, K, V, sinks=jnp.zeros((1, N)))


def test_entries_are_numbered_over_all_batch_axes():
    """batch-axes-numbered-apart."""
    places = places_of((jnp.arange(2), jnp.arange(3), jnp.arange(4)), (2, 3))
    assert places.b.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_complex_numbers_are_lifted():
    """complex-stays-narrow."""
    torch = pytest.importorskip("torch", reason="lifts torch code")
    from flax_attn.parity.sides.torch.float64 import lifted

    with lifted():
        assert torch.ones(2).to(torch.complex64).dtype == torch.complex128


def test_taps_record_the_values_of_attend():
    """value-not-tapped."""
    with taps.listen() as heard:
        attend(Q, K, V)
    assert [name for name, _ in heard][:3] == ["query", "key", "value"]


def test_a_shift_is_undone_backwards():
    """shift-not-undone-backwards."""
    move = Move(("weight",), ("scale",), shift=1.0)
    there = move.forward({"weight": np.asarray([0.5, 2.0])})
    assert there["scale"].tolist() == [1.5, 3.0]
    assert move.back(there)["weight"].tolist() == [0.5, 2.0]
