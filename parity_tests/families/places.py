"""Where the classes of a model_type are, and what a layer may have in place of attention.

A type that is not listed has them where transformers' own tables say, with the usual names.
"""

from . import calls, image_calls, text_calls
from .aliases import PLACES as OTHERS
from .place import Place, Places

PLACES = Places(
    {
        "albert": Place("albert", "Albert", output="dense", whole=False),
        "bamba": Place("bamba", "Bamba", gives="tuple"),
        "bert": Place("bert", "Bert", block="Layer"),
        "bloom": Place("bloom", "Bloom", block="Block", gives="tuple"),
        "clip_text_model": Place("clip", "CLIP", "Text", whole=False, causal=True),
        "clip_vision_model": Place("clip", "CLIP", "Vision", whole=False),
        "codegen": Place("codegen", "CodeGen", block="Block"),
        "deberta": Place(
            "deberta", "Deberta", attention="DisentangledSelfAttention", called=text_calls.DEBERTA
        ),
        "deberta-v2": Place(
            "deberta_v2", "DebertaV2", attention="DisentangledSelfAttention", called=calls.DEBERTA
        ),
        "dinov3_vit": Place("dinov3_vit", "DINOv3ViT", called=image_calls.DINO),
        "distilbert": Place("distilbert", "DistilBert", attention="SelfAttention", whole=False),
        "falcon": Place("falcon", "Falcon", gives="tuple"),
        "falcon_mamba": Place("falcon_mamba", "FalconMamba", block="Block"),
        "gemma3_text": Place("gemma3", "Gemma3", "Text"),
        "gemma3n_text": Place("gemma3n", "Gemma3n", "Text"),
        "gemma4_text": Place("gemma4", "Gemma4", "Text"),
        "glm4v_moe_text": Place("glm4v_moe", "Glm4vMoe", "Text"),
        "glm4v_moe_vision": Place("glm4v_moe", "Glm4vMoe", "Vision", called=calls.TOWER),
        "glm4v_text": Place("glm4v", "Glm4v", "Text"),
        "glm4v_vision": Place("glm4v", "Glm4v", "Vision", called=calls.TOWER),
        "glm_moe_dsa": Place("glm_moe_dsa", "GlmMoeDsa", gives="tuple"),
        "gpt2": Place("gpt2", "GPT2", block="Block"),
        "gpt_bigcode": Place("gpt_bigcode", "GPTBigCode", block="Block"),
        "gpt_neo": Place("gpt_neo", "GPTNeo", block="Block", gives="tuple"),
        "gpt_neox": Place("gpt_neox", "GPTNeoX", block="Layer"),
        "gptj": Place("gptj", "GPTJ", block="Block"),
        "hubert": Place("hubert", "Hubert", whole=False, path="encoder.layers.{}.attention"),
        "idefics3_vision": Place("idefics3", "Idefics3", "Vision", whole=False),
        "internlm3": Place("llama", "Llama", config="internlm3.InternLM3"),
        "internvl_vision": Place("internvl", "InternVL", "Vision", whole=False),
        "jamba": Place("jamba", "Jamba", block="AttentionDecoderLayer MambaDecoderLayer"),
        "llama4_text": Place("llama4", "Llama4", "Text"),
        "llama4_vision_model": Place("llama4", "Llama4", "Vision", called=calls.LLAMA4),
        "longcat_flash": Place("longcat_flash", "LongcatFlash", attention="MLA"),
        "longformer": Place(
            "longformer",
            "Longformer",
            path="encoder.layer.{}.attention.self",
            called=text_calls.LONGFORMER,
        ),
        "mamba": Place("mamba", "Mamba", block="Block"),
        "mamba2": Place("mamba2", "Mamba2", block="Block"),
        "mllama_text_model": Place(
            "mllama",
            "Mllama",
            "Text",
            block="SelfAttentionDecoderLayer",
            attention="SelfAttention",
            crossing="cross_attention_layers",
        ),
        "modernbert": Place("modernbert", "ModernBert", block="EncoderLayer"),
        "modernbert-decoder": Place("modernbert_decoder", "ModernBertDecoder", block="Layer"),
        "mpt": Place("mpt", "Mpt", block="Block", gives="tuple"),
        "nemotron_h": Place("nemotron_h", "NemotronH", block="Block"),
        "nomic_bert": Place("nomic_bert", "NomicBert", block="Layer"),
        "olmo_hybrid": Place(
            "olmo_hybrid", "OlmoHybrid", block="AttentionDecoderLayer LinearAttentionDecoderLayer"
        ),
        "opt": Place("opt", "OPT", width="word_embed_proj_dim"),
        "pixtral": Place("pixtral", "Pixtral", config="PixtralVision", called=calls.PIXTRAL),
        "pvt": Place("pvt", "Pvt", path=image_calls.pvt_path, called=image_calls.PVT),
        "qwen2_5_vl_text": Place("qwen2_5_vl", "Qwen2_5_VL", "Text"),
        "qwen2_5_vl_vision": Place("qwen2_5_vl", "Qwen2_5_VL", "Vision", called=calls.TOWER),
        "qwen2_vl_vision": Place(
            "qwen2_vl", "Qwen2VL", "Vision", attention="VisionAttention", called=calls.TOWER
        ),
        "qwen3_5_moe_text": Place("qwen3_5_moe", "Qwen3_5Moe", "Text"),
        "qwen3_5_moe_vision": Place("qwen3_5_moe", "Qwen3_5Moe", "Vision", called=calls.TOWER),
        "qwen3_5_text": Place("qwen3_5", "Qwen3_5", "Text"),
        "qwen3_5_vision": Place("qwen3_5", "Qwen3_5", "Vision", called=calls.TOWER),
        "qwen3_omni_moe_text": Place(
            "qwen3_omni_moe", "Qwen3OmniMoeThinker", "Text", config="Qwen3OmniMoe"
        ),
        "qwen3_vl_moe_text": Place("qwen3_vl_moe", "Qwen3VLMoe", "Text"),
        "qwen3_vl_moe_vision": Place("qwen3_vl_moe", "Qwen3VLMoe", "Vision", called=calls.TOWER),
        "qwen3_vl_text": Place("qwen3_vl", "Qwen3VL", "Text"),
        "qwen3_vl_vision": Place("qwen3_vl", "Qwen3VL", "Vision", called=calls.TOWER),
        "recurrent_gemma": Place(
            "recurrent_gemma", "RecurrentGemma", hands=("position_ids", "use_cache")
        ),
        "sam3_lite_text_text_model": Place("sam3_lite_text", "Sam3LiteText", "Text", whole=False),
        "sam_hq_vision_model": Place(
            "sam_hq",
            "SamHQ",
            "Vision",
            path="vision_encoder.layers.{}.attn",
            called=image_calls.SAM,
        ),
        "sam_vision_model": Place(
            "sam", "Sam", "Vision", path="vision_encoder.layers.{}.attn", called=image_calls.SAM
        ),
        "segformer": Place(
            "segformer",
            "Segformer",
            path=image_calls.segformer_path,
            called=image_calls.SEGFORMER,
        ),
        "siglip_text_model": Place("siglip", "Siglip", "Text", whole=False),
        "siglip_vision_model": Place("siglip", "Siglip", "Vision", whole=False),
        "swin": Place("swin", "Swin", path=image_calls.swin_path, called=image_calls.SWIN),
        "swinv2": Place("swinv2", "Swinv2", path=image_calls.swin_path, called=image_calls.SWIN2),
        "vit": Place("vit", "ViT", whole=False),
        "wav2vec2": Place("wav2vec2", "Wav2Vec2", whole=False, path="encoder.layers.{}.attention"),
        "xlnet": Place("xlnet", "XLNet", path="layer.{}.rel_attn", called=text_calls.XLNET),
        **OTHERS,
    }
)
# What a layer has in place of attention, by its kind in layer_types.
MIXERS = {
    "bamba": {"linear_attention": "Mixer"},
    "falcon_mamba": {"linear_attention": "Mixer"},
    "granitemoehybrid": {"linear_attention": "MambaLayer"},
    "jamba": {"linear_attention": "MambaMixer"},
    "kimi_linear": {"linear_attention": "DeltaAttention"},
    "lfm2": {"conv": "ShortConv"},
    "lfm2_moe": {"conv": "ShortConv"},
    "mamba": {"linear_attention": "Mixer"},
    "mamba2": {"linear_attention": "Mixer"},
    "minimax": {"linear_attention": "LightningAttention"},
    "nemotron_h": {"linear_attention": "Mamba2Mixer"},
    "olmo_hybrid": {"linear_attention": "GatedDeltaNet"},
    "qwen3_next": {"linear_attention": "GatedDeltaNet"},
    "qwen3_5_moe_text": {"linear_attention": "GatedDeltaNet"},
    "qwen3_5_text": {"linear_attention": "GatedDeltaNet"},
    "recurrent_gemma": {"linear_attention": "RecurrentBlock"},
}
