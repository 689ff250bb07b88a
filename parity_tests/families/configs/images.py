"""Encoders of images in stages, and over windows of them."""

from .small import Small

DROPPED = {"attention_probs_dropout_prob": 0.25}
PVT = {"layer_norm_eps": 1e-3, "qkv_bias": False, **DROPPED}
SWIN = {"window_size": 3, "image_size": [14, 18], **DROPPED, "qkv_bias": False}
TRAINED = {"pretrained_window_sizes": [4, 5]}
SAMS = ("sam_hq_vision_model", "sam_vision_model")
SAM = {"image_size": 15, "attention_dropout": 0.25, "qkv_bias": False}
DINO = {
    **{"query_bias": True, "key_bias": True, "proj_bias": False, "rope_theta": 50.0},
    **{"num_attention_heads": 4, "attention_dropout": 0.25, "num_register_tokens": 2},
}
PLAIN = {"query_bias": False, "value_bias": False, "hidden_size": 72}
CONFIGS = [
    Small("dinov3_vit", {}),
    Small("dinov3_vit", DINO, index=1),
    Small("dinov3_vit", PLAIN),
    Small("segformer", {}),
    Small("segformer", DROPPED, index=3),
    Small("pvt", {}),
    Small("pvt", {**PVT, "sequence_reduction_ratios": [3, 1]}, index=1),
    Small("pvt", {"hidden_sizes": [20, 24], "num_attention_heads": [5, 3]}, index=2),
    *(Small(name, {}) for name in SAMS),
    *(Small(name, SAM, index=1) for name in SAMS),
    Small("swin", {}),
    Small("swin", SWIN, index=1),
    Small("swin", {"window_size": 3, "image_size": 24}, index=3),
    Small("swinv2", {}),
    Small("swinv2", {**SWIN, **TRAINED}, index=1),
    Small("swinv2", {**SWIN, **TRAINED, "depths": [1, 2]}, index=2),
]
