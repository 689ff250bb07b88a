"""Models with Mamba or Mamba 2 in their layers, and attention in none, some or all of them.

Own file: the layer is a recurrence, whose sizes, steps and norms have fields of their own.
"""

from collections.abc import Mapping
from typing import Any, Literal

from .._internal.caller import warn_once
from .._internal.checks import check_choice, check_divides
from ..layers import Mamba, Mamba2
from ..rules import Rules
from ..weights.rule import Rule
from ._config import RENAMED, ByPart, Config, Family
from ._parts import BIASES, Arguments, LayerRules, at, decoder, hybrid
from ._rope import SHARE, rotary
from .decoders import granite_scale

# The gated norm is not a torch class, so its weight needs a rule.
RULES = (Rule("norm.weight -> norm.scale"),)
# Mamba adds the bias of its steps after their projection, as a separate parameter.
SELECTIVE_RULES = (Rule("dt_proj.bias -> dt_bias"),)


def build_mamba2(
    config: Config, init: Mapping[str, Any], eps: str, *, width: int | None = None, **parts: Any
) -> Mamba2:
    """Builds a Mamba 2 layer from a config's sizes and limits.

    Args:
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


def mamba2(eps: str, rules: LayerRules = lambda config, index: RULES, **row: Any) -> Family:
    """The row of Mamba 2; `eps` is the field with the norm's epsilon."""

    def attention(config: Config, index: int, init: Mapping[str, Any]) -> Mamba2:
        return build_mamba2(config, init, eps)

    return Family(attention, rules, **row)


def mamba(
    norms: Literal["gains", "plain"] | None, eps: str = "", width: str = "", **row: Any
) -> Family:
    """The row of Mamba (version 1).

    Args:
      norms: as in the layer.
      eps, width: fields with their epsilon and with the inner width, if there are any.
      row: further attributes of `Family`.
    """

    def attention(config: Config, index: int, init: Mapping[str, Any]) -> Mamba:
        check_choice(config.name("hidden_act"), config["hidden_act"], "silu", "swish")
        hidden, inner = config.count("hidden_size"), config[width] if width else None
        is_auto = config["mamba_dt_rank"] == "auto"
        return Mamba(
            hidden,
            width=config.count("mamba_expand") * hidden if inner is None else inner,
            state_dim=config.count("mamba_d_state"),
            step_rank=None if is_auto else config.count("mamba_dt_rank"),
            conv_size=config.count("mamba_d_conv"),
            conv_bias=config.flag("mamba_conv_bias"),
            use_bias=config.flag("mamba_proj_bias"),
            norms=norms,
            eps=config.number(eps) if eps else 1e-6,
            **init,
        )

    return Family(attention, lambda config, index: SELECTIVE_RULES, **row)


# Which layers have a state space, and what attention layers check.


def heads_fill(config: Config, index: int) -> Arguments:
    """No argument; ValueError for heads of the state space that do not fill its width."""
    head_width(config)
    return {}


def is_recurrent(config: Config, index: int) -> bool:
    """By layer_types; by default all are."""
    kind = config.layer_type(index, lambda index: "linear_attention", "linear_attention")
    return kind == "linear_attention"


def bamba_has_attention(config: Config, index: int) -> bool:
    """By `attn_layer_indices`."""
    return index in config.listed("attn_layer_indices")


def bamba_rotary(config: Config, index: int) -> Arguments:
    """Half of each head is rotated, unless rope_parameters say another share."""
    half = config.defaults[SHARE]
    if config.entry(SHARE) not in (None, half):
        warn_once(
            f"{SHARE}={config.entry(SHARE)!r} is not read by transformers in this model_type: the "
            f"rotary is built with {half}, unless its rope_parameters say another."
        )
        config = config.replaced(**{SHARE: half})
    return {"rotary": rotary(config, partial=True)}


def jamba_has_attention(config: Config, index: int) -> bool:
    """One layer in each period."""
    period, offset = config.count("attn_layer_period"), config.whole("attn_layer_offset")
    if not 0 <= offset < period:
        raise ValueError(
            f"attn_layer_offset must be from 0 to attn_layer_period - 1 = {period - 1}; got "
            f"{offset!r}."
        )
    return index % period == offset


def granite_rotary(config: Config, index: int) -> Arguments:
    """A rotary if the config asks for one."""
    return {"rotary": rotary(config) if config["position_embedding_type"] == "rope" else None}


# Falcon-H1, whose layers have attention and Mamba 2 side by side: their outputs are summed.


def falcon_h1_attention(config: Config, index: int) -> Arguments:
    """The rotary and the scale; attention_in_multiplier and ..._out_multiplier stand outside."""
    head_width(config, _falcon_h1_width(config))
    scale = config.heads()[2] ** -0.5 * config.number("key_multiplier")
    return {"rotary": rotary(config), "rules": Rules(scale=scale)}


def falcon_h1_mamba(config: Config, index: int, init: Mapping[str, Any]) -> Mamba2:
    """`mamba` of a layer of Falcon-H1; ssm_out_multiplier stands outside, behind it."""
    inner, norm = config["ssm_multipliers"] or [1.0] * 5, None
    if not isinstance(inner, list) or len(inner) != 5:
        raise ValueError(
            f"ssm_multipliers must be five numbers, of z, x, B, C and dt; got {inner!r}."
        )
    if config.flag("mamba_rms_norm"):
        norm = "before" if config.flag("mamba_norm_before_gate") else "after"
    multipliers = (config["ssm_in_multiplier"], *inner)
    parts = {
        "norm": norm,
        "out_bias": config.flag("projectors_bias"),
        "multipliers": None if set(multipliers) == {1.0} else multipliers,
    }
    return build_mamba2(config, init, "rms_norm_eps", width=_falcon_h1_width(config), **parts)


def _falcon_h1_width(config: Config) -> int | None:
    return None if config["mamba_d_ssm"] is None else config.count("mamba_d_ssm")


def falcon_h1_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Rules of the norm, if there is one."""
    return RULES if config.flag("mamba_rms_norm") else ()


# Nemotron-H, whose layers are Mamba 2, attention without positions, or no token mixer.


def nemotron_mamba(config: Config, index: int, init: Mapping[str, Any]) -> Mamba2:
    """`mixer` of a layer with a state space."""
    least = config.number("time_step_min") if config["time_step_min"] != 0 else 0.0
    width = config.count("mamba_n_heads") * config.count("mamba_d_head")
    limits = (least, float("inf")) if least > 0 else None
    return build_mamba2(config, init, "layer_norm_epsilon", width=width, step_limits=limits)


def nemotron_missing(config: Config, index: int) -> str:
    """Which layers mix no tokens: those of experts and of an MLP."""
    kind = config["layer_types"][index]
    return "" if kind in ("full_attention", "linear_attention") else f"{kind!r} alone"


def nemotron_kinds(config: Config) -> Config:
    """The config with the kinds of its layers, which say how many there are."""
    kinds, pattern = config["layer_types"], config["hybrid_override_pattern"]
    if kinds is None:
        kinds = _DEFAULT_MIXERS if pattern is None else _kinds_of_letters(pattern)
    if not isinstance(kinds, list | tuple):
        raise ValueError(f"layers_block_type must list kinds of layers; got {kinds!r}.")
    kinds = [RENAMED.get(kind, kind) for kind in kinds]
    for kind in kinds:
        if kind not in _MIXERS:
            raise ValueError(
                f"layers_block_type may have {', '.join(_MIXERS)}; got {kind!r} among {len(kinds)}."
            )
    return config.replaced(layer_types=kinds, num_hidden_layers=len(kinds))


def _kinds_of_letters(pattern: Any) -> list[str]:
    if not isinstance(pattern, str) or not {*pattern} <= {*_LETTERS}:
        raise ValueError(
            f"hybrid_override_pattern must be made of {', '.join(_LETTERS)}; got {pattern!r}."
        )
    return [_LETTERS[letter] for letter in pattern]


def nemotron_is_recurrent(config: Config, index: int) -> bool:
    """By the kinds of layers."""
    return config["layer_types"][index] == "linear_attention"


_LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
_MIXERS = (*_LETTERS.values(),)
_DEFAULT_MIXERS = ("linear_attention", "moe", "full_attention", "mlp")
MAMBA_NAMES = {
    "mamba_expand": ("expand",),
    "mamba_d_state": ("state_size",),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_conv_bias": ("use_conv_bias",),
    "mamba_proj_bias": ("use_bias",),
}
SELECTIVE = {
    "width": "intermediate_size",
    "names": {**MAMBA_NAMES, "mamba_dt_rank": ("time_step_rank",)},
    "defaults": {"intermediate_size": None},
}
MAMBA_FIRST, ATTENTION_FIRST = ("mamba", "self_attn"), ("self_attn", "mamba")
ROWS: Mapping[str, Family | ByPart] = {
    "bamba": hybrid(
        bamba_has_attention,
        decoder(heads_fill, bamba_rotary, BIASES),
        mamba2("rms_norm_eps"),
        ATTENTION_FIRST,
    ),
    "falcon_h1": {
        "attention": decoder(falcon_h1_attention, BIASES, path=at("layers.{}.self_attn")),
        "recurrent": Family(falcon_h1_mamba, falcon_h1_rules, path=at("layers.{}.mamba")),
    },
    "falcon_mamba": mamba("plain", "mixer_rms_eps", **SELECTIVE),
    "granitemoehybrid": hybrid(
        is_recurrent,
        mamba2("rms_norm_eps"),
        decoder(heads_fill, granite_rotary, granite_scale, BIASES),
        MAMBA_FIRST,
        names={"layer_types": ("layer_types", "layers_block_type")},
    ),
    "jamba": hybrid(
        jamba_has_attention, decoder(), mamba("gains", "rms_norm_eps"), ATTENTION_FIRST
    ),
    "mamba": mamba(None, **SELECTIVE),
    "mamba2": mamba2(
        "layer_norm_epsilon",
        names={
            "mamba_n_heads": ("num_heads",),
            "mamba_d_head": ("head_dim",),
            "mamba_n_groups": ("n_groups",),
            **MAMBA_NAMES,
        },
    ),
    "nemotron_h": hybrid(
        nemotron_is_recurrent,
        Family(nemotron_mamba, lambda config, index: RULES),
        decoder(),
        names={
            "mamba_n_heads": ("mamba_num_heads",),
            "mamba_d_head": ("mamba_head_dim",),
            "mamba_n_groups": ("n_groups", "mamba_n_groups"),
            "mamba_d_state": ("ssm_state_size",),
            "mamba_d_conv": ("conv_kernel", "mamba_d_conv"),
            "mamba_conv_bias": ("use_conv_bias", "mamba_conv_bias"),
            "mamba_proj_bias": ("use_bias",),
            "hidden_act": ("mamba_hidden_act",),
            "time_step_min": ("time_step_min", "mamba_dt_min"),
        },
        defaults={"num_hidden_layers": None, "hybrid_override_pattern": None},
        derived=nemotron_kinds,
        missing_reason=nemotron_missing,
    ),
}
