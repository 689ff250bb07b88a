"""Decoders whose keys and values come from latents, but for DeepSeek's first."""

from .sizes import FOUR, LINEAR, PLAIN, YARN
from .small import Small

TEMPERED = {"llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 3}
SCALED = {**YARN, **PLAIN, "mscale": 0.7, "mscale_all_dim": 1.3}
BIASED = {"attention_bias": True, "attention_dropout": 0.25}
CONFIGS = [
    # DeepSeek-V3.2
    Small("deepseek_v32", {}, SCALED),
    Small(
        "deepseek_v32",
        {**FOUR, **BIASED, "num_key_value_heads": 4, "index_topk": 2, "index_head_dim": 6},
        PLAIN,
        index=1,
    ),
    # GLM-5, whose third layer reads the choice of the second
    Small(
        "glm_moe_dsa",
        {"num_hidden_layers": 3, "index_topk_freq": 2, "first_k_dense_replace": 3},
        SCALED,
    ),
    Small(
        "glm_moe_dsa",
        {**FOUR, **BIASED, "num_key_value_heads": 4, "index_topk": 2, "index_head_dim": 6}
        | {"indexer_types": ["shared", "full"]},
        PLAIN,
        index=1,
    ),
    # LongCat-Flash
    Small("longcat_flash", {}, SCALED),
    Small("longcat_flash", {**FOUR, **BIASED}, LINEAR, index=1),
    # MiniCPM3
    Small("minicpm3", {"v_head_dim": None}, PLAIN),
    Small("minicpm3", {**FOUR, **BIASED, "num_key_value_heads": 4, "q_lora_rank": None}, SCALED, 1),
    # Mistral 4
    Small("mistral4", {"n_routed_experts": 1}, {**SCALED, **TEMPERED}),
    Small(
        "mistral4",
        {**FOUR, **BIASED, "num_key_value_heads": 4, "q_lora_rank": None, "n_routed_experts": 1}
        | {"rope_interleave": False},
        {**LINEAR, **TEMPERED},
        index=1,
    ),
]
