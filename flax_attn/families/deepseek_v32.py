"""DeepSeek-V3.2: DeepSeek-V3's attention over the keys that an indexer chooses.

GLM-5 has the same, whose indexer rotates neighbouring components as the attention does.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..layers import IndexedSparseAttention
from ..positions import Layout
from . import deepseek_v3
from ._config import Config, Family
from ._latent import NAMES, arguments
from ._rope import rope_of

INDEX = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
DEFAULTS = {
    **{name: x for name, x in deepseek_v3.DEFAULTS.items() if name != "rope_interleave"},
    "max_position_embeddings": 163_840,
    "layer_types": None,
    **INDEX,
}
GLM_DEFAULTS = {
    **DEFAULTS,
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 202_752,
    "index_n_heads": 32,
    "indexer_types": None,
    "index_topk_pattern": None,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> IndexedSparseAttention:
    """`self_attn` of DeepseekV32ForCausalLM."""
    return _indexed(config, index, init, "half")


def of_glm(config: Config, index: int, init: Mapping[str, Any]) -> IndexedSparseAttention:
    """`self_attn` of GlmMoeDsaForCausalLM, where it has an indexer of its own.

    Raises:
      ValueError: for a layer that reads the choice of an earlier one.
    """
    if indexer_type(config, index) != "full":
        raise ValueError(
            f"Layer {index} is not served: by indexer_types, or index_topk_freq and "
            "index_topk_pattern, it has no indexer and reads the choice of an earlier layer."
        )
    return _indexed(config, index, init, "interleaved")


def indexer_type(config: Config, index: int) -> str:
    """ "full" or "shared": by indexer_types, by a pattern, or all but each n-th shared."""
    kinds = config["indexer_types"] or config["index_topk_pattern"]
    if kinds is not None:
        if len(kinds) != config.count("num_hidden_layers"):
            raise ValueError(
                "indexer_types or index_topk_pattern must have an entry for each of "
                f"num_hidden_layers; got {len(kinds)}."
            )
        return str({"F": "full", "S": "shared"}.get(kinds[index], kinds[index]))
    after = max(index - config["index_skip_topk_offset"] + 1, 0)
    return "shared" if after % max(config["index_topk_freq"], 1) else "full"


def _indexed(
    config: Config, index: int, init: Mapping[str, Any], layout: Layout
) -> IndexedSparseAttention:
    config.count("q_lora_rank")  # queries of the indexer are made of their latent
    config.layer_type(index, lambda index: "indexed_attention", "indexed_attention")
    parts = arguments(config, init, "interleaved", rope_of(config))
    return IndexedSparseAttention(
        **parts,
        index_heads=config.count("index_n_heads"),
        index_dim=config.count("index_head_dim"),
        top_k=config.count("index_topk"),
        index_rotary=replace(parts["rotary"], layout=layout),
    )


FAMILY = Family(DEFAULTS, attention, names=NAMES)
GLM = Family(GLM_DEFAULTS, of_glm, names=NAMES)
