"""Exclusive self attention against its twin and NeoMME's class."""

import numpy as np

from flax_attn.layers.exclusive import ExclusiveAttention
from flax_attn.parity import Case, Decode, Rule

SIZES = {"in_features": 11, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}
RAGGED = np.random.RandomState(0).rand(2, 6, 7, 7) < 0.6
RAGGED[1, 2, 3] = False
VALID = np.asarray([[True] * 7, [False, False, True, True, True, False, False]])

GATED = {**SIZES, "gate": True}
NAMES = [
    Rule("exclusive_self_attention.alpha -> alpha"),
    Rule("output_projection.gate_proj -> gate_proj"),
    Rule("output_projection.o_proj -> o_proj"),
]


def normed():
    """NeoMME's norms of queries and keys have no gain."""
    from flax_attn import FULL, RMSNorm

    norms = {name: RMSNorm(None, eps=1e-6, cast="before") for name in ("q_norm", "k_norm")}
    return {**GATED, "mask": FULL, **norms}


def neomme():
    from transformers.models.neomme.configuration_neomme import NeoMMEConfig

    sizes = {"hidden_size": 11, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    kinds = {"full_attention": rope, "sliding_attention": rope}
    config = NeoMMEConfig(**sizes, num_hidden_layers=1, norm_eps=1e-6, rope_parameters=kinds)
    config._attn_implementation = "eager"
    config.allow_global_per_layer_attribute_access = True
    return {"config": config, "layer_idx": 0}


def unturned(layer, x):
    """NeoMME's call with a rotary that turns nothing."""
    cos = x.new_ones(*x.shape[:2], 4)
    return layer(x, position_embeddings=(cos, 0 * cos))[0]


ONE = {"dtypes": ("float64",), "x": (2, 7, 11)}

CASES = [
    Case(ExclusiveAttention, SIZES, x=(2, 7, 11), decode=Decode()),
    Case(ExclusiveAttention, {**SIZES, "learned": False}, **ONE),
    Case(ExclusiveAttention, {**SIZES, "gate": True}, **ONE, mask=RAGGED),
    Case(ExclusiveAttention, {**SIZES, "qkv_bias": True}, **ONE, mask=RAGGED),
    Case(ExclusiveAttention, {**SIZES, "out_bias": True}, **ONE, valid=VALID),
    Case(ExclusiveAttention, {**SIZES, "dropout": 0.3}, **ONE, train=True),
    Case(
        ExclusiveAttention,
        {"in_features": 12, "num_heads": 3, "num_kv_heads": 3, "head_dim": 4},
        dtypes=("float64",),
        x=(3, 12, 12),
    ),
    Case(
        ExclusiveAttention,
        normed,
        reference="transformers.models.neomme.modeling_neomme.NeoMMEAttention",
        reference_config=neomme,
        torch_call=unturned,
        rules=NAMES,
        name="by NeoMME,gate,norms",
        **ONE,
    ),
]


def test_parity(case):
    case.check()
