"""Where the classes of each model_type are, and what a layer may have in place of attention."""

from .aliases import PLACES as OTHERS
from .place import Place

PLACES = {
    "bamba": Place("bamba", "Bamba", gives="tuple"),
    "bert": Place("bert", "Bert", block="Layer"),
    "bloom": Place("bloom", "Bloom", block="Block", gives="tuple"),
    "cohere": Place("cohere", "Cohere"),
    "deepseek_v2": Place("deepseek_v2", "DeepseekV2"),
    "deepseek_v3": Place("deepseek_v3", "DeepseekV3"),
    "falcon": Place("falcon", "Falcon", gives="tuple"),
    "falcon_mamba": Place("falcon_mamba", "FalconMamba", block="Block"),
    "gemma": Place("gemma", "Gemma"),
    "gemma2": Place("gemma2", "Gemma2"),
    "gemma3_text": Place("gemma3", "Gemma3", "Text"),
    "gemma4_text": Place("gemma4", "Gemma4", "Text"),
    "glm4": Place("glm4", "Glm4"),
    "gpt2": Place("gpt2", "GPT2", block="Block"),
    "gpt_bigcode": Place("gpt_bigcode", "GPTBigCode", block="Block"),
    "gpt_neox": Place("gpt_neox", "GPTNeoX", block="Layer"),
    "gpt_oss": Place("gpt_oss", "GptOss"),
    "granite": Place("granite", "Granite"),
    "granitemoehybrid": Place("granitemoehybrid", "GraniteMoeHybrid"),
    "jamba": Place("jamba", "Jamba", block="AttentionDecoderLayer MambaDecoderLayer"),
    "kimi_linear": Place("kimi_linear", "KimiLinear"),
    "lfm2": Place("lfm2", "Lfm2"),
    "llama": Place("llama", "Llama"),
    "llama4_text": Place("llama4", "Llama4", "Text"),
    "mamba": Place("mamba", "Mamba", block="Block"),
    "mamba2": Place("mamba2", "Mamba2", block="Block"),
    "minimax": Place("minimax", "MiniMax", keeps=True),
    "mistral": Place("mistral", "Mistral"),
    "nemotron_h": Place("nemotron_h", "NemotronH", block="Block"),
    "olmo2": Place("olmo2", "Olmo2"),
    "olmo3": Place("olmo3", "Olmo3"),
    "olmo_hybrid": Place(
        "olmo_hybrid", "OlmoHybrid", block="AttentionDecoderLayer LinearAttentionDecoderLayer"
    ),
    "phi3": Place("phi3", "Phi3"),
    "qwen2": Place("qwen2", "Qwen2"),
    "qwen2_5_vl_text": Place("qwen2_5_vl", "Qwen2_5_VL", "Text"),
    "qwen2_moe": Place("qwen2_moe", "Qwen2Moe"),
    "qwen3": Place("qwen3", "Qwen3"),
    "qwen3_5_text": Place("qwen3_5", "Qwen3_5", "Text"),
    "qwen3_moe": Place("qwen3_moe", "Qwen3Moe"),
    "qwen3_next": Place("qwen3_next", "Qwen3Next"),
    "recurrent_gemma": Place(
        "recurrent_gemma", "RecurrentGemma", hands=("position_ids", "use_cache"), keeps=True
    ),
    "siglip_text_model": Place("siglip", "Siglip", "Text", whole=False),
    "siglip_vision_model": Place("siglip", "Siglip", "Vision", whole=False),
    "smollm3": Place("smollm3", "SmolLM3"),
    "vit": Place("vit", "ViT", whole=False),
    **OTHERS,
}
# What a layer has in place of attention, by its kind in layer_types.
MIXERS = {
    "bamba": {"linear_attention": "Mixer"},
    "falcon_mamba": {"linear_attention": "Mixer"},
    "granitemoehybrid": {"linear_attention": "MambaLayer"},
    "jamba": {"linear_attention": "MambaMixer"},
    "kimi_linear": {"linear_attention": "DeltaAttention"},
    "lfm2": {"conv": "ShortConv"},
    "mamba": {"linear_attention": "Mixer"},
    "mamba2": {"linear_attention": "Mixer"},
    "minimax": {"linear_attention": "LightningAttention"},
    "nemotron_h": {"linear_attention": "Mamba2Mixer"},
    "olmo_hybrid": {"linear_attention": "GatedDeltaNet"},
    "qwen3_next": {"linear_attention": "GatedDeltaNet"},
    "qwen3_5_text": {"linear_attention": "GatedDeltaNet"},
    "recurrent_gemma": {"linear_attention": "RecurrentBlock"},
}
