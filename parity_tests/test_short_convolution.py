"""The short convolution between gates, against its twin and the class of LFM2."""

import numpy as np

from flax_attn.layers.short_convolution import GatedShortConvolution
from flax_attn.parity import Case

IDS = np.asarray([[0] * 5 + [3] * 2 + [0] * 6, [1] * 13])
FLOAT64 = {"dtypes": ("float64",)}


def lfm2():
    """A config of tokens of width 18, whose convolution sees 3."""
    from transformers import Lfm2Config

    given = {"hidden_size": 18, "num_attention_heads": 6, "num_key_value_heads": 2}
    kinds = ["conv", "full_attention"]
    layers = {"num_hidden_layers": 2, "layer_types": kinds, "conv_L_cache": 3, "conv_bias": True}
    return {"config": Lfm2Config(**given, **layers), "layer_idx": 0}


CASES = [
    Case(GatedShortConvolution, {"in_features": 11, "conv_size": 4}, x=(2, 7, 11)),
    Case(
        GatedShortConvolution,
        {"in_features": 11, "use_bias": True},
        x=(2, 13, 11),
        segments=IDS,
        **FLOAT64,
    ),
    Case(
        GatedShortConvolution,
        {"in_features": 18, "use_bias": True},
        reference="transformers.models.lfm2.modeling_lfm2.Lfm2ShortConv",
        reference_config=lfm2,
        torch_call=lambda module, x: module(x),
        x=(2, 7, 18),
        **FLOAT64,
    ),
]


def test_parity(case):
    case.check()
