"""Encoders of words and of images."""

from .sizes import FOUR, LINEAR, OTHERS, PLAIN, YARN
from .small import Small

CONFIGS = [
    Small("bert", {}),
    Small("bert", {**FOUR, "is_decoder": True, "attention_probs_dropout_prob": 0.0}, index=1),
    Small("vit", {}),
    Small("siglip_vision_model", {}),
    Small("siglip_vision_model", {**FOUR, "attention_dropout": 0.25}, index=1),
    Small("siglip_text_model", {}),
    Small("siglip_text_model", {**FOUR, "attention_dropout": 0.25}, index=1),
    Small("sam3_lite_text_text_model", {"num_hidden_layers": 4}, index=2),
    Small(
        "sam3_lite_text_text_model",
        {**FOUR, "attention_dropout": 0.25, "use_repmixer_blocks": False},
    ),
    Small("albert", {"num_hidden_groups": 2}, index=3),
    Small("albert", {**FOUR, "attention_probs_dropout_prob": 0.25}),
    Small("clip_text_model", {}),
    Small("clip_text_model", {**FOUR, "attention_dropout": 0.25}, index=1),
    Small("clip_vision_model", {}),
    Small("clip_vision_model", {**FOUR, "attention_dropout": 0.25}, index=1),
    # DeBERTa v3
    Small(
        "deberta-v2",
        {"position_buckets": 4, "max_relative_positions": 9, "share_att_key": True}
        | {"pos_att_type": ["c2p", "p2c"]},
    ),
    Small(
        "deberta-v2",
        {**FOUR, "pos_att_type": "p2c", "attention_probs_dropout_prob": 0.25}
        | {"max_position_embeddings": 20},
        index=1,
    ),
    Small("distilbert", {}),
    Small("distilbert", {"dim": 32, "n_heads": 4, "attention_dropout": 0.0}, index=1),
    Small("eurobert", {"head_dim": 10, "attention_bias": True}, PLAIN),
    Small("eurobert", {**OTHERS, "attention_dropout": 0.25}, {**YARN, **PLAIN}, index=1),
    Small("hubert", {}),
    Small("hubert", {**FOUR, "attention_dropout": 0.0}, index=1),
    Small("idefics3_vision", {}),
    Small("idefics3_vision", {**FOUR, "attention_dropout": 0.25}, index=1),
    Small("internvl_vision", {"use_qk_norm": True}),
    Small("internvl_vision", {**FOUR, "attention_bias": True, "attention_dropout": 0.25}, index=1),
    # ModernBERT: a layer that sees everything, one with a window of its own rotary
    Small("modernbert", {"local_attention": 4}, LINEAR, local=100.0),
    Small(
        "modernbert",
        {**FOUR, "local_attention": 4, "attention_bias": True, "attention_dropout": 0.25},
        PLAIN,
        index=1,
        local=100.0,
    ),
    Small("modernbert-decoder", {"local_attention": 4}, PLAIN, local=100.0),
    Small(
        "modernbert-decoder",
        {**FOUR, "local_attention": 6, "attention_bias": True, "attention_dropout": 0.25},
        PLAIN,
        index=1,
        local=100.0,
    ),
    Small("modernbert-decoder", {"sliding_window": 3}, PLAIN, index=1, local=100.0),
    Small("nomic_bert", {"head_dim": 10}, PLAIN),
    Small("nomic_bert", {**FOUR, "attention_probs_dropout_prob": 0.25}, LINEAR, index=1),
    Small("wav2vec2", {}),
    Small("wav2vec2", {**FOUR, "attention_dropout": 0.0}, index=1),
    # DINO
    Small("vit", {**FOUR, "qkv_bias": False, "attention_probs_dropout_prob": 0.25}),
]
