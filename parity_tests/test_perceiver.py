"""Perceiver's attention against its twin and transformers' own, cross and self."""

import numpy as np

from flax_attn.layers.perceiver import PerceiverAttention
from flax_attn.parity import Case, Rule

CROSS = {"in_features": 12, "num_heads": 3, "memory_features": 10}
SELF = {"in_features": 12, "num_heads": 3}
WIDE = {"qk_features": 6, "v_features": 9}
ONE = {"dtypes": ("float64",)}
PADDING = (np.arange(11) < np.asarray([[11], [4]]))[:, None, None]
VALID = np.asarray([[True] * 7, [False] * 2 + [True] * 3 + [False] * 2])


def theirs(cross, **more):
    """transformers' attention over inputs, or over the latents themselves."""

    def config():
        from transformers import PerceiverConfig

        given = PerceiverConfig(attention_probs_dropout_prob=0.0)
        widths = {"q_dim": 12, "kv_dim": 10 if cross else 12, "num_heads": 3}
        return {"config": given, "is_cross_attention": cross, **widths, **more}

    def call(layer, x, memory=None, mask=None):
        import torch

        if mask is not None:
            mask = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, -torch.inf)
        return layer(x, inputs=memory, inputs_mask=mask)[0]

    names = ["layernorm1", "query", "key", "value", *(["layernorm2"] if cross else [])]
    return {
        "reference": "transformers.models.perceiver.modeling_perceiver.PerceiverAttention",
        "reference_config": config,
        "torch_call": call,
        "rules": [
            *(Rule(f"self.{name} -> {name}") for name in names),
            Rule("output.dense -> dense"),
        ],
        **ONE,
    }


CASES = [
    Case(PerceiverAttention, CROSS, x=(2, 7, 12), memory=(2, 11, 10)),
    Case(PerceiverAttention, SELF, x=(7, 12), **ONE),
    Case(PerceiverAttention, SELF, x=(2, 7, 12), valid=VALID, **ONE),
    Case(PerceiverAttention, {**SELF, "dropout": 0.3}, x=(2, 7, 12), train=True, **ONE),
    Case(
        PerceiverAttention,
        {**CROSS, **WIDE},
        x=(2, 7, 12),
        memory=(2, 11, 10),
        mask=PADDING,
        **theirs(True, qk_channels=6, v_channels=9),
    ),
    Case(
        PerceiverAttention,
        {**SELF, **WIDE, "residual": False},
        x=(2, 7, 12),
        **theirs(False, qk_channels=6, v_channels=9, use_query_residual=False),
    ),
]


def test_parity(case):
    case.check()
