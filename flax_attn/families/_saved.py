"""Model types whose files name the attention differently from the modules of transformers.

transformers renames on saving and on loading, so that old files stay readable. The rules here are
for the files; `rules` makes them optional, since a model in memory has the other names.

Source: `conversion_mapping.py` of transformers 5.24.
"""

import re
from typing import NamedTuple

from ..weights.rule import Rule
from ._fused import fused
from ._parts import LayerRules, renamed
from .hybrids import kimi_saved_rules, olmo_saved_rules


class Saved(NamedTuple):
    """Names and path of a model type's attention in files.

    Attributes:
      rules: returns the rules of the names in files, from a config and the index of a layer.
      place: path in files, * for each number; "" for the same path as in memory.
    """

    rules: LayerRules
    place: str = ""


def _in_thirds(name: str, out: str) -> LayerRules:
    """Rules of a weight with the rows of queries, then of keys, then of values."""
    rules = (*fused(name, "(n o) i -> n i o", bias=True), Rule(f"{out} -> o_proj"))
    return lambda config, index: rules


_ROLES = "{query,key,value} -> {q,k,v}_proj"
_VIT = renamed(f"attention.{_ROLES}", "output.dense -> o_proj")
_SWIN = renamed(
    f"self.{_ROLES}",
    "output.dense -> o_proj",
    "self.relative_position_bias_table -> relative_position_bias_table",
)
_SEGFORMER = renamed(
    "self.{query,key,value} -> {query,key,value}",
    "output.dense -> dense",
    "self.sr -> sequence_reduction",
    "self.layer_norm -> layer_norm",
)
_IN_ENCODER = "encoder.layer.*.attention"
_LIKE_VIT = ("audio-spectrogram-transformer", "deit", "ijepa", "pixio")
_LIKE_VIT += ("vit", "vit_mae", "vit_msn", "vivit")
SAVED = {
    **dict.fromkeys(_LIKE_VIT, Saved(_VIT, _IN_ENCODER)),
    **dict.fromkeys(("dinov2", "dinov2_with_registers", "rf_detr_dinov2"), Saved(_VIT)),
    "dinov3_vit": Saved(renamed(), "layer.*.attention"),
    "kimi_linear": Saved(kimi_saved_rules),
    "nomic_bert": Saved(_in_thirds("Wqkv", "out_proj"), "encoder.layers.*.attn"),
    "olmo_hybrid": Saved(olmo_saved_rules),
    "segformer": Saved(_SEGFORMER, "encoder.block.*.*.attention"),
    "swin": Saved(_SWIN),
    "tipsv2_vision_model": Saved(_in_thirds("qkv", "proj"), "blocks.*.attn"),
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
