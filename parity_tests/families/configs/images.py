"""Encoders of images in stages, and over windows of them."""

from .small import Small

DROPPED = {"attention_probs_dropout_prob": 0.25}
PVT = {"layer_norm_eps": 1e-3, "qkv_bias": False, **DROPPED}
CONFIGS = [
    Small("segformer", {}),
    Small("segformer", DROPPED, index=3),
    Small("pvt", {}),
    Small("pvt", {**PVT, "sequence_reduction_ratios": [3, 1]}, index=1),
    Small("pvt", {"hidden_sizes": [20, 24], "num_attention_heads": [5, 3]}, index=2),
]
