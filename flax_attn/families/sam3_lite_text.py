"""SAM 3 Lite's encoder of words: SigLIP's attention, but for convolutions at both ends."""

from . import siglip
from ._config import Config, Family

DEFAULTS = {
    **siglip.DEFAULTS,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "use_repmixer_blocks": True,
}


def missing_reason(config: Config, index: int) -> str:
    """The first and the last layer mix tokens by convolutions, where they are asked for."""
    ends = (0, config.count("num_hidden_layers") - 1)
    return (
        "a convolution (use_repmixer_blocks=True)"
        if config.flag("use_repmixer_blocks") and index in ends
        else ""
    )


FAMILY = Family(DEFAULTS, siglip.attention, siglip.rules, missing_reason=missing_reason)
