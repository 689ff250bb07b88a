"""UMT5: T5 with a bias in every layer except cross attention."""

from collections.abc import Mapping
from typing import Any

from ..layers import T5Attention
from ..masks import CAUSAL
from . import t5
from ._config import Config, Family
from ._decoder import check_causal

DEFAULTS = {**t5.DEFAULTS, "num_heads": 6, "num_layers": 8}


def encoder(config: Config, index: int, init: Mapping[str, Any]) -> T5Attention:
    """`SelfAttention` of the encoder's blocks."""
    return t5.layer(config, init)


def decoder(config: Config, index: int, init: Mapping[str, Any]) -> T5Attention:
    """`SelfAttention` of the decoder's blocks."""
    check_causal(config)
    return t5.layer(config, init, bidirectional=False, mask=CAUSAL)


FAMILY = {
    "encoder": Family(DEFAULTS, encoder, names=t5.ENCODER, path=t5.IN_ENCODER),
    "decoder": Family(DEFAULTS, decoder, names=t5.DECODER, path=t5.IN_DECODER),
    "cross": Family(DEFAULTS, t5.cross, names=t5.DECODER, path=t5.ACROSS),
}
