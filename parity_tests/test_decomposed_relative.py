"""SAM's attention against its twin and transformers' own, in images of its size and of others."""

import numpy as np

from flax_attn.layers.decomposed_relative import DecomposedRelativeAttention
from flax_attn.parity import Case

SIZES = {"dim": 12, "num_heads": 3, "size": (4, 5)}
ONE = {"dtypes": ("float64",)}
VALID = np.random.RandomState(0).rand(2, 4, 5) < 0.7


def theirs():
    """transformers' attention of SAM's images, for windows of 3 x 3."""

    def config():
        from transformers import SamVisionConfig

        given = SamVisionConfig(
            hidden_size=12, num_attention_heads=3, use_rel_pos=True, attention_dropout=0.0
        )
        return {"config": given, "window_size": 3}

    return {
        "reference": "transformers.models.sam.modeling_sam.SamVisionAttention",
        "reference_config": config,
        "torch_call": lambda layer, x: layer(x)[0],
        **ONE,
    }


WINDOW = {**SIZES, "size": (3, 3)}
CASES = [
    Case(DecomposedRelativeAttention, SIZES, x=(2, 4, 5, 12)),
    Case(DecomposedRelativeAttention, SIZES, x=(3, 7, 12), **ONE),
    Case(DecomposedRelativeAttention, SIZES, x=(2, 4, 5, 12), valid=VALID, **ONE),
    Case(DecomposedRelativeAttention, {**SIZES, "dropout": 0.3}, x=(4, 5, 12), train=True, **ONE),
    Case(DecomposedRelativeAttention, {**SIZES, "qkv_bias": False}, x=(2, 4, 5, 12), **ONE),
    Case(DecomposedRelativeAttention, WINDOW, x=(2, 3, 3, 12), **theirs()),
    Case(DecomposedRelativeAttention, WINDOW, x=(2, 4, 5, 12), **theirs()),
]


def test_parity(case):
    case.check()
