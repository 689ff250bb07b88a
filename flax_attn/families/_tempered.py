"""Logits that grow with the query's position, from Mistral's rotary parameters."""

from ._config import Config
from ._rope import Rope, original
from .llama4_text import Temperature

BETA = "llama_4_scaling_beta"
MORE = (BETA, "max_position_embeddings")  # rotary parameters; the latter is ignored there


def tempered(config: Config, rope: Rope) -> Temperature:
    """`logit * (1 + beta log(1 + floor(q / length)))`, where `length` is the training length.

    Raises:
      ValueError: if the rotary parameters lack beta or the length.
    """
    beta, length = rope.get(BETA), rope.get("original_max_position_embeddings")
    if isinstance(beta, bool) or not isinstance(beta, int | float):
        raise ValueError(f"{BETA} must be a number in the rotary parameters; got {beta!r}.")
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        length = original(rope, config)
    if isinstance(length, bool) or not isinstance(length, int | float) or length <= 0:
        raise ValueError(
            "original_max_position_embeddings must be a length in the rotary parameters, which "
            f"the logits' temperature is counted by; got {length!r}."
        )
    return Temperature(length, beta, first=0)
