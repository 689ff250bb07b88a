"""Model types that have another family's attention, with defaults, names or fixed fields of theirs.

They are no aliases, since their classes in transformers are written in other words.
"""

from collections.abc import Callable, Mapping
from typing import Any

from . import qwen3_5_text, qwen3_vl_text
from ._config import Config, Family
from ._decoder import decoder_fields

Of = Callable[..., Any]


def fixed(of: Of, **fields: Any) -> Of:
    """`attention` or `rules` of a family, with what this class does whatever a file says.

    >>> of = fixed(lambda config, index: config["bias"], bias=True)
    >>> of(Config({"bias": False}, {}), 0)
    True
    """

    def changed(config: Config, *more: Any) -> Any:
        return of(config.replaced(**fields), *more)

    return changed


ROWS: Mapping[str, Family] = {
    # Qwen3.5-MoE: the layers of Qwen3.5, narrower.
    "qwen3_5_moe_text": Family(
        {
            **qwen3_5_text.DEFAULTS,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
        },
        qwen3_5_text.attention,
        qwen3_5_text.rules,
    ),
    # Qwen3-VL-MoE's text: that of Qwen3-VL, narrower.
    "qwen3_vl_moe_text": Family(
        {
            **qwen3_vl_text.DEFAULTS,
            **decoder_fields(2048, 24, 16, kv_heads=16, positions=128_000, theta=500_000.0),
        },
        qwen3_vl_text.attention,
    ),
    # Qwen3-Omni's thinker: Qwen3-VL's text with a width of heads that follows from hidden_size.
    "qwen3_omni_moe_text": Family(
        {
            **qwen3_vl_text.DEFAULTS,
            **decoder_fields(2048, 28, 28, kv_heads=4, positions=32_768, theta=1_000_000.0),
        },
        qwen3_vl_text.attention,
    ),
}
