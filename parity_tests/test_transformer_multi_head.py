"""Transformer attention against its twin and torch.nn.MultiheadAttention, packed and apart."""

import numpy as np

from flax_attn.layers.transformer_multi_head import TransformerMultiHeadAttention
from flax_attn.parity import Case

SELF = {"embed_dim": 12, "num_heads": 3}
CROSS = {"embed_dim": 12, "num_heads": 3, "kdim": 7, "vdim": 10}
WITNESS = "torch.nn.MultiheadAttention"
CAUSAL = np.tril(np.ones((9, 9), bool))
PADDING = (np.arange(9) < np.asarray([[9], [2], [5]])).reshape(3, 1, 1, 9)
RAGGED = np.random.RandomState(0).rand(3, 3, 5, 9) < 0.6
RAGGED[1, 2, 3] = False


def given(**config):
    """torch.nn's arguments for ours."""
    return {"batch_first": True, **config}


def theirs(need_weights=False):
    """A call of torch.nn.MultiheadAttention, in which True means blocked."""

    def call(mha, query, key=None, value=None, mask=None):
        key = query if key is None else key
        value = key if value is None else value
        blocked = {}
        if mask is not None and mask.ndim == 4:
            blocked["key_padding_mask"] = ~mask[:, 0, 0]
        elif mask is not None:
            blocked["attn_mask"] = ~mask
        return mha(query, key, value, need_weights=need_weights, **blocked)[0]

    return call


def both(config, **inputs):
    """One case against the twin, one against torch.nn.MultiheadAttention."""
    return [
        Case(TransformerMultiHeadAttention, config, **inputs),
        Case(
            TransformerMultiHeadAttention,
            config,
            reference=WITNESS,
            reference_config=given(**config),
            torch_call=theirs(need_weights="mask" in inputs),
            **inputs,
        ),
    ]


CASES = [
    *both(SELF, query=(3, 9, 12)),
    *both(SELF, query=(3, 9, 12), mask=CAUSAL),
    *both(SELF, query=(3, 9, 12), mask=PADDING),
    *both({**SELF, "bias": False}, query=(3, 5, 12), key=(3, 9, 12), mask=PADDING),
    *both(CROSS, query=(3, 5, 12), key=(3, 9, 7), value=(3, 9, 10)),
    *both(CROSS, query=(3, 10, 12), key=(3, 9, 7), value=(3, 9, 10), mask=PADDING),
    *both(SELF, query=(9, 12)),
    Case(TransformerMultiHeadAttention, SELF, query=(3, 5, 12), key=(3, 9, 12), mask=RAGGED),
    Case(TransformerMultiHeadAttention, SELF, query=(2, 4, 1, 12), key=(2, 4, 33, 12)),
    Case(TransformerMultiHeadAttention, {"embed_dim": 6, "num_heads": 6}, query=(6, 6, 6)),
    *(
        case
        for rate in (0.1, 0.2, 0.5)
        for case in both({**SELF, "dropout": rate}, query=(3, 9, 12), mask=PADDING, train=True)
    ),
]


def test_parity(case):
    case.check()
