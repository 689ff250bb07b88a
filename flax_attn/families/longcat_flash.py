"""LongCat-Flash: DeepSeek-V2's attention, whose latents are scaled after their norms.

A layer has two of them, of the same sizes. Own file: the norm that scales is a layer of its own.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from ..layers import LatentAttention
from ..norms import RMSNorm
from ..rules import Rules
from ._config import Config, Family
from ._parts import renamed
from ._rope import rope_of
from .deepseek import arguments as latent_arguments

# Its rotary is as wide as head_dim says, which is no other width than that of the rotated part.
NAMES = {"num_hidden_layers": ("num_layers",), "head_dim": ("qk_rope_head_dim", "head_dim")}


class Magnified(RMSNorm):
    """A norm whose outputs are multiplied by a number.

    Args:
      features: as of `RMSNorm`.
      factor: the number.
      more: keywords of `RMSNorm`.
    """

    def __init__(self, features: int, factor: float, **more: Any):
        super().__init__(features, **more)
        self.factor = factor

    def __call__(self, x: Float[Array, "*X H"]) -> Float[Array, "*X H"]:
        """x, normed and multiplied."""
        return super().__call__(x) * self.factor


def attention(config: Config, index: int, init: Mapping[str, Any]) -> LatentAttention:
    """Either of `self_attn` of a layer of LongcatFlashForCausalLM.

    The factor of the queries' latent is one of the logits.

    Raises:
      ValueError: for a qk_head_dim that is not the sum of its parts.
    """
    parts = [config.count(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if config["qk_head_dim"] not in (None, sum(parts)):
        raise ValueError(
            f"qk_head_dim must be qk_nope_head_dim + qk_rope_head_dim, {sum(parts)}, or None; got "
            f"{config['qk_head_dim']!r}."
        )
    arguments = latent_arguments(config, init, "interleaved", rope_of(config))
    width, rank = config.count("hidden_size"), config.count("kv_lora_rank")
    magnified = (width / config.count("q_lora_rank")) ** 0.5
    arguments["rules"] = Rules(scale=arguments["rules"].scale * magnified)
    layer = LatentAttention(**arguments)
    norm: dict[str, Any] = {"eps": 1e-6, "cast": "before", "param_dtype": init["param_dtype"]}
    layer.kv_a_layernorm = Magnified(rank, (width / rank) ** 0.5, **norm)
    return layer


PLACES = ("layers.{}.self_attn.0", "layers.{}.self_attn.1")
ROWS = {
    "longcat_flash": Family(
        attention,
        renamed("kv_a_layernorm.weight -> kv_a_layernorm.scale"),
        NAMES,
        path=lambda config, index: PLACES,
    )
}
