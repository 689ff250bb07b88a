"""SAM 3 Lite's text encoder: SigLIP's attention, except for convolutions at both ends."""

from . import siglip
from ._config import Config, Family

DEFAULTS = {
    **siglip.DEFAULTS,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "use_repmixer_blocks": True,
}


def missing_reason(config: Config, index: int) -> str:
    """Why a layer has no attention: the first and last may be convolutions."""
    ends = (0, config.count("num_hidden_layers") - 1)
    return (
        "a convolution (use_repmixer_blocks=True)"
        if config.flag("use_repmixer_blocks") and index in ends
        else ""
    )


FAMILY = Family(DEFAULTS, siglip.attention, siglip.rules, missing_reason=missing_reason)
