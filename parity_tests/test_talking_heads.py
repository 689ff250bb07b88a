"""Talking heads against their twin and the attention of vit-pytorch's CaiT."""

import numpy as np

from flax_attn import CAUSAL
from flax_attn.layers.talking_heads import TalkingHeadsAttention
from flax_attn.parity import Case, Rule

SIZES = {"dim": 12, "num_heads": 3}
ONE = {"dtypes": ("float64",)}
VALID = np.asarray([[True] * 7, [False] * 2 + [True] * 3 + [False] * 2])
RAGGED = np.random.RandomState(0).rand(2, 3, 7, 7) < 0.6
RAGGED[1, 2, 3] = False
RAGGED[0, 1, :, 4] = False  # hidden from one head, whose keys the others read


def cait(head_dim):
    """The attention of vit-pytorch's CaiT: q beside [k, v], and a mixing without bias."""
    width = 3 * head_dim
    return {
        "config": {**SIZES, "head_dim": head_dim, "mix_bias": False},
        "reference": "vit_pytorch.cait.Attention",
        "made_by": "parity_tests.witnesses.vit.cait_attention",
        "reference_config": {"dim": 12, "heads": 3, "dim_head": head_dim},
        "rules": [
            Rule("{to_q,to_kv}.weight -> qkv.kernel", "n o i -> i (n o)", o=(width, 2 * width)),
            Rule("mix_heads_pre_attn -> proj_l.kernel"),
            Rule("mix_heads_post_attn -> proj_w.kernel"),
            Rule("to_out.0 -> proj"),
        ],
        **ONE,
    }


def causal():
    """A layer's own mask, on both sides."""

    def torch():
        from torch import from_numpy

        return {**SIZES, "mask": from_numpy(np.tri(7, dtype=bool))}

    return {
        "config": lambda: {**SIZES, "mask": CAUSAL},
        "reference_config": torch,
        "name": "mask=CAUSAL",
    }


CASES = [
    Case(TalkingHeadsAttention, SIZES, x=(2, 7, 12)),
    Case(TalkingHeadsAttention, {**SIZES, "head_dim": 5, "qkv_bias": True}, x=(7, 12), **ONE),
    Case(TalkingHeadsAttention, SIZES, x=(2, 7, 12), mask=RAGGED, **ONE),
    Case(TalkingHeadsAttention, SIZES, x=(2, 7, 12), valid=VALID, **ONE),
    Case(TalkingHeadsAttention, **causal(), x=(2, 7, 12), **ONE),
    Case(TalkingHeadsAttention, {**SIZES, "dropout": 0.3}, x=(2, 7, 12), train=True, **ONE),
    Case(TalkingHeadsAttention, {"dim": 12, "num_heads": 12}, x=(12, 12, 12), **ONE),
    Case(TalkingHeadsAttention, **cait(4), x=(2, 7, 12)),
    Case(TalkingHeadsAttention, **cait(5), x=(2, 7, 12)),
]


def test_parity(case):
    case.check()
