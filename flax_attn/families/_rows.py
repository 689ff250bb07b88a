"""Model types that share another family's attention, with different defaults, names or fields.

They are not aliases, since their classes in transformers have different code.
"""

from collections.abc import Callable, Mapping
from typing import Any

from . import (
    cohere,
    exaone4,
    granite,
    hunyuan_v1_dense,
    lfm2,
    llama,
    mistral,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
    qwen3_vl_text,
)
from ._config import Config, Family
from ._decoder import decoder_fields

Of = Callable[..., Any]


def fixed(of: Of, **fields: Any) -> Of:
    """Returns `attention` or `rules` of a family with fields fixed, whatever a file contains.

    >>> of = fixed(lambda config, index: config["bias"], bias=True)
    >>> of(Config({"bias": False}, {}), 0)
    True
    """

    def changed(config: Config, *more: Any) -> Any:
        return of(config.replaced(**fields), *more)

    return changed


# ERNIE has no dropout and no norms.
ERNIE = {"attention_dropout": 0.0, "use_qk_norm": False}
BIAS = {"attention_bias": ("use_bias",)}
ROWS: Mapping[str, Family] = {
    # Apertus: Qwen3 without windows, with a scaled rotary by default.
    "apertus": Family(
        {
            **decoder_fields(4096, 32, 32, positions=65_536, theta=12_000_000.0),
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0},
                **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 8192,
            },
        },
        fixed(qwen3_moe.attention, use_sliding_window=False),
    ),
    # CWM: Mistral with a scaled rotary and without a window in every fourth layer.
    "cwm": Family(
        {
            **decoder_fields(
                6144, 64, 48, kv_heads=8, head_dim=128, positions=131_072, theta=1_000_000.0
            ),
            "sliding_window": 8192,
            "layer_types": None,
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0},
                **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 8192,
            },
        },
        mistral.one_in_four,
    ),
    # ERNIE 4.5: Cohere without norms and dropout, with another name for the biases.
    "ernie4_5": Family(
        {
            **decoder_fields(
                1024, 18, 16, kv_heads=2, head_dim=128, positions=131_072, theta=500_000.0
            ),
            "use_bias": False,
        },
        fixed(cohere.attention, **ERNIE),
        names=BIAS,
    ),
    "ernie4_5_moe": Family(
        {
            **decoder_fields(2560, 28, 20, kv_heads=4, positions=131_072, theta=500_000.0),
            "use_bias": False,
        },
        fixed(cohere.attention, **ERNIE),
        names=BIAS,
    ),
    # EXAONE-MoE: EXAONE 4.
    "exaone_moe": Family(exaone4.DEFAULTS, exaone4.attention),
    # Granite-MoE: Granite with as many key heads as query heads by default.
    "granitemoe": Family(granite.DEFAULTS, granite.attention),
    # Hunyuan-MoE: Hunyuan.
    "hunyuan_v1_moe": Family(
        hunyuan_v1_dense.DEFAULTS, hunyuan_v1_dense.attention, hunyuan_v1_dense.rules
    ),
    # InternLM3: Llama, with qkv_bias as another name for the biases.
    "internlm3": Family(
        {
            **decoder_fields(
                4096, 48, 32, kv_heads=2, head_dim=128, positions=32_768, theta=10_000.0
            ),
            **{"attention_bias": False, "mlp_bias": False},
        },
        llama.with_one_bias,
        names={
            "attention_bias": ("attention_bias", "qkv_bias"),
            "mlp_bias": ("mlp_bias", "bias"),
        },
    ),
    # LFM2-MoE: LFM2, with the types of layers from layer_types only.
    "lfm2_moe": Family(
        {
            **{key: x for key, x in lfm2.DEFAULTS.items() if key != "full_attn_idxs"},
            "hidden_size": 2048,
        },
        fixed(lfm2.attention, full_attn_idxs=None),
        fixed(lfm2.rules, full_attn_idxs=None),
        path=fixed(lfm2.path, full_attn_idxs=None),
    ),
    # Ministral: Mistral, where some layers may have no window.
    "ministral": Family(
        {
            **decoder_fields(4096, 32, 32, kv_heads=8, positions=131_072, theta=10_000.0),
            "sliding_window": 4096,
            "layer_types": None,
        },
        mistral.by_kind,
    ),
    # Qwen3.5-MoE: the layers of Qwen3.5, narrower.
    "qwen3_5_moe_text": Family(
        {
            **qwen3_5_text.DEFAULTS,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
        },
        qwen3_5_text.attention,
        qwen3_5_text.rules,
        path=qwen3_next.path,
    ),
    # Qwen3-VL-MoE's text model: Qwen3-VL's, narrower.
    "qwen3_vl_moe_text": Family(
        {
            **qwen3_vl_text.DEFAULTS,
            **decoder_fields(2048, 24, 16, kv_heads=16, positions=128_000, theta=500_000.0),
        },
        qwen3_vl_text.attention,
    ),
    # Qwen3-Omni's thinker: Qwen3-VL's text model with head_dim derived from hidden_size.
    "qwen3_omni_moe_text": Family(
        {
            **qwen3_vl_text.DEFAULTS,
            **decoder_fields(2048, 28, 28, kv_heads=4, positions=32_768, theta=1_000_000.0),
        },
        qwen3_vl_text.attention,
    ),
    # StarCoder 2: Mistral with biases.
    "starcoder2": Family(
        {
            **decoder_fields(3072, 30, 24, kv_heads=2, positions=4096, theta=10_000.0),
            "sliding_window": None,
            "use_bias": True,
        },
        mistral.biased,
        names=BIAS,
    ),
}
