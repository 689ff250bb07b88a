"""Sizes of small configs, no two of one config equal, and fields that several share."""

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


# What else the class of an alias needs so that its model can be built.
MORE = {
    "dots1": {"n_routed_experts": 2, "n_shared_experts": 1, "moe_intermediate_size": 7},
    "electra": {"embedding_size": 48},
    "emu3_text_model": {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
}
LLAMA_SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 9,
    "vocab_size": 5,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2_SIZES = {
    **{"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 64, "n_inner": 9, "vocab_size": 5},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
BLOOM_SIZES = {
    **{"hidden_size": 48, "n_head": 6, "n_layer": 2, "vocab_size": 5},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
LATENT = {
    **{"q_lora_rank": 10, "kv_lora_rank": 9, "qk_nope_head_dim": 7},
    **{"qk_rope_head_dim": 4, "v_head_dim": 5},
}
INDEX = {
    **{"index_n_heads": 16, "index_head_dim": 8, "index_topk": 3},
    **{"n_routed_experts": 1, "num_experts_per_tok": 1, "first_k_dense_replace": 2},
}
WITHOUT_GROUPS = {k: v for k, v in LLAMA_SIZES.items() if k != "num_key_value_heads"}
IMAGES = {
    **{"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2},
    **{"intermediate_size": 9, "image_size": 4, "patch_size": 2},
}
HEARD = {
    **WITHOUT_GROUPS,
    **{"conv_dim": [4], "conv_stride": [2], "conv_kernel": [3], "num_feat_extract_layers": 1},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
}
STAGES = {
    **{"num_encoder_blocks": 2, "depths": [2, 3], "hidden_sizes": [12, 20]},
    **{"num_attention_heads": [3, 5], "patch_sizes": [2, 2], "strides": [2, 2]},
    **{"mlp_ratios": [1, 1], "image_size": 16},
}
SAM = {
    **{**IMAGES, "image_size": 12, "patch_size": 3, "window_size": 3},
    **{"global_attn_indexes": [1], "output_channels": 4, "num_pos_feats": 4},
}
WINDOWS = {
    **{"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [3, 6]},
    **{"window_size": 2, "mlp_ratio": 1.0},
}
SELECTIVE = {
    **{"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 5, "state_size": 5},
    **{"time_step_rank": 7, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
SELECTED = {
    **{"expand": 3, "use_bias": True, "use_conv_bias": False, "hidden_act": "swish"},
    "time_step_rank": "auto",
}
STATE_SPACE = {
    **{"mamba_n_heads": 8, "mamba_n_groups": 4, "mamba_d_state": 5, "mamba_d_conv": 3},
    **{"rms_norm_eps": 1e-2},
}
TOWER = {
    "hidden_size": 48,
    "depth": 2,
    "num_heads": 6,
    "intermediate_size": 9,
    "out_hidden_size": 11,
    "patch_size": 2,
}
SIZES = {
    "albert": {**WITHOUT_GROUPS, "num_hidden_layers": 4, "embedding_size": 7},
    "bamba": {**LLAMA_SIZES, **STATE_SPACE},
    "bert": {**WITHOUT_GROUPS, "pad_token_id": 0},  # RoBERTa counts its places from there
    "bloom": BLOOM_SIZES,
    "clip_text_model": WITHOUT_GROUPS,
    "clip_vision_model": IMAGES,
    "codegen": {**GPT2_SIZES, "rotary_dim": 4},
    "deberta": {**WITHOUT_GROUPS, "pad_token_id": 0, "relative_attention": True},
    "deberta-v2": {**WITHOUT_GROUPS, "pad_token_id": 0, "relative_attention": True},
    "deepseek_v2": {**WITHOUT_GROUPS, **LATENT},
    "deepseek_v3": {**WITHOUT_GROUPS, **LATENT, "num_key_value_heads": 6},
    "deepseek_v32": {**WITHOUT_GROUPS, **LATENT, **INDEX, "num_key_value_heads": 6},
    "dinov3_vit": IMAGES,
    "distilbert": {
        **{"dim": 48, "n_heads": 6, "n_layers": 2, "hidden_dim": 9, "vocab_size": 5},
        **{"max_position_embeddings": 64, "pad_token_id": 0},
    },
    "falcon": {**WITHOUT_GROUPS, "ffn_hidden_size": 9},
    "falcon_mamba": SELECTIVE,
    "gemma3n_text": {
        **{**LLAMA_SIZES, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 5},
        **{"num_kv_shared_layers": 0, "laurel_rank": 2, "pad_token_id": 0},
    },
    "gemma4_text": {**LLAMA_SIZES, "hidden_size_per_layer_input": 0},
    "glm4v_moe_vision": TOWER,
    "glm4v_vision": TOWER,
    "glm_moe_dsa": {**WITHOUT_GROUPS, **LATENT, **INDEX, "num_key_value_heads": 6},
    "gpt2": GPT2_SIZES,
    "gpt_bigcode": GPT2_SIZES,
    "gpt_neo": {
        **{"hidden_size": 48, "num_heads": 6, "num_layers": 2, "max_position_embeddings": 64},
        **{"vocab_size": 5, "intermediate_size": 9, "attention_types": [[["local", "global"], 1]]},
        **{"bos_token_id": None, "eos_token_id": None},
    },
    "gpt_neox": WITHOUT_GROUPS,
    "gptj": {**GPT2_SIZES, "rotary_dim": 4},
    "granitemoehybrid": {**LLAMA_SIZES, **STATE_SPACE, "num_local_experts": 0},
    "hubert": HEARD,
    "idefics3_vision": IMAGES,
    "internvl_vision": {**IMAGES, "image_size": [4, 4], "patch_size": [2, 2]},
    "jamba": {**LLAMA_SIZES, "mamba_d_state": 5, "num_experts": 1, "num_experts_per_tok": 1},
    "kimi_linear": {**WITHOUT_GROUPS, **LATENT, "num_key_value_heads": 6, "q_lora_rank": None},
    "llama4_vision_model": {**IMAGES, "image_size": 6},
    "longcat_flash": {
        **{key: x for key, x in WITHOUT_GROUPS.items() if key != "num_hidden_layers"},
        **{**LATENT, "head_dim": 4, "num_layers": 2, "zero_expert_num": 1, "n_routed_experts": 1},
        **{"ffn_hidden_size": 9, "expert_ffn_hidden_size": 9, "moe_topk": 1},
    },
    "longformer": {**WITHOUT_GROUPS, "pad_token_id": 0},
    "mamba": SELECTIVE,
    "mamba2": {
        **{"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 5, "num_heads": 8},
        **{"head_dim": 12, "n_groups": 4, "state_size": 5, "conv_kernel": 3},
        **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
    },
    "minicpm3": {**WITHOUT_GROUPS, **LATENT, "num_key_value_heads": 6},
    "mistral4": {**WITHOUT_GROUPS, **LATENT, "num_key_value_heads": 6},
    "mllama_text_model": {
        **{**LLAMA_SIZES, "cross_attention_layers": [1]},
        **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
    },
    "modernbert": {**WITHOUT_GROUPS, "pad_token_id": 0},
    "modernbert-decoder": {
        **WITHOUT_GROUPS,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    },
    "mpt": {"d_model": 48, "n_heads": 6, "n_layers": 2, "vocab_size": 5, "max_seq_len": 64},
    "nemotron_h": {
        **{"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10},
        **{"mamba_num_heads": 8, "mamba_head_dim": 7, "n_groups": 4, "ssm_state_size": 5},
        **{"conv_kernel": 3, "vocab_size": 5, "intermediate_size": 9},
        **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
    },
    "nomic_bert": {**WITHOUT_GROUPS, "pad_token_id": 0},
    "opt": {**WITHOUT_GROUPS, "ffn_dim": 9, "pad_token_id": 0},
    "persimmon": WITHOUT_GROUPS,
    "pixtral": IMAGES,
    "pvt": {**STAGES, "sequence_reduction_ratios": [2, 1]},
    "qwen2_5_vl_vision": TOWER,
    "qwen2_vl_vision": {
        "embed_dim": 48,
        "hidden_size": 13,
        "depth": 2,
        "num_heads": 6,
        "patch_size": 2,
    },
    "qwen3_5_moe_vision": TOWER,
    "qwen3_5_vision": TOWER,
    "qwen3_vl_moe_vision": TOWER,
    "qwen3_vl_vision": TOWER,
    "recurrent_gemma": {**LLAMA_SIZES, "num_hidden_layers": 3},
    "sam3_lite_text_text_model": {**WITHOUT_GROUPS, "projection_dim": 7},
    "sam_hq_vision_model": SAM,
    "sam_vision_model": SAM,
    "segformer": {**STAGES, "sr_ratios": [2, 1]},
    "siglip_text_model": {**WITHOUT_GROUPS, "projection_size": 7},
    "siglip_vision_model": IMAGES,
    "swin": WINDOWS,
    "swinv2": WINDOWS,
    "vit": IMAGES,
    "wav2vec2": HEARD,
    "xlnet": {"d_model": 48, "n_head": 6, "n_layer": 2, "d_inner": 9, "vocab_size": 6},
}
OTHERS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
FOUR = {"num_attention_heads": 4, "hidden_size": 32}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
QWEN = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
QWEN_MOE = {"num_experts": 1, "moe_intermediate_size": 9}
EVERY_SECOND = {"full_attention_interval": 2}
DELTA = {
    **{"linear_num_value_heads": 6, "linear_num_key_heads": 3, "linear_key_head_dim": 4},
    **{"linear_value_head_dim": 5, "linear_conv_kernel_dim": 3},
}
ONE_KEY = {**DELTA, "linear_num_value_heads": 2, "linear_num_key_heads": 1, "num_hidden_layers": 3}
FULL_AND_LINEAR = {"layer_types": ["full_attention", "linear_attention"]}
KIMI = {"linear_num_heads": 3, "linear_head_dim": 7, "linear_conv_kernel_dim": 3}
PUBLISHED_KIMI = {
    "linear_attn_config": {
        **{"kda_layers": [2], "full_attn_layers": [1], "num_heads": 4, "head_dim": 10},
        "short_conv_kernel_size": 2,
    }
}
FIRST_FULL = {"layer_types": ["full_attention", "conv"]}
THREE = {"mrope_section": [1, 1, 2]}
QUARTERS = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
# Without output_hidden_states the whole model leaves tokens out where keys are shared.
SHARING = {
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    **{"num_kv_shared_layers": 2, "output_hidden_states": True},
}
TWELVE = {"head_dim": 12, "global_head_dim": 16}
SHARED = {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
ODD = {"partial_rotary_factor": 0.7}
PLAIN = {"rope_theta": 500.0}
TURNS = {"mrope_interleaved": True}
HALF = {**PLAIN, "partial_rotary_factor": 0.5}
QUARTER = {**PLAIN, "partial_rotary_factor": 0.25}
LINEAR = {"rope_type": "linear", "factor": 3.0, **PLAIN}
