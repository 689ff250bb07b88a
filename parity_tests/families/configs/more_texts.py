"""Encoders of words that count distances, or look at a window."""

from .sizes import FOUR
from .small import Small

BOTH_TERMS = {"pos_att_type": ["c2p", "p2c"]}
CONFIGS = [
    Small("deberta", {**BOTH_TERMS, "max_relative_positions": 4}),
    Small(
        "deberta",
        {**FOUR, "pos_att_type": "p2c", "attention_probs_dropout_prob": 0.25}
        | {"max_position_embeddings": 20},
        index=1,
    ),
    Small("longformer", {"attention_window": 4}),
    Small(
        "longformer",
        {**FOUR, "attention_window": [4, 6], "attention_probs_dropout_prob": 0.25},
        index=1,
    ),
    Small("xlnet", {}),
    Small("xlnet", {"d_model": 32, "n_head": 4, "attn_type": "uni", "dropout": 0.25}, index=1),
]
