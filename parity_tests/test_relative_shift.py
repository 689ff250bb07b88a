"""Attention by distances against its twin, XLNet's layer and the Conformer's."""

import numpy as np

from flax_attn.layers.relative_shift import RelativeShiftAttention
from flax_attn.parity import Case, Rule

SIZES = {"in_features": 10, "num_heads": 3, "head_dim": 4}
SEGMENT = {**SIZES, "biases": "segment"}
XLNET = {**SEGMENT, "in_features": 12}
SPEECH = {
    **SIZES,
    "in_features": 12,
    "layout": "interleaved",
    "qkv_bias": True,
    "out_bias": True,
}
ONE = {"dtypes": ("float64",)}
IDS = np.asarray([[0] * 4 + [1] * 3, [2] * 2 + [0] * 5])
VALID = np.asarray([[True] * 7, [False] * 2 + [True] * 3 + [False] * 2])
RAGGED = np.random.RandomState(0).rand(2, 1, 7, 7) < 0.6
RAGGED[1, 0, 3] = True


def sines(distance, width, halves):
    """The sinusoids of these distances in float64."""
    import torch

    rates = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = distance.to(torch.float64)[:, None] * rates
    parts = [angles.sin(), angles.cos()]
    return torch.cat(parts, -1) if halves else torch.stack(parts, -1).flatten(-2)


def xlnet_call(layer, x, segments=None, mask=None):
    import torch

    T, batch = x.shape[1], x.shape[0]
    r = sines(torch.arange(T, -T, -1), 12, True).to(x.dtype)[:, None].expand(-1, batch, -1)
    h, other, blocked = x.transpose(0, 1), None, None
    if segments is not None:
        ids = segments.T
        other = torch.nn.functional.one_hot((ids[:, None] != ids[None]).long(), 2).to(x.dtype)
    if mask is not None:
        blocked = (~mask).to(x.dtype).permute(2, 3, 0, 1)
    return (layer(h, None, blocked, None, r, other)[0] - h).transpose(0, 1)


def xlnet():
    """transformers' XLNet, whose projections are plain arrays; its residual is taken off again."""

    def config():
        from transformers import XLNetConfig

        return {"config": XLNetConfig(d_model=12, n_head=3, d_head=4, d_inner=12, dropout=0.0)}

    rules = [Rule(f"{x} -> {x}_proj.kernel", "d n h -> d (n h)", n=3) for x in "qkvr"]
    return {
        "reference": "transformers.models.xlnet.modeling_xlnet.XLNetRelativeAttention",
        "made_by": "parity_tests.witnesses.cut.xlnet_attention",
        "reference_config": config,
        "torch_call": xlnet_call,
        "rules": [*rules, Rule("o -> o_proj.kernel", "d n h -> (n h) d", n=3)],
        **ONE,
    }


def speech_call(layer, x, mask=None):
    import torch

    T = x.shape[1]
    r = sines(torch.arange(T - 1, -T, -1), 12, False).to(x.dtype)[None]
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, -torch.inf)
    return layer(x, attention_mask=mask, relative_position_embeddings=r)[0]


def speech():
    """transformers' Conformer of wav2vec 2.0."""

    def config():
        from transformers import Wav2Vec2ConformerConfig

        return {
            "config": Wav2Vec2ConformerConfig(
                hidden_size=12,
                num_attention_heads=3,
                position_embeddings_type="relative",
                attention_dropout=0.0,
                attn_implementation="eager",
            )
        }

    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "pos": "r_proj", "out": "o_proj"}
    rules = [Rule(f"linear_{one} -> {other}") for one, other in names.items()]
    path = "transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer"
    return {
        "reference": f"{path}.Wav2Vec2ConformerSelfAttention",
        "reference_config": config,
        "torch_call": speech_call,
        "rules": [*rules, Rule("pos_bias_u -> r_w_bias"), Rule("pos_bias_v -> r_r_bias")],
        **ONE,
    }


CASES = [
    Case(RelativeShiftAttention, SIZES, x=(2, 7, 10)),
    Case(RelativeShiftAttention, SPEECH, x=(7, 12), **ONE),
    Case(RelativeShiftAttention, SIZES, x=(2, 7, 10), valid=VALID, **ONE),
    Case(RelativeShiftAttention, SEGMENT, x=(2, 7, 10), segments=IDS, mask=RAGGED, **ONE),
    Case(RelativeShiftAttention, {**SEGMENT, "dropout": 0.3}, x=(2, 7, 10), train=True, **ONE),
    Case(RelativeShiftAttention, XLNET, x=(2, 7, 12), segments=IDS, **xlnet()),
    Case(RelativeShiftAttention, XLNET, x=(2, 7, 12), mask=RAGGED, segments=IDS, **xlnet()),
    Case(RelativeShiftAttention, SPEECH, x=(2, 7, 12), **speech()),
    Case(RelativeShiftAttention, SPEECH, x=(2, 7, 12), mask=RAGGED, **speech()),
]


def test_parity(case):
    case.check()
