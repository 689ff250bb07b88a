"""Buffers in files, and Params that a file does not have."""

import numpy as np
import pytest
from flax import nnx

from flax_attn import GroupedQueryAttention, weights
from flax_attn.errors import CheckpointError
from flax_attn.parity import judge
from flax_attn.weights import Rule
from flax_attn.weights.buffers import BUFFERS
from parity_tests.core.backends.refusal import told

# A name and a shape for each kind of buffer, as files have them.
WRITTEN = {
    "rotary_emb.inv_freq": (4,),
    "rotary_emb.original_inv_freq": (4,),
    "rotary_emb.cos_cached": (1, 1, 9, 8),
    "rotary_emb.sin_cached": (9, 8),
    "bias": (1, 1, 9, 9),
    "attention.bias": (1, 1, 9, 9),
    "masked_bias": (),
    "causal_mask": (1, 1, 9, 9),
    "embed_positions": (9, 4),
    "relative_position_index": (9, 9),
    "EncDecAttention.relative_attention_bias.weight": (32, 4),
}


def layer(seed: int = 0) -> GroupedQueryAttention:
    return GroupedQueryAttention(12, 4, 2, 3, qkv_bias=True, rngs=nnx.Rngs(seed))


def arrays(prefix: str = "attn.") -> dict[str, np.ndarray]:
    """The weights of a layer, as torch names them."""
    random = np.random.default_rng(0)
    shapes = {f"{x}_proj.weight": (n, 12) for x, n in (("q", 12), ("k", 6), ("v", 6), ("o", 12))}
    shapes |= {f"{x}_proj.bias": (n,) for x, n in (("q", 12), ("k", 6), ("v", 6))}
    draw = random.standard_normal
    return {prefix + name: draw(shape).astype(np.float32) for name, shape in shapes.items()}


def test_every_kind_of_known_buffer_is_tested():
    assert len(WRITTEN) >= len(BUFFERS)


@pytest.mark.nightly
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("prefix", ["attn", ""])
def test_a_known_buffer_is_left_out(name, prefix):
    dot = f"{prefix}." if prefix else ""
    given, module = arrays(dot), layer()
    weights.load(module, {**given, dot + name: np.ones(WRITTEN[name], np.float32)}, prefix=prefix)
    assert judge.exact(module.q_proj.kernel[...], given[f"{dot}q_proj.weight"].T).ok


def test_a_known_buffer_of_a_whole_model_is_left_out():
    """Where rules carry whole modules, buffers that lie in them are none of their weights."""

    class Model(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([nnx.Dict(attn=layer(seed)) for seed in (1, 2)])

    given = {f"h.{i}.attn.{name}": x for i in (0, 1) for name, x in arrays("").items()}
    mask = np.ones((1, 1, 9, 9), bool)
    given |= {f"h.{i}.attn.bias": mask for i in (0, 1)}
    model = Model()
    weights.load(model, given, rules=[Rule("h.*.attn -> blocks.*.attn")])
    want = given["h.1.attn.k_proj.weight"].T
    assert judge.exact(model.blocks[1].attn.k_proj.kernel[...], want).ok


def test_a_weight_is_never_taken_for_a_buffer():
    """A bias of its own name and shape, and a table that the layer has."""

    class Biased(nnx.Module):
        def __init__(self):
            self.bias = nnx.Param(np.zeros((1, 1, 9, 9), np.float32))
            self.inv_freq = nnx.Param(np.zeros(4, np.float32))

    module = Biased()
    given = {"bias": np.ones((1, 1, 9, 9), np.float32), "inv_freq": np.ones(4, np.float32)}
    weights.load(module, given)
    assert np.asarray(module.bias[...]).all() and np.asarray(module.inv_freq[...]).all()
    other = Biased()
    renamed = {"table.bias": given["bias"], "inv_freq": given["inv_freq"]}
    weights.load(other, renamed, rules=[Rule("table.bias -> bias")])
    assert np.asarray(other.bias[...]).all()
    with told(CheckpointError, "bias [12] goes to bias, which Flax does not have"):
        weights.load(layer(), {**arrays(), "attn.bias": np.ones(12, np.float32)}, prefix="attn")


def test_an_unknown_tensor_is_refused_with_the_way_out():
    strange = {"attn.table": np.ones(3, np.float32)}
    with told(CheckpointError, "table [3] goes to table", 'left out by Rule.skip("table")'):
        weights.load(layer(), {**arrays(), **strange}, prefix="attn")
    weights.load(layer(), {**arrays(), **strange}, prefix="attn", rules=[Rule.skip("table")])


def test_a_buffer_may_be_skipped_by_name_too():
    given = {**arrays(), "attn.masked_bias": np.asarray(-1e4, np.float32)}
    weights.load(layer(), given, prefix="attn", rules=[Rule.skip("masked_bias")])


# Params that a file does not have.


def test_partial_load_keeps_missing_weights_and_reports_them():
    module = layer()
    module.scale = nnx.Param(np.full(3, 7.0, np.float32))  # an adapter's
    before = np.asarray(module.q_proj.bias[...])
    given = {name: x for name, x in arrays().items() if name != "attn.q_proj.bias"}
    assert weights.load(module, given, prefix="attn", partial=True) == ["q_proj.bias", "scale"]
    assert judge.exact(module.q_proj.bias[...], before).ok
    assert judge.exact(module.k_proj.kernel[...], given["attn.k_proj.weight"].T).ok
    with told(CheckpointError, "scale [3] is filled by nothing"):
        weights.load(module, given, prefix="attn")


def test_a_whole_file_keeps_nothing():
    assert weights.load(layer(), arrays(), prefix="attn", partial=True) == []
    assert weights.load(layer(), arrays(), prefix="attn") is None


def test_every_tensor_must_still_have_a_place_and_the_right_shape():
    for name, x in (("attn.new", np.ones(3)), ("attn.q_proj.bias", np.ones(5))):
        given = {**arrays(), name: x.astype(np.float32)}
        with told(CheckpointError, name.removeprefix("attn.")):
            weights.load(layer(), given, prefix="attn", partial=True)


def test_a_rule_for_what_is_not_there_is_no_fault():
    given = {name: x for name, x in arrays().items() if "bias" not in name}
    rules = [Rule("qkv.bias -> q_proj.bias")]
    kept = weights.load(layer(), given, prefix="attn", rules=rules, partial=True)
    assert sorted(kept or ()) == ["k_proj.bias", "q_proj.bias", "v_proj.bias"]
