"""Mamba 2 against its twin and transformers' mixer."""

import numpy as np

from flax_attn.layers.mamba2 import Mamba2
from flax_attn.parity import Case, Rule

SIZES = {"in_features": 11, "num_heads": 6, "key_dim": 4, "value_dim": 5}
IDS = np.asarray([[0] * 5 + [3] * 2 + [0] * 12, [1] * 19])
FLOAT64 = {"dtypes": ("float64",)}


def mixer():
    """A config of 6 heads of width 6 in 2 groups, of tokens of width 18."""
    from transformers import Mamba2Config

    sizes = {"num_heads": 6, "head_dim": 6, "state_size": 4, "n_groups": 2, "conv_kernel": 3}
    given = {"hidden_size": 18, "num_hidden_layers": 1, "chunk_size": 4, **sizes}
    return {"config": Mamba2Config(**given), "layer_idx": 0}


CASES = [
    Case(Mamba2, {**SIZES, "groups": 3}, x=(2, 7, 11)),
    Case(
        Mamba2,
        {**SIZES, "conv_size": 2, "use_bias": True, "chunk": 16},
        x=(2, 19, 11),
        segments=IDS,
        **FLOAT64,
    ),
    Case(  # what hybrids leave out: the norm, the convolution's bias; and steps within limits
        Mamba2,
        {**SIZES, "groups": 2, "norm": None, "conv_bias": False, "step_limits": (0.5, 0.8)},
        x=(2, 7, 11),
        **FLOAT64,
    ),
    Case(
        Mamba2,
        {**SIZES, "groups": 2, "norm": "before", "use_bias": True, "out_bias": False}
        | {"multipliers": (0.5, 0.5, 1.5, 2.0, 0.25, 3.0)},
        x=(2, 7, 11),
        **FLOAT64,
    ),
    Case(
        Mamba2,
        {"in_features": 18, "num_heads": 6, "key_dim": 4, "value_dim": 6, "groups": 2}
        | {"conv_size": 3},
        reference="transformers.models.mamba2.modeling_mamba2.Mamba2Mixer",
        reference_config=mixer,
        torch_call=lambda module, x: module(x),
        rules=(Rule("norm.weight -> norm.scale"),),
        x=(2, 13, 18),
        **FLOAT64,
    ),
]


def test_parity(case):
    case.check()
