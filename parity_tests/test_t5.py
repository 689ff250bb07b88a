"""T5's attention against its twin and transformers' own, in an encoder and in a decoder."""

import numpy as np

from flax_attn import CAUSAL
from flax_attn.layers.t5 import T5Attention
from flax_attn.parity import Case, Decode

SIZES = {"in_features": 11, "num_heads": 3, "head_dim": 4, "buckets": 8, "max_distance": 7}
ONE = {"dtypes": ("float64",)}
PADDING = (np.arange(13) < np.asarray([[13], [5]]))[:, None, None]
VALID = np.asarray([[True] * 9, [False] * 2 + [True] * 5 + [False] * 2])
RAGGED = np.random.RandomState(0).rand(2, 3, 9, 9) < 0.6
RAGGED[1, 2, 3] = False


def theirs(decoder, has_bias):
    """transformers' T5Attention, and the call of it with an additive mask."""

    def config():
        from transformers import T5Config

        given = T5Config(
            d_model=11,
            d_kv=4,
            num_heads=3,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=7,
            dropout_rate=0.0,
            is_decoder=decoder,
            attn_implementation="eager",
        )
        return {"config": given, "has_relative_attention_bias": has_bias, "layer_idx": 0}

    def call(layer, x, memory=None, mask=None, bias=None):
        import torch

        if decoder and memory is None:
            mask = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        if mask is not None:
            mask = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, -torch.inf)
        bias = None if bias is None else bias[None]
        return layer(x, mask=mask, key_value_states=memory, position_bias=bias)[0]

    return {
        "reference": "transformers.models.t5.modeling_t5.T5Attention",
        "reference_config": config,
        "torch_call": call,
        "flax_call": (lambda layer, x, **more: layer(x, mask=CAUSAL)) if decoder else None,
        **ONE,
    }


def decoder(has_bias=True):
    return {**SIZES, "bidirectional": False, "has_bias": has_bias}


def causal():
    """The configuration of a decoder's own attention, on both sides."""

    def torch():
        from torch import from_numpy

        return {**decoder(), "mask": from_numpy(np.tri(9, dtype=bool))}

    return {
        "config": lambda: {**decoder(), "mask": CAUSAL},
        "reference_config": torch,
        "name": "bidirectional=False,mask=CAUSAL",
    }


CASES = [
    Case(T5Attention, SIZES, x=(2, 9, 11)),
    Case(T5Attention, SIZES, x=(9, 11), **ONE),
    Case(T5Attention, SIZES, x=(2, 9, 11), mask=RAGGED, **ONE),
    Case(T5Attention, SIZES, x=(2, 9, 11), valid=VALID, **ONE),
    Case(T5Attention, **causal(), x=(2, 9, 11), decode=Decode()),
    Case(T5Attention, SIZES, x=(2, 9, 11), memory=(2, 13, 11), mask=PADDING, **ONE),
    Case(T5Attention, {**SIZES, "has_bias": False}, x=(2, 9, 11), bias=(3, 9, 9), **ONE),
    Case(T5Attention, {**SIZES, "dropout": 0.3}, x=(2, 9, 11), train=True, **ONE),
    Case(T5Attention, {"in_features": 12, "num_heads": 12, "head_dim": 12}, x=(12, 12, 12), **ONE),
    Case(T5Attention, SIZES, x=(2, 9, 11), **theirs(False, True)),
    Case(T5Attention, SIZES, x=(2, 13, 11), mask=PADDING, **theirs(False, True)),
    Case(
        T5Attention,
        {**SIZES, "has_bias": False},
        x=(2, 9, 11),
        bias=(3, 9, 9),
        **theirs(False, False),
    ),
    Case(T5Attention, decoder(), x=(2, 13, 11), **theirs(True, True)),
    Case(
        T5Attention,
        decoder(has_bias=False),
        x=(2, 9, 11),
        memory=(2, 13, 11),
        mask=PADDING,
        **{**theirs(True, False), "flax_call": None},
    ),
]


def test_parity(case):
    case.check()
