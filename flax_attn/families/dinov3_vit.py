"""DINOv3: an image encoder with rotary positions by the centre of each patch.

Call it `layer(x, positions=...)`, `2 *B T`: row and column of each patch's centre, from -2 pi at
one border to 2 pi at the other, and 0 for the class token and the registers. In training the model
shifts and rescales these positions, as the fields pos_embed_... say.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..positions import Axial, Rotary
from ._config import Config, Family
from ._encoder import multi_head
from ._parts import at

DEFAULTS = {
    **{"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6},
    **{"attention_dropout": 0.0, "rope_theta": 100.0},
    **{"query_bias": True, "key_bias": False, "value_bias": True, "proj_bias": True},
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attention` of DINOv3ViTModel.

    Raises:
      ValueError: for biases of queries and values that differ, for one of the keys alone, and for
        rotary parameters beside rope_theta, which the class does not read, and for heads whose
        width is no multiple of 4.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if config.entry(name) is not None:
            raise ValueError(f"{name} is not read by this model_type; say its base as rope_theta.")
    query, key, value = (config.flag(f"{part}_bias") for part in ("query", "key", "value"))
    if query != value or (key and not query):
        raise ValueError(
            "query_bias and value_bias must be one, and key_bias=True needs both; got "
            f"query_bias={query}, key_bias={key}, value_bias={value}."
        )
    n, h = config.query_heads()
    if h % 4:
        raise ValueError(
            "hidden_size must be a multiple of 4 num_attention_heads, so that rows and columns "
            f"turn as many pairs; got hidden_size={config['hidden_size']}, num_attention_heads={n}."
        )
    biases = {"qkv_bias": query, "key_bias": key, "out_bias": config.flag("proj_bias")}
    rope = Rotary(config.number("rope_theta"), "half", axes=Axial())
    return multi_head(config, init, rotary=rope, **biases)


FAMILY = Family(DEFAULTS, attention, path=at("model.layer.{}.attention"))
