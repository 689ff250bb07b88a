"""Shared by families with Mamba or Mamba 2 in their layers."""

from collections.abc import Mapping
from typing import Any, Literal

from .._internal.checks import check_choice, check_divides
from ..layers import Mamba, Mamba2
from ..weights.rule import Rule
from ._config import Config

FIELDS: Mapping[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, float("inf")),
    "hidden_act": "silu",
}
# The gated norm is not a torch class, so its weight needs a rule.
RULES = (Rule("norm.weight -> norm.scale"),)
# Mamba adds the bias of its steps after their projection, as a separate parameter.
SELECTIVE_RULES = (Rule("dt_proj.bias -> dt_bias"),)


def mamba2(
    config: Config, init: Mapping[str, Any], eps: str, *, width: int | None = None, **parts: Any
) -> Mamba2:
    """Builds a Mamba 2 layer from a config's sizes and limits.

    Args:
      config: of the model.
      init: rngs and dtypes.
      eps: name of the field with the norm's epsilon.
      width: of all heads together; None for `mamba_expand * hidden_size`.
      parts: further arguments of the layer.

    Raises:
      ValueError: for an activation other than silu, heads that do not fill the width, limits that
        are not two numbers in order.
    """
    check_choice(config.name("hidden_act"), config["hidden_act"], "silu", "swish")
    n, groups = config.count("mamba_n_heads"), config.count("mamba_n_groups")
    check_divides(config.name("mamba_n_groups"), groups, config.name("mamba_n_heads"), n)
    if "step_limits" not in parts:
        parts["step_limits"] = limits(config)
    layer_kwargs: dict[str, Any] = {
        "eps": config.number(eps),
        "use_bias": config.flag("mamba_proj_bias"),
    }
    return Mamba2(
        config.count("hidden_size"),
        n,
        config.count("mamba_d_state"),
        head_width(config, width),
        groups=groups,
        conv_size=config.count("mamba_d_conv"),
        conv_bias=config.flag("mamba_conv_bias"),
        **{**layer_kwargs, **parts, **init},
    )


def mamba(
    config: Config,
    init: Mapping[str, Any],
    norms: Literal["gains", "plain"] | None,
    eps: float = 1e-6,
    width: int | None = None,
) -> Mamba:
    """Builds a Mamba (version 1) layer from a config's sizes.

    Args:
      config: of the model.
      init: rngs and dtypes.
      norms, eps: as in the layer.
      width: inner width; None for `mamba_expand * hidden_size`.

    Raises:
      ValueError: for an activation other than silu.
    """
    check_choice(config.name("hidden_act"), config["hidden_act"], "silu", "swish")
    hidden, rank = config.count("hidden_size"), config["mamba_dt_rank"]
    return Mamba(
        hidden,
        width=config.count("mamba_expand") * hidden if width is None else width,
        state_dim=config.count("mamba_d_state"),
        step_rank=None if rank == "auto" else config.count("mamba_dt_rank"),
        conv_size=config.count("mamba_d_conv"),
        conv_bias=config.flag("mamba_conv_bias"),
        use_bias=config.flag("mamba_proj_bias"),
        norms=norms,
        eps=eps,
        **init,
    )


def head_width(config: Config, width: int | None = None) -> int:
    """Width of a head; "auto" means the whole width divided by the number of heads.

    Raises:
      ValueError: if heads do not fill the width.
    """
    heads = config.count("mamba_n_heads")
    name, each = config.name("mamba_d_head"), config["mamba_d_head"]
    expected = "the width" if width is not None else f"{config.name('mamba_expand')} * hidden_size"
    whole = config.count("mamba_expand") * config.count("hidden_size") if width is None else width
    if each == "auto":
        return check_divides(config.name("mamba_n_heads"), heads, expected, whole)
    if config.count("mamba_d_head") * heads != whole:
        raise ValueError(
            f"{config.name('mamba_n_heads')} * {name} must be {expected} = {whole}; got {heads} * "
            f"{each}."
        )
    return each


def limits(config: Config) -> tuple[float, float] | None:
    """Minimum and maximum step, or None if they do not restrict it."""
    pair = config["time_step_limit"]
    is_pair = isinstance(pair, list | tuple) and len(pair) == 2
    if not is_pair or not all(isinstance(x, int | float) for x in pair) or not pair[0] <= pair[1]:
        raise ValueError(
            f"time_step_limit must be two numbers, the lesser one first; got {pair!r}."
        )
    return None if pair[0] <= 0 and pair[1] == float("inf") else (pair[0], pair[1])


def is_recurrent(config: Config, index: int) -> bool:
    """Whether a layer has a state space, by layer_types; by default all do."""
    kind = config.layer_type(index, lambda index: "linear_attention", "linear_attention")
    return kind == "linear_attention"
