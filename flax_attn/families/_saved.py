"""Model types whose files name the attention differently from the modules of transformers.

transformers renames on saving and on loading, so that old files stay readable. The rules here are
for the files; `rules` makes them optional, since a model in memory has the other names.

Source: `conversion_mapping.py` of transformers 5.23.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from ..weights.rule import Rule
from . import kimi_linear, olmo_hybrid
from ._config import Config
from ._fused import fused

Rules = Callable[[Config, int], tuple[Rule, ...]]


class Saved(NamedTuple):
    """Names and path of a model type's attention in files.

    Attributes:
      rules: returns the rules of the names in files, from a config and the index of a layer.
      place: path in files, * for each number; "" for the same path as in memory.
    """

    rules: Rules
    place: str = ""


def _always(*rules: Rule) -> Rules:
    return lambda config, index: rules


_ROLES = "{query,key,value} -> {q,k,v}_proj"
_VIT = _always(Rule(f"attention.{_ROLES}"), Rule("output.dense -> o_proj"))
_SWIN = _always(
    Rule(f"self.{_ROLES}"),
    Rule("output.dense -> o_proj"),
    Rule("self.relative_position_bias_table -> relative_position_bias_table"),
)
_SEGFORMER = _always(
    Rule("self.{query,key,value} -> {query,key,value}"),
    Rule("output.dense -> dense"),
    Rule("self.sr -> sequence_reduction"),
    Rule("self.layer_norm -> layer_norm"),
)
_IN_THIRDS = "(n o) i -> n i o"  # rows of queries, keys and values in one weight
_TIPS = _always(*fused("qkv", _IN_THIRDS, bias=True), Rule("proj -> o_proj"))
_NOMIC = _always(*fused("Wqkv", _IN_THIRDS, bias=True), Rule("out_proj -> o_proj"))
_IN_ENCODER = "encoder.layer.*.attention"
_LIKE_VIT = ("audio-spectrogram-transformer", "deit", "ijepa", "pixio")
_LIKE_VIT += ("vit", "vit_mae", "vit_msn", "vivit")
SAVED = {
    **dict.fromkeys(_LIKE_VIT, Saved(_VIT, _IN_ENCODER)),
    **dict.fromkeys(("dinov2", "dinov2_with_registers", "rf_detr_dinov2"), Saved(_VIT)),
    "dinov3_vit": Saved(_always(), "layer.*.attention"),
    "kimi_linear": Saved(kimi_linear.saved_rules),
    "nomic_bert": Saved(_NOMIC, "encoder.layers.*.attn"),
    "olmo_hybrid": Saved(olmo_hybrid.saved_rules),
    "segformer": Saved(_SEGFORMER, "encoder.block.*.*.attention"),
    "swin": Saved(_SWIN),
    "tipsv2_vision_model": Saved(_TIPS, "blocks.*.attn"),
}


def place_in_file(saved: Saved, place: str) -> str:
    """Maps a path in memory to the path in files; its numbers are {} or digits.

    >>> place_in_file(SAVED["segformer"], "stages.1.blocks.2.attention")
    'encoder.block.1.2.attention'
    """
    result = saved.place or place
    for number in re.findall(r"(?<=\.)(?:\d+|{})(?=\.)", place):
        result = result.replace("*", number, 1)
    return result
