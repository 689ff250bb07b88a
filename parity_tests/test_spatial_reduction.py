"""Spatial reduction against its twin, transformers' PVT and vit-pytorch's Twins-SVT."""

import numpy as np

from flax_attn.layers.spatial_reduction import SpatialReductionAttention
from flax_attn.parity import Case, Rule

SIZES = {"dim": 12, "num_heads": 3, "ratio": 2}
PLAIN = {**SIZES, "qkv_bias": False}
ONE = {"dtypes": ("float64",)}
RAGGED = np.random.RandomState(0).rand(2, 3, 28, 6) < 0.6
RAGGED[1, 2, 3] = False


def pvt(bias):
    """transformers' attention of PVT, which takes its pixels row by row, and their counts."""

    def config():
        from transformers import PvtConfig

        given = PvtConfig(
            qkv_bias=bias,
            layer_norm_eps=1e-3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return {
            "config": given,
            "hidden_size": 12,
            "num_attention_heads": 3,
            "sequences_reduction_ratio": 2,
        }

    def call(layer, x):
        return layer(x.flatten(1, 2), *x.shape[1:3])[0].unflatten(1, x.shape[1:3])

    return {
        "config": {**SIZES, "qkv_bias": bias, "eps": 1e-3},
        "reference": "transformers.models.pvt.modeling_pvt.PvtAttention",
        "reference_config": config,
        "torch_call": call,
        "rules": [Rule("self.* -> *"), Rule("output.dense -> dense")],
    }


def twins(ratio):
    """vit-pytorch's global attention of Twins-SVT, of images with their channels first."""
    kv = "to_kv" if ratio == 1 else "to_kv.2"
    norm = [
        Rule("to_kv.0 -> sequence_reduction"),
        Rule("to_kv.1.g -> layer_norm.scale", "1 d 1 1 -> d"),
        Rule("to_kv.1.b -> layer_norm.bias", "1 d 1 1 -> d"),
    ]
    return {
        "config": {**PLAIN, "ratio": ratio, "eps": 1e-5},
        "reference": "vit_pytorch.twins_svt.GlobalAttention",
        "made_by": "parity_tests.witnesses.vit.twins_attention",
        "reference_config": {"dim": 12, "heads": 3, "dim_head": 4, "ratio": ratio},
        "torch_call": lambda layer, x: layer(x.movedim(-1, 1)).movedim(1, -1),
        "rules": [
            Rule("to_q.weight -> query.kernel", "o i 1 1 -> i o"),
            Rule(f"{kv}.weight -> {{key,value}}.kernel", "(n o) i 1 1 -> n i o"),
            Rule("to_out.0.weight -> dense.kernel", "o i 1 1 -> i o"),
            Rule("to_out.0.bias -> dense.bias"),
            *(norm if ratio > 1 else []),
        ],
    }


CASES = [
    Case(SpatialReductionAttention, SIZES, x=(2, 4, 6, 12)),
    Case(SpatialReductionAttention, {**PLAIN, "ratio": 3, "eps": 0.1}, x=(7, 5, 12), **ONE),
    Case(SpatialReductionAttention, {**SIZES, "ratio": 1}, x=(2, 3, 5, 12), **ONE),
    Case(SpatialReductionAttention, SIZES, x=(2, 4, 7, 12), mask=RAGGED, **ONE),
    Case(SpatialReductionAttention, SIZES, x=(2, 5, 4, 6, 12), **ONE),
    Case(SpatialReductionAttention, {**SIZES, "dropout": 0.3}, x=(2, 4, 6, 12), train=True, **ONE),
    Case(SpatialReductionAttention, {**SIZES, "dim": 4, "num_heads": 4}, x=(4, 4, 4, 4), **ONE),
    Case(SpatialReductionAttention, **pvt(True), x=(2, 4, 7, 12), **ONE),
    Case(SpatialReductionAttention, **pvt(False), x=(2, 5, 6, 12), **ONE),
    Case(SpatialReductionAttention, **twins(1), x=(2, 4, 7, 12), **ONE),
    Case(SpatialReductionAttention, **twins(2), x=(2, 4, 7, 12), **ONE),
]


def test_parity(case):
    case.check()
