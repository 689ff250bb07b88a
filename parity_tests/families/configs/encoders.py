"""Encoders of words and of images."""

from .sizes import FOUR
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
    # DINO
    Small("vit", {**FOUR, "qkv_bias": False, "attention_probs_dropout_prob": 0.25}),
]
