"""Latent attention, expanded and absorbed, against its twin and four published classes."""

import math

import numpy as np
from flax import nnx

from flax_attn import Alibi, Rotary, Rules, Softcap, Yarn, alibi_slopes
from flax_attn.layers.latent import LatentAttention
from flax_attn.parity import Case, Decode

PLAIN = {
    **{"in_features": 11, "num_heads": 3, "kv_rank": 8},
    **{"nope_dim": 6, "rotary_dim": 4, "value_dim": 5},
}
SIZES = {**PLAIN, "q_rank": 10}
RAGGED = np.random.RandomState(0).rand(2, 3, 7, 7) < 0.6
RAGGED[1, 2, 3] = False
VALID = np.asarray([[True] * 7, [False, False, True, True, True, False, False]])
INT32_MAX = np.asarray([3, 1021, 1024, 2048, 7, 7, 0])
PADDED = np.tri(7, dtype=bool) & VALID[:, None, None, :]


def turned(name, given=SIZES, flax=None, torch=None, **rotary):
    """Configurations of both sides: sizes, a rotary, and what differs."""

    def of_flax():
        return {**given, "rotary": Rotary(**rotary), **(flax or {})}

    def of_torch():
        from torch_ref.grouped_query import Rotary

        return {**given, "rotary": Rotary(**rotary), **(torch or {})}

    return {"config": of_flax, "reference_config": of_torch, "name": f"rotary,{name}"}


def scored():
    """Of both sides: a scale, a softcap and slopes."""
    score = Softcap(2.5) >> Alibi(alibi_slopes(3))
    given = {**SIZES, "absorbed": True}
    plain = {"scale": 0.4, "softcap": 2.5, "slopes": alibi_slopes(3)}
    return {
        "config": {**given, "rules": Rules(score=score, scale=0.4)},
        "reference_config": {**given, **plain},
        "name": "absorbed=True,scale=0.4,softcap=2.5,alibi",
    }


def mean(layer, x, mask):
    return layer(x, mask=mask, empty="mean")


DEEPSEEK = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.7}
DEEPSEEK |= {"mscale_all_dim": 1.3, "original_max_position_embeddings": 8}
DEEPSEEK |= {"beta_fast": 32, "beta_slow": 1}
NAMES = {"hidden_size": 18, "num_attention_heads": 3, "num_key_value_heads": 3}
NAMES |= {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
NAMES |= {"max_position_embeddings": 32}
# The scale of the logits that DeepSeek's YaRN asks for.
RULES = Rules(scale=10**-0.5 * (0.1 * 1.3 * math.log(4.0) + 1) ** 2)


def published(name, model, layer, layout, *, q_rank=10, yarn=True, absorbed=False, **more):
    """A case against a class of transformers of these sizes."""
    own = {"rope_parameters": DEEPSEEK if yarn else {"rope_type": "default", "rope_theta": 1e4}}
    own |= {"head_dim": 4} if layer == "MLA" else {}  # the others derive it
    own |= {**NAMES, "q_lora_rank": q_rank, **more.pop("own", {})}
    biased = own.get("attention_bias", False)

    def flax():
        scaling = Yarn(4.0, 8, 32.0, 1.0, 0.7, 1.3) if yarn else None
        parts = {"rotary": Rotary(1e4, layout, scaling=scaling), "absorbed": absorbed}
        parts |= {"q_rank": q_rank, "qkv_bias": biased, "out_bias": biased}
        return {**PLAIN, "in_features": 18, **parts, **({"rules": RULES} if yarn else {})}

    def config():
        import transformers

        given = {**own, "attn_implementation": "eager"}
        return getattr(transformers, f"{model}Config")(**given)

    def call(module, x):
        import torch

        angles = getattr(__import__(module.__module__, fromlist=["x"]), f"{model}RotaryEmbedding")
        turns = angles(config())(x, torch.arange(7)[None])
        hidden, lowest = torch.ones(7, 7, dtype=torch.bool).triu(1), torch.finfo(x.dtype).min
        mask = torch.zeros(1, 1, 7, 7, dtype=x.dtype).masked_fill(hidden, lowest)
        return module(x, position_embeddings=turns, attention_mask=mask)[0]

    return Case(
        LatentAttention,
        flax,
        reference=f"transformers.models.{name}.modeling_{name}.{model}{layer}",
        reference_config=lambda: {"config": config(), "layer_idx": 0},
        torch_call=call,
        dtypes=("float64",),
        name=f"absorbed={absorbed},q_rank={q_rank},yarn={yarn},bias={biased}",
        x=(2, 7, 18),
        **more,
    )


def scaled_latents(layer, x):
    """LongCat-Flash multiplies the normed latents by sqrt(width / rank); here the gains are."""
    graph, state = nnx.split(layer)
    for name, rank in (("q_a_layernorm", 10), ("kv_a_layernorm", 8)):
        gain = state[name]["scale"]
        state[name]["scale"] = gain.replace(gain[...] * (18 / rank) ** 0.5)
    return nnx.merge(graph, state)(x)


FLOAT64 = {"dtypes": ("float64",)}
BIASED = {"own": {"attention_bias": True}}
CASES = [
    Case(
        LatentAttention,
        **turned("interleaved", layout="interleaved"),
        x=(2, 7, 11),
        decode=Decode(),
    ),
    Case(LatentAttention, {**SIZES, "absorbed": True, "out_bias": True}, x=(2, 5, 1, 11)),
    Case(LatentAttention, **turned("half", PLAIN), **FLOAT64, x=(2, 7, 11), positions=INT32_MAX),
    Case(LatentAttention, **scored(), **FLOAT64, x=(2, 7, 11)),
    *(
        Case(LatentAttention, {**SIZES, "absorbed": absorbed}, **FLOAT64, x=(2, 7, 11), mask=RAGGED)
        for absorbed in (False, True)
    ),
    *(
        Case(
            LatentAttention,
            {**SIZES, "absorbed": absorbed, "qkv_bias": True, "out_bias": True},
            **FLOAT64,
            x=(2, 7, 11),
            valid=VALID,
        )
        for absorbed in (False, True)
    ),
    Case(
        LatentAttention,
        {**SIZES, "absorbed": True},
        torch_call=mean,
        flax_call=mean,
        name="absorbed=True,empty=mean",
        **FLOAT64,
        x=(2, 7, 11),
        mask=PADDED,
    ),
    Case(LatentAttention, {**SIZES, "dropout": 0.2}, **FLOAT64, x=(2, 7, 11), train=True),
    Case(
        LatentAttention,
        {
            **{"in_features": 4, "num_heads": 4, "kv_rank": 4, "q_rank": 4},
            **{"nope_dim": 4, "rotary_dim": 4, "value_dim": 4},
        },
        **FLOAT64,
        x=(4, 4, 4),
    ),
    published("deepseek_v2", "DeepseekV2", "Attention", "interleaved", q_rank=None, **BIASED),
    published("deepseek_v2", "DeepseekV2", "Attention", "interleaved", absorbed=True),
    published("deepseek_v3", "DeepseekV3", "Attention", "interleaved", **BIASED),
    published(
        "deepseek_v3",
        "DeepseekV3",
        "Attention",
        "half",
        own={"rope_interleave": False},
        absorbed=True,
        yarn=False,
    ),
    published("minicpm3", "MiniCPM3", "Attention", "half"),
    published("longcat_flash", "LongcatFlash", "MLA", "interleaved", flax_call=scaled_latents),
]


def test_parity(case):
    case.check()
