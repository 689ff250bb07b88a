"""Decoders from before Llama, which have no field for their rotary or no rotary at all."""

from .sizes import FOUR
from .small import Small

EIGHT = {"n_embd": 32, "n_head": 8}
CONFIGS = [
    # CodeGen, whose heads lie in four parts
    Small("codegen", {"n_head": 4, "resid_pdrop": 0.0}),
    Small("codegen", {**EIGHT, "rotary_dim": 2, "attn_pdrop": 0.25}, index=1),
    # GPT-Neo, with a window and without
    Small("gpt_neo", {"window_size": 3}),
    Small("gpt_neo", {"hidden_size": 32, "num_heads": 4, "attention_dropout": 0.25}, index=1),
    Small("gptj", {"resid_pdrop": 0.0}),
    Small("gptj", {**EIGHT, "rotary_dim": 2, "attn_pdrop": 0.25}, index=1),
    # MPT 7B, and 30B with its clamp
    Small("mpt", {}),
    Small(
        "mpt",
        {"d_model": 32, "n_heads": 4, "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}},
        index=1,
    ),
    # MPT with 12 heads, whose slopes are no powers of two
    Small("mpt", {"n_heads": 12}),
    Small("opt", {}),
    Small("opt", {**FOUR, "enable_bias": False, "attention_dropout": 0.25}, index=1),
]
