"""DeBERTa's attention against its twin and transformers' own, with buckets and without."""

import numpy as np

from flax_attn.layers.disentangled import DisentangledAttention
from flax_attn.parity import Case

SIZES = {"in_features": 12, "num_heads": 3, "buckets": 4, "max_positions": 7}
PLAIN = {**SIZES, "buckets": None}
ONE = {"dtypes": ("float64",)}
VALID = np.asarray([[True] * 10, [False] * 2 + [True] * 5 + [False] * 3])
PADDING = (np.arange(10) < np.asarray([[10], [6]]))[:, None, None]


def theirs(**more):
    """transformers' attention with these fields of a config."""

    def config():
        from transformers import DebertaV2Config

        given = {
            "hidden_size": 12,
            "num_attention_heads": 3,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 4,
            "max_relative_positions": 7,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }
        return {"config": DebertaV2Config(**{**given, **more})}

    def call(layer, x, rel_embeddings, mask=None):
        import torch

        mask = torch.ones(1, 1, 1, x.shape[1], dtype=torch.bool) if mask is None else mask
        return layer(x, mask, rel_embeddings=rel_embeddings)[0]

    return {
        "reference": "transformers.models.deberta_v2.modeling_deberta_v2.DisentangledSelfAttention",
        "reference_config": config,
        "torch_call": call,
        **ONE,
    }


def case(config, rows=8, **more):
    return Case(DisentangledAttention, config, x=(2, 10, 12), rel_embeddings=(rows, 12), **more)


CASES = [
    case(SIZES),
    case({**SIZES, "share": True}, valid=VALID, **ONE),
    case({**PLAIN, "terms": ("c2p",)}, 14, mask=PADDING, **ONE),
    case({**SIZES, "dropout": 0.3}, train=True, **ONE),
    case({**SIZES, "key_bias": False}, valid=VALID, **ONE),
    case({**SIZES, "key_bias": False, "share": True}, **ONE),
    case(SIZES, mask=PADDING, **theirs()),
    case({**SIZES, "share": True}, **theirs(share_att_key=True)),
    case({**SIZES, "terms": ("p2c",)}, **theirs(pos_att_type=["p2c"])),
    case(PLAIN, 14, **theirs(position_buckets=-1)),
]


def test_parity(case):
    case.check()
