"""Falcon Mamba: Mamba whose steps, B and C are normalized without gains."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ._config import Config, Family
from ._state_space import mamba
from .mamba import DEFAULTS, NAMES, rules


def attention(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`mixer` of a layer of FalconMambaForCausalLM."""
    eps, width = config.number("mixer_rms_eps"), config["intermediate_size"]
    return mamba(config, init, "plain", eps, width)


FAMILY = Family({**DEFAULTS, "mixer_rms_eps": 1e-6}, attention, rules, names=NAMES)
