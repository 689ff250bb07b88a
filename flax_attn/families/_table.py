"""Maps each model_type to its row."""

from collections.abc import Mapping

from . import (
    deberta,
    decoders,
    deepseek,
    diffllama,
    encoders,
    fused_decoders,
    gemma4,
    hybrids,
    llama4,
    longcat_flash,
    staged_towers,
    state_space,
    t5,
    towers,
    xlnet,
)
from ._config import ByPart, Family
from ._published import ALIASES

FAMILIES: Mapping[str, Family | ByPart] = {
    **decoders.ROWS,
    **fused_decoders.ROWS,
    **encoders.ROWS,
    **hybrids.ROWS,
    **towers.ROWS,
    **staged_towers.ROWS,
    # Files of their own, since their arithmetic differs.
    **deberta.ROWS,
    **deepseek.ROWS,
    **diffllama.ROWS,
    **gemma4.ROWS,
    **llama4.ROWS,
    **longcat_flash.ROWS,
    **state_space.ROWS,
    **t5.ROWS,
    **xlnet.ROWS,
}
# All supported model types, including aliases.
TYPES: tuple[str, ...] = tuple(sorted({*FAMILIES, *ALIASES}))
