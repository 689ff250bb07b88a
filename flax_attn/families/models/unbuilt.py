"""Why a model type is not built whole: which part of it is missing here."""

from collections.abc import Mapping
from typing import Any

from .. import hybrids, staged_towers, state_space
from .._choose import family_entry
from .._config import Family
from .._published import ALIASES, facts_of
from .rows import ROWS

CROSSES = "mllama_text_model"
RECURRENT = {*hybrids.ROWS, *state_space.ROWS} - {CROSSES}


def why_not(config: Mapping[str, Any]) -> str:
    """The error message for a model_type that is not built whole.

    Raises:
      ValueError: for a model_type whose attention is not served either.

    >>> print(why_not({"model_type": "t5"}).partition(".")[0])
    model_type 't5' is not built whole, since it has an encoder and a decoder
    """
    entry, name = family_entry(config), config["model_type"]
    family = ALIASES.get(name, name)
    if not isinstance(entry, Family) and "encoder" in entry:
        reason = "it has an encoder and a decoder"
    elif family == CROSSES:
        reason = "some of its layers attend to images"
    elif family in RECURRENT:
        reason = "it has layers that are recurrences or convolutions"
    elif _has_experts(config):
        reason = "its feed-forward part has experts"
    elif family in staged_towers.ROWS:
        reason = "its image is reduced or cut into windows between its layers"
    else:
        reason = "no row says what its norms, its feed-forward part and its embeddings are"
    return (
        f"model_type {name!r} is not built whole, since {reason}. `families.attention` builds its "
        f"attention, layer by layer; built whole are {', '.join(ROWS)}."
    )


def _has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the class of a config has a number of experts, and the config does not say zero."""
    facts = facts_of(config["model_type"])
    known = (*facts.further, *facts.ignored, *facts.defaults)
    if "enable_moe_block" in known:
        return bool(config.get("enable_moe_block"))
    counts = [x for x in known if x.startswith(("num", "n_", "moe_num")) and x.endswith("experts")]
    routed = [x for x in counts if "shared" not in x]
    return any(config.get(x, 1) for x in routed) or "moe_topk" in known
