"""Longformer's attention against its twin and transformers' own, with global tokens and padding."""

import numpy as np

from flax_attn.layers.longformer import LongformerAttention
from flax_attn.parity import Case

SIZES = {"dim": 12, "num_heads": 3, "window": 4}
ONE = {"dtypes": ("float64",)}
GLOBAL = np.zeros((2, 16), bool)
GLOBAL[0, [0, 9]] = GLOBAL[1, 3] = True
VALID = np.arange(16) < np.asarray([[16], [11]])
HOLES = np.random.RandomState(0).rand(2, 16) < 0.6


def theirs():
    """transformers' attention, and what its model says of padding and global tokens."""

    def config():
        from transformers import LongformerConfig

        given = LongformerConfig(
            hidden_size=12,
            num_attention_heads=3,
            attention_window=[4],
            attention_probs_dropout_prob=0.0,
        )
        return {"config": given, "layer_id": 0}

    def call(layer, x, global_tokens=None, valid=None):
        import torch

        there = torch.ones(x.shape[:2], dtype=torch.bool) if valid is None else valid
        chosen = torch.zeros_like(there) if global_tokens is None else global_tokens
        mask = 10_000.0 * chosen.to(x.dtype) - 10_000.0 * (~there).to(x.dtype)
        y = layer(
            x,
            attention_mask=mask,
            is_index_masked=mask < 0,
            is_index_global_attn=mask > 0,
            is_global_attn=bool(chosen.any()),
        )[0]
        return y.masked_fill(~there[..., None], 0.0)

    return {
        "reference": "transformers.models.longformer.modeling_longformer.LongformerSelfAttention",
        "reference_config": config,
        "torch_call": call,
        **ONE,
    }


CASES = [
    Case(LongformerAttention, SIZES, x=(2, 10, 12)),
    Case(LongformerAttention, SIZES, x=(2, 16, 12), global_tokens=GLOBAL, valid=HOLES, **ONE),
    Case(LongformerAttention, {**SIZES, "dropout": 0.3}, x=(9, 12), train=True, **ONE),
    Case(LongformerAttention, SIZES, x=(2, 16, 12), valid=VALID, **theirs()),
    Case(LongformerAttention, SIZES, x=(2, 16, 12), global_tokens=GLOBAL, **theirs()),
    Case(LongformerAttention, SIZES, x=(2, 16, 12), global_tokens=GLOBAL, valid=VALID, **theirs()),
]


def test_parity(case):
    case.check()
