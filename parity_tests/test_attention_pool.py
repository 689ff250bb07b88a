"""Pooling by attention against its twin and the attention of SigLIP's pooling head."""

import numpy as np

from flax_attn.layers.attention_pool import AttentionPool
from flax_attn.parity import Case, Rule

SIZES = {"dim": 12, "num_heads": 3, "queries": 2}
ONE = {"dtypes": ("float64",)}
VALID = np.asarray([[True] * 3 + [False] * 4, [False] * 7])


def siglip():
    from transformers import SiglipVisionConfig

    return {
        "config": SiglipVisionConfig(hidden_size=12, num_attention_heads=3, intermediate_size=8)
    }


CASES = [
    Case(AttentionPool, SIZES, x=(2, 7, 12)),
    Case(AttentionPool, SIZES, x=(7, 12), **ONE),
    Case(AttentionPool, {**SIZES, "bias": False}, x=(2, 7, 12), valid=VALID, **ONE),
    Case(AttentionPool, {**SIZES, "dropout": 0.3}, x=(2, 7, 12), train=True, **ONE),
    Case(
        AttentionPool,
        {**SIZES, "queries": 1},
        x=(2, 7, 12),
        reference="transformers.models.siglip.modeling_siglip.SiglipMultiheadAttentionPoolingHead",
        made_by="parity_tests.witnesses.cut.siglip_pooling_attention",
        reference_config=siglip,
        torch_call=lambda head, x: head(x)[:, None],
        rules=[
            Rule("probe -> probe", "a q d -> (a q) d", a=1),
            Rule("attention.in_proj_weight -> {q,k,v}_proj.kernel", "(n o) i -> n i o", n=3),
            Rule("attention.in_proj_bias -> {q,k,v}_proj.bias", "(n o) -> n o", n=3),
            Rule("attention.out_proj -> out_proj"),
        ],
        **ONE,
    ),
]


def test_parity(case):
    case.check()
