"""Two small configs of each family, in both spellings, with all sizes different."""

from dataclasses import dataclass, field
from typing import Any

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@dataclass(frozen=True)
class Small:
    """One config: its fields, its rotary, and which layer is looked at."""

    name: str
    fields: dict[str, Any]
    rope: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    local: float | None = None  # the base of layers with a window, where they have their own
    alias: str = ""  # another model_type with the same attention, and this config in its words

    @property
    def model_type(self) -> str:
        """Its own, or its alias."""
        return self.alias or self.name

    def spelt(self, spelling: str) -> dict[str, Any]:
        """The config as files have it since transformers 5 ("new"), or before ("old")."""
        sizes = {**SIZES.get(self.name, LLAMA_SIZES), **MORE.get(self.alias, {})}
        first = {"model_type": self.model_type, **sizes, **self.fields}
        if not self.rope:
            return first
        if self.name in LATEST:
            spelling = "new"
        scaling = {k: v for k, v in self.rope.items() if k not in ("rope_theta", *BESIDE)}
        if spelling == "new":
            full = {"rope_type": "default", **self.rope}
            sliding = {"rope_type": "default", "rope_theta": self.local}
            both = {"full_attention": full, "sliding_attention": sliding}
            return {**first, "rope_parameters": full if self.local is None else both}
        if "rope_type" in scaling and self.local is None:  # Gemma 3 came later
            scaling["type"] = scaling.pop("rope_type")
        beside = {"rope_theta": self.rope["rope_theta"], "rope_scaling": scaling or None}
        beside |= {key: self.rope[key] for key in BESIDE if key in self.rope}
        beside = {OLD_NAMES.get((self.name, key), key): x for key, x in beside.items()}
        local = {"rope_local_base_freq": self.local} if self.name == "gemma3_text" else {}
        return {**first, **beside, **local}


LATEST = ("gemma4_text",)  # which never had the older spelling
BESIDE = ("partial_rotary_factor",)  # of the rotary, but not in the older rope_scaling
OLD_NAMES = {
    ("gpt_neox", "rope_theta"): "rotary_emb_base",
    ("gpt_neox", "partial_rotary_factor"): "rotary_pct",
}
# What else the class of an alias needs so that its model can be built.
MORE = {
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
WITHOUT_GROUPS = {k: v for k, v in LLAMA_SIZES.items() if k != "num_key_value_heads"}
IMAGES = {
    **{"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2},
    **{"intermediate_size": 9, "image_size": 4, "patch_size": 2},
}
SIZES = {
    "bert": {**WITHOUT_GROUPS, "pad_token_id": 0},  # RoBERTa counts its places from there
    "bloom": BLOOM_SIZES,
    "deepseek_v2": {**WITHOUT_GROUPS, **LATENT},
    "deepseek_v3": {**WITHOUT_GROUPS, **LATENT, "num_key_value_heads": 6},
    "gemma4_text": {**LLAMA_SIZES, "hidden_size_per_layer_input": 0},
    "falcon": {**WITHOUT_GROUPS, "ffn_hidden_size": 9},
    "gpt2": GPT2_SIZES,
    "gpt_bigcode": GPT2_SIZES,
    "gpt_neox": WITHOUT_GROUPS,
    "siglip_text_model": {**WITHOUT_GROUPS, "projection_size": 7},
    "siglip_vision_model": IMAGES,
    "vit": IMAGES,
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
QUARTER = {**PLAIN, "partial_rotary_factor": 0.25}
LINEAR = {"rope_type": "linear", "factor": 3.0, **PLAIN}

CONFIGS = [
    Small("llama", {"head_dim": 10, "attention_bias": True}, PLAIN),
    # Llama 3.2 in small
    Small(
        "llama",
        {**OTHERS, "attention_dropout": 0.25},
        {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 16},
    ),
    Small("llama", {"head_dim": 10}, {**YARN, **PLAIN, "mscale": 0.7, "mscale_all_dim": 1.3}),
    Small("llama", {"head_dim": 10}, LINEAR),
    Small(
        "llama",
        {"head_dim": 10, "max_position_embeddings": 4},
        {"rope_type": "dynamic", "factor": 3.0, **PLAIN},
    ),
    Small("mistral", {"head_dim": 10, "sliding_window": 3}, PLAIN),
    # Mistral 0.3
    Small("mistral", {**OTHERS, "sliding_window": None, "attention_dropout": 0.25}, PLAIN),
    Small("qwen2", {**QWEN, "attention_dropout": 0.25}, PLAIN, index=1),
    # Qwen2.5 with its window left out
    Small("qwen2", {**OTHERS, **QWEN, "use_sliding_window": False}, {**YARN, **PLAIN}, index=1),
    Small("qwen3", {"head_dim": 10, "attention_bias": True, "rms_norm_eps": 1e-2}, PLAIN),
    Small("qwen3", {**OTHERS, **QWEN, "head_dim": 12}, {**YARN, **PLAIN}, index=1),
    Small(
        "gemma2",
        {**WINDOWS, "head_dim": 10, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0},
        PLAIN,
    ),
    Small(
        "gemma2",
        {**OTHERS, "head_dim": 12, "sliding_window": 3, "attn_logit_softcapping": None}
        | {"attention_bias": True, "query_pre_attn_scalar": 144},
        PLAIN,
        index=1,
    ),
    Small("smollm3", {"no_rope_layers": [1, 0], **QWEN, "attention_bias": True}, PLAIN, index=1),
    Small("smollm3", {**OTHERS, "no_rope_layer_interval": 2}, {**YARN, **PLAIN}),
    Small("olmo2", {"head_dim": 10, "rms_norm_eps": 1e-2, "attention_bias": True}, PLAIN),
    Small("olmo2", {**OTHERS, "attention_dropout": 0.25}, PLAIN),
    Small("cohere", {"head_dim": 10, "use_qk_norm": True, "layer_norm_eps": 1e-2}, PLAIN),
    Small("cohere", {**OTHERS, "attention_bias": True}, PLAIN),
    Small("phi3", {"sliding_window": 3}, {**PLAIN, "partial_rotary_factor": 0.5}),
    # Phi-4-mini, whose sequences are longer than those of its training
    Small(
        "phi3",
        {**OTHERS, "original_max_position_embeddings": 4},
        {
            **PLAIN,
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [2.0, 3.0, 5.0],
            "partial_rotary_factor": 0.75,
        },
    ),
    Small("phi3", OTHERS, {**PLAIN, "partial_rotary_factor": 0.7}),  # 5 of 8 components
    Small("gpt_oss", {"head_dim": 10, **WINDOWS}, {**PLAIN, "rope_type": "default"}),
    Small(
        "gpt_oss",
        {**OTHERS, "head_dim": 12, "sliding_window": 3, "attention_bias": False},
        {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "rope_theta": 15e4},
        index=1,
    ),
    Small("gemma3_text", {"head_dim": 10, **WINDOWS, "rms_norm_eps": 1e-2}, PLAIN, local=100.0),
    Small(
        "gemma3_text",
        {**OTHERS, "head_dim": 12, "sliding_window": 3, "sliding_window_pattern": 2},
        {**PLAIN, "rope_type": "linear", "factor": 8.0},
        index=1,
        local=100.0,
    ),
    Small(
        "gemma3_text",
        {"head_dim": 10, **WINDOWS, "sliding_window": 4, "use_bidirectional_attention": True},
        PLAIN,
        local=100.0,
    ),
    Small(
        "llama4_text",
        {"head_dim": 10, "no_rope_layers": [1, 0], "attention_chunk_size": 3, "use_qk_norm": True}
        | {"rms_norm_eps": 1e-2, "num_local_experts": 1},
        PLAIN,
    ),
    Small(
        "llama4_text",
        {**OTHERS, "head_dim": 12, "no_rope_layer_interval": 2, "floor_scale": 3}
        | {"attn_scale": 0.7, "attention_bias": True, "attention_chunk_size": 3},
        {**LLAMA3, **PLAIN, "original_max_position_embeddings": 16},
        index=1,
    ),
    # DeepSeek-V2-Lite
    Small(
        "deepseek_v2",
        {"q_lora_rank": None, "attention_dropout": 0.25},
        {**YARN, **PLAIN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    Small("deepseek_v2", {**FOUR, "attention_bias": True}, LINEAR, index=1),
    Small("deepseek_v3", {}, {**YARN, **PLAIN, "mscale": 0.7, "mscale_all_dim": 1.3}),
    Small(
        "deepseek_v3",
        {**FOUR, "num_key_value_heads": 4, "attention_bias": True, "rope_interleave": False},
        PLAIN,
        index=1,
    ),
    # GPT-2 as Mistral trained it, whose scale is another in every layer
    Small(
        "gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": False}, index=2
    ),
    Small("gpt2", {"n_embd": 32, "n_head": 4, "scale_attn_weights": False, "attn_pdrop": 0.0}),
    # StarCoder
    Small("gpt_bigcode", {"resid_pdrop": 0.0}),
    Small("gpt_bigcode", {"n_embd": 32, "n_head": 4, "multi_query": False}, index=1),
    # Pythia
    Small("gpt_neox", {}, {**PLAIN, "partial_rotary_factor": 0.25}),
    Small("gpt_neox", {**FOUR, "attention_bias": False}, {**PLAIN, "partial_rotary_factor": 0.7}),
    Small(
        "gpt_neox",
        {},
        {**PLAIN, "partial_rotary_factor": 1.0, "rope_type": "linear", "factor": 3.0},
    ),
    # Bloom with 12 heads, whose slopes are no powers of two
    Small("bloom", {"n_head": 12, "attention_dropout": 0.25}),
    Small("bloom", {"hidden_size": 32, "n_head": 4}, index=1),
    # Falcon 7B, Falcon 40B, Falcon-RW
    Small("falcon", {}, PLAIN),
    Small(
        "falcon", {**FOUR, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True}, PLAIN
    ),
    Small("falcon", {"multi_query": False, "alibi": True, "num_attention_heads": 12, "bias": True}),
    Small("bert", {}),
    Small("bert", {**FOUR, "is_decoder": True, "attention_probs_dropout_prob": 0.0}, index=1),
    Small("vit", {}),
    # Gemma 2B
    Small("gemma", {"head_dim": 10, "num_key_value_heads": 1}, PLAIN),
    Small("gemma", {**OTHERS, "head_dim": 12, "attention_bias": True}, LINEAR),
    # Qwen1.5-MoE
    Small("qwen2_moe", {**QWEN, "attention_dropout": 0.25}, PLAIN),
    Small("qwen2_moe", {**OTHERS, **QWEN, "qkv_bias": False}, {**YARN, **PLAIN}, index=1),
    # Qwen3 30B-A3B
    Small("qwen3_moe", {"head_dim": 10, "rms_norm_eps": 1e-2, **QWEN_MOE}, PLAIN),
    Small("qwen3_moe", {**OTHERS, **QWEN, "attention_bias": True}, {**YARN, **PLAIN}, index=1),
    # Qwen3-Next 80B-A3B: a layer with full attention, two with a delta rule
    Small("qwen3_next", {"head_dim": 16, "rms_norm_eps": 1e-2, **EVERY_SECOND}, QUARTER, index=1),
    Small("qwen3_next", {"rms_norm_eps": 1e-2, **DELTA, **EVERY_SECOND}, QUARTER),
    Small("qwen3_next", {**OTHERS, **ONE_KEY, "hidden_act": "swish"}, QUARTER, index=2),
    Small(
        "qwen3_next",
        {**OTHERS, "head_dim": 12, "attention_bias": True, "attention_dropout": 0.25}
        | {"layer_types": ["full_attention", "linear_attention"]},
        {**YARN, **PLAIN, "partial_rotary_factor": 0.5},
    ),
    # LFM2: a layer with full attention, two with a convolution, another with full attention
    Small("lfm2", {"full_attn_idxs": [1], "norm_eps": 1e-2}, PLAIN, index=1),
    Small("lfm2", {"full_attn_idxs": [1], "conv_L_cache": 4}, PLAIN),
    Small("lfm2", {**OTHERS, **FIRST_FULL, "conv_bias": True}, PLAIN, index=1),
    Small("lfm2", {**OTHERS, **FIRST_FULL, "head_dim": 10}, {**YARN, **PLAIN}),
    # Qwen3.5, as Qwen3-Next
    Small(
        "qwen3_5_text",
        {"head_dim": 16, "rms_norm_eps": 1e-2, **EVERY_SECOND},
        {
            **PLAIN,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        index=1,
    ),
    Small("qwen3_5_text", {"rms_norm_eps": 1e-2, **DELTA, **EVERY_SECOND}, QUARTER),
    Small("qwen3_5_text", {**OTHERS, **ONE_KEY, "hidden_act": "swish"}, QUARTER, index=2),
    Small(
        "qwen3_5_text",
        {**OTHERS, "head_dim": 12, "attention_bias": True, "attention_dropout": 0.25}
        | {"layer_types": ["full_attention", "linear_attention"]},
        {**YARN, **PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]},
    ),
    # Gemma 4 26B, where keys are values too; a layer with a window; E2B, whose last ones share keys
    Small(
        "gemma4_text", {**TWELVE, **SHARED, "rms_norm_eps": 1e-2}, {**QUARTERS, **PLAIN}, 1, 100.0
    ),
    Small(
        "gemma4_text",
        {**OTHERS, **WINDOWS, "head_dim": 12, "attention_bias": True, "attention_dropout": 0.25},
        {**QUARTERS, **PLAIN},
        local=100.0,
    ),
    Small(
        "gemma4_text",
        {**TWELVE, **SHARING, "sliding_window": 3, "use_bidirectional_attention": "vision"},
        {**LINEAR, **PLAIN},
        index=1,
        local=100.0,
    ),
    # OLMo 3, whose rotary is stretched where there is no window
    Small("olmo3", {"rms_norm_eps": 1e-2, **WINDOWS}, {**YARN, **PLAIN}, index=1, local=5e5),
    Small("olmo3", {**OTHERS, "attention_bias": True, "sliding_window": 3}, PLAIN, local=5e5),
    # Granite 3
    Small("granite", {"attention_multiplier": 0.25}, PLAIN),
    Small("granite", {**OTHERS, "head_dim": 10, "attention_bias": True}, LINEAR),
    # GLM-4 9B
    Small("glm4", {"head_dim": 12}, {**PLAIN, "partial_rotary_factor": 0.5}),
    Small("glm4", {**OTHERS, "head_dim": 10, "attention_bias": False}, {**PLAIN, **ODD}),
    # Qwen2.5-VL
    Small("qwen2_5_vl_text", {}, {**PLAIN, "rope_type": "mrope", "mrope_section": [2, 1, 1]}),
    Small("qwen2_5_vl_text", {**OTHERS, **QWEN}, {**YARN, **PLAIN, **THREE}, index=1),
    Small("siglip_vision_model", {}),
    Small("siglip_vision_model", {**FOUR, "attention_dropout": 0.25}, index=1),
    Small("siglip_text_model", {}),
    Small("siglip_text_model", {**FOUR, "attention_dropout": 0.25}, index=1),
    # DINO
    Small("vit", {**FOUR, "qkv_bias": False, "attention_probs_dropout_prob": 0.25}),
]
NAMES = tuple(dict.fromkeys(small.name for small in CONFIGS))
BOTH = [(small, spelling) for small in CONFIGS for spelling in ("new", "old")]


def place(small: Small) -> int:
    """Which config of its family it is, from 0."""
    return [x for x in CONFIGS if x.name == small.name].index(small)


def titled(value: Any) -> str | None:
    """The id of a parameter of a test."""
    return f"{value.name}-{place(value)}" if isinstance(value, Small) else None
