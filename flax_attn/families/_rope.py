"""Rotary positions from configs.

Files since transformers 5 have one dict, `rope_parameters`. Older ones have `rope_theta` and a dict
`rope_scaling`, whose type is called `type` or `rope_type`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from .._internal.arrays import is_count
from .._internal.caller import warn_once
from ..positions import (
    DynamicScaling,
    Frequencies,
    Layout,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    Proportional,
    Rotary,
    Scaling,
    Sections,
    Yarn,
)
from ..positions.scaling import plain_rates
from ._config import Config, above_zero
from ._kinds import KINDS

Rope = Mapping[str, Any]
SHARE, SECTIONS, INTERLEAVED = "partial_rotary_factor", "mrope_section", "mrope_interleaved"
INTERLEAVED_KEYS = (INTERLEAVED, "interleaved")  # in Qwen3-VL's files and in Qwen3-Omni's
PLAIN = ("rope_theta", SHARE, SECTIONS, *INTERLEAVED_KEYS)  # of every rotary, scaled or not
IGNORED = {"attn_factor"}  # fields that other programs read, and transformers does not


def rotary(
    config: Config,
    *,
    layout: Layout = "half",
    partial: bool = False,
    renamed: Mapping[str, str] = MappingProxyType({}),
    sections: Sequence[int] | None = None,
    interleaved: bool = False,
) -> Rotary:
    """Returns the rotary of a config whose layers all have the same.

    Args:
      config: of the model.
      layout: of the pairs.
      partial: whether `partial_rotary_factor` may leave components of a head unrotated.
      renamed: types of scaling that older files of this family name differently.
      sections: default of `mrope_section`, the number of rotary pairs per position axis; None if a
        token has one position.
      interleaved: whether the sections are interleaved.

    Raises:
      ValueError: for parameters that give no rotary.
    """
    rope = rope_of(
        config, () if sections is None else (SECTIONS, *(INTERLEAVED_KEYS if interleaved else []))
    )
    rope["rope_type"] = renamed.get(rope["rope_type"], rope["rope_type"])
    result = rotary_of(config, rope, layout=layout, partial=partial)
    for word in INTERLEAVED_KEYS:
        if rope.get(word, True) is not True:
            warn_once(
                f"{word}={rope[word]!r} is not read by transformers in this model_type, whose "
                "sections take turns: the rotary is built without it."
            )
    if sections is None:
        return result
    pairs = (config.query_heads()[1] if result.width is None else result.width) // 2
    if isinstance(result.scaling, Frequencies):
        pairs = len(result.scaling.values)
    sizes = _sections(rope, pairs, sections, interleaved)
    return replace(result, axes=Sections(sizes, interleaved))


def rope_of(config: Config, more: Sequence[str] = ()) -> dict[str, Any]:
    """Rotary parameters of a config whose layers all have the same; `more` extends `KEYS`."""
    new, old = config.entry("rope_parameters"), config.entry("rope_scaling")
    if new is None and not old:  # the older spelling also overrides the class's default
        new = config.defaults.get("rope_parameters")
    return {"rope_type": "default", **parameters(config, new, old, known=(*KEYS, *more))}


def rotary_of_kind(
    config: Config, kind: str, local: str, full: str = "rope_theta", *, scales_both: bool = False
) -> Rotary:
    """Returns the rotary of one layer type, if layers with a window have a different one.

    The fields of a `rope_scaling` replace those of the dict of its layers.

    Args:
      config: of the model.
      kind: "full_attention" or "sliding_attention".
      local, full: the fields with the base of layers with a window, and of others, in older files.
      scales_both: whether rope_scaling is of all layers; else of those without a window.
    """
    is_full = kind == "full_attention"
    theta = full if is_full else local
    new, old = config.entry("rope_parameters"), config.entry("rope_scaling")
    new = None if new is None else _by_kind(config, new).get(kind)
    if not old or not (is_full or scales_both):
        return _of_dict(config, parameters(config, new, None, theta))
    for name, rope in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(rope, Mapping | None):
            raise ValueError(f"{name} must be a dict of rotary parameters; got {rope!r}.")
    new = {"rope_type": "default"} if new is None else new
    for key in new.keys() & old.keys() - {"rope_type"}:
        if new[key] != old[key]:
            warn_once(
                f"rope_parameters have {key}={new[key]!r} beside a rope_scaling with "
                f"{old[key]!r}, which transformers reads: the rotary is built with the latter."
            )
    return _of_dict(config, parameters(config, {**new, **old}, None, theta))


def rotary_by_kind(config: Config, kind: str, *, partial: bool = False) -> Rotary:
    """Returns the rotary of one layer type, for a model_type without an older spelling.

    `partial` is as in `rotary`.

    Raises:
      ValueError: for a rope_scaling, or without a dict for this layer type.
    """
    new = _by_kind(config, config["rope_parameters"])
    if kind not in new or config.entry("rope_scaling"):
        raise ValueError(no_kinds(config, config.entry("rope_scaling") or new))
    for name in ("rope_theta", SHARE):
        value, inside = config.entry(name), [(rope or {}).get(name) for rope in new.values()]
        if value is not None and any(each != value for each in inside):
            warn_once(
                f"{name}={value!r} beside rope_parameters by kind of layer is not read by "
                "transformers in this model_type: the rotary is built with what their dicts say."
            )
    return _of_dict(config, _standard("rope_parameters", new[kind], KEYS), partial=partial)


def _of_dict(config: Config, rope: Rope, *, partial: bool = False) -> Rotary:
    """The rotary of one layer type by its dict alone, but for a `truncate` beside the dicts."""
    name, unread = "original_max_position_embeddings", dict[str, Any]()
    truncate = (config.entry("rope_parameters") or {}).get("truncate", True)
    if rope.get("truncate", True) != truncate:
        unread["truncate"] = rope.get("truncate", True)
    if config.entry(name) not in (None, rope.get(name)):
        unread[name] = config.entry(name)
    for key, value in unread.items():
        warn_once(
            f"{key}={value!r} is not read by transformers where kinds of layers have rotary "
            "parameters of their own: the rotary is built without it."
        )
    config = config.replaced(**{name: None})
    return rotary_of(config, {**rope, "truncate": truncate}, partial=partial)


def shares_in_file(config: Config) -> list[Any]:
    """The values of `partial_rotary_factor` that the config itself contains; None for no value."""
    dicts = (config.entry(name) for name in ("rope_parameters", "rope_scaling"))
    return [config.entry(SHARE), *(x.get(SHARE) for x in dicts if isinstance(x, Mapping))]


def _by_kind(config: Config, new: Any) -> dict[str, Any]:
    """Returns the dicts of `rope_parameters` by layer type, without other entries.

    transformers ignores other entries. They warn unless some layer type has the same value.
    """
    if not isinstance(new, Mapping):
        raise ValueError(no_kinds(config, new))
    kinds = {kind: rope for kind, rope in new.items() if kind in KINDS}
    for key, value in new.items():
        is_other = key not in (*kinds, "truncate")
        if is_other and all((rope or {}).get(key) != value for rope in kinds.values()):
            warn_once(
                f"rope_parameters have {key}={value!r} beside {', '.join(kinds)}, where "
                "transformers does not read it: the rotary is built without it."
            )
    return kinds


def no_kinds(config: Config, new: Any) -> str:
    """Error message for rotary parameters that are not by layer type."""
    keys = ", ".join(map(str, new)) if isinstance(new, Mapping) else repr(new)
    return (
        f"rope_parameters of a {config.entry('model_type')} have a dict for each of "
        f"{', '.join(KINDS)}; got {keys}."
    )


def parameters(
    config: Config,
    new: Rope | None,
    old: Rope | None,
    theta: str = "rope_theta",
    known: Sequence[str] = (),
) -> dict[str, Any]:
    """Merges both spellings into one dict.

    Args:
      config: of the model.
      new: `rope_parameters`, or None.
      old: `rope_scaling`, or None.
      theta: the field next to `rope_scaling` with the base.
      known: keys allowed in such a dict, `KEYS` if empty.

    As transformers does, takes `rope_scaling` before `rope_parameters`, and what stands in either
    before what stands beside it. Warns of what that leaves unread.
    """
    known = known or KEYS
    fields = {
        "rope_theta": config.entry(theta),
        SHARE: config.entry(SHARE),
    }
    first = _standard("rope_parameters", new, known)
    rope = _standard("rope_scaling", old, known) or first
    for key, value in first.items():
        if rope.get(key, fields.get(key)) != value:
            warn_once(
                f"rope_parameters have {key}={value!r} beside a rope_scaling, which transformers "
                "reads alone: the rotary is built without it."
            )
    for key, value in fields.items():
        name = config.name(theta if key == "rope_theta" else key)
        if value is not None and rope.setdefault(key, value) != value:
            warn_once(
                f"The config says {name}={value!r} and {key}={rope[key]!r} in its rotary "
                "parameters, which transformers reads: the rotary is built with the latter."
            )
    defaults = {"rope_theta": config[theta], SHARE: config[SHARE]}
    return {**{k: v for k, v in defaults.items() if v is not None}, **rope}


def _standard(name: str, rope: Rope | None, known: Sequence[str]) -> dict[str, Any]:
    """Returns rotary parameters without None values, with their type under `rope_type`."""
    if not rope:
        return {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{name} must be a dict of rotary parameters; got {rope!r}.")
    # To transformers a truncate that is null is false; any other field that is null is not there.
    fields = {key: x for key, x in rope.items() if x is not None or key == "truncate"}
    for key in IGNORED & fields.keys():
        warn_once(
            f"{name} has {key}={fields.pop(key)!r}, which transformers does not read: the rotary "
            "is built without it. attention_factor is what multiplies cos and sin."
        )
    for key in sorted(fields.keys() - {*known, "type"}):
        warn_once(
            f"{name} has {key}={fields.pop(key)!r}, which no rotary reads: it is built without it. "
            f"Read are {', '.join(known)}."
        )
    kind = fields.pop("type", None)
    if kind is not None and fields.setdefault("rope_type", kind) != kind:
        warn_once(
            f"{name} says type={kind!r} and rope_type={fields['rope_type']!r}, which transformers "
            "reads: the rotary is built with the latter."
        )
    untyped = sorted(fields.keys() - {"rope_type", *PLAIN})
    if untyped and fields.get("rope_type", "default") == "default":
        warn_once(
            f"{name} has {', '.join(untyped)} and no rope_type that scales, one of "
            f"{', '.join(SCALINGS)}: the rotary is built without, as transformers does."
        )
    if not isinstance(fields.setdefault("rope_type", "default"), str):
        raise ValueError(f"rope_type of {name} must be a name; got {fields['rope_type']!r}.")
    return fields


def rotary_of(
    config: Config, rope: Rope, *, layout: Layout = "half", partial: bool = False
) -> Rotary:
    """Builds the rotary from one dict of parameters."""
    kind, head_dim = rope.get("rope_type", "default"), config.query_heads()[1]
    if kind not in SCALINGS:
        raise ValueError(f"rope_type must be one of {', '.join(SCALINGS)}; got {kind!r}.")
    base = above_zero("rope_theta", rope.get("rope_theta"))
    width = None if kind == "proportional" else _width(rope, head_dim, partial)
    scaling = SCALINGS[kind](rope, config)
    if width is not None and width % 2:
        if kind in ("dynamic", "longrope", "yarn"):
            raise ValueError(
                f"partial_rotary_factor must leave an even width beside rope_type={kind!r}; got "
                f"{width} of head_dim={head_dim}."
            )
        # transformers rounds an odd width up, but not in the exponents.
        rates = plain_rates(base, width) if scaling is None else scaling.rates(base, width)
        factor = 1.0 if scaling is None else scaling.magnitude
        return Rotary(layout=layout, scaling=Frequencies(rates, factor))
    if scaling is not None:
        scaling.rates(base, head_dim if width is None else width, 1)  # raises if invalid
    return Rotary(base, layout, width, scaling)


def _sections(rope: Rope, pairs: int, default: Sequence[int], interleaved: bool) -> tuple[int, ...]:
    """Number of rotary pairs per position axis."""
    sizes = rope.get(SECTIONS, default)
    whole = isinstance(sizes, list | tuple) and all(is_count(size, 0) for size in sizes)
    if not whole or len(sizes) != len(default) or (sum(sizes) != pairs and not interleaved):
        raise ValueError(
            f"{SECTIONS} must be {len(default)} whole numbers whose sum is the number of pairs "
            f"that turn by head_dim and {SHARE}, {pairs}; got {sizes!r}."
        )
    if not interleaved:
        return tuple(sizes)
    # Pair i is of axis i % A while that axis has pairs left, and else of the first.
    count = len(sizes)
    axes = [i % count if i < sizes[i % count] * count else 0 for i in range(pairs)]
    filled = tuple(axes.count(axis) for axis in range(count))
    if filled != tuple(sizes) and SECTIONS in rope:
        warn_once(
            f"{SECTIONS}={[*sizes]} is not of the {pairs} pairs that turn: the rotary is built "
            f"with {[*filled]}, as transformers does."
        )
    return filled


def _width(rope: Rope, head_dim: int, partial: bool) -> int | None:
    """Number of rotated components; None for all."""
    share, kind = rope.get("partial_rotary_factor", 1.0), rope.get("rope_type", "default")
    if share != 1 and not partial and kind == "default":
        warn_once(
            f"partial_rotary_factor={share!r} is not read by transformers in this model_type, "
            "which rotates whole heads: the rotary is built without it."
        )
        share = 1.0
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"partial_rotary_factor is a share, from 0 to 1; got {share!r}.")
    if share != 1 and not partial:
        raise ValueError(
            f"partial_rotary_factor={share} is not served: this model_type rotates whole heads, "
            f"and transformers' rates of rope_type={kind!r} are fewer."
        )
    if share == 1 and head_dim % 2:
        raise ValueError(
            f"Rotary positions need an even head_dim; got head_dim={head_dim}, which is "
            "hidden_size / num_attention_heads where a config has no head_dim."
        )
    return None if share == 1 else int(head_dim * share)


def _need(rope: Rope, name: str) -> Any:
    if name not in rope:
        raise ValueError(f"rope_type={rope['rope_type']!r} needs {name}, which the config lacks.")
    return rope[name]


def original(rope: Rope, config: Config) -> int:
    """Training length, from the dict, from the config, or max_position_embeddings."""
    name = "original_max_position_embeddings"
    outside, within = config[name], rope.get(name)
    if outside is not None and within is not None and outside != within:
        warn_once(
            f"The config says {name}={outside} and, in its rotary parameters, {within}: the rotary "
            "is built with the former, as transformers does."
        )
    length = within if outside is None else outside
    return config.count("max_position_embeddings") if length is None else length


def _factor(rope: Rope, config: Config) -> float:
    """`factor`, or the ratio of max_position_embeddings to the training length."""
    if "factor" in rope:
        return rope["factor"]
    length = original(rope, config)
    if not isinstance(length, int | float) or length <= 0:
        raise ValueError(f"A rotary without a factor needs a training length; got {length!r}.")
    return config.count("max_position_embeddings") / length


def _llama3(rope: Rope, config: Config) -> Scaling:
    ends = (_need(rope, f"{end}_freq_factor") for end in ("low", "high"))
    return Llama3Scaling(_need(rope, "factor"), original(rope, config), *ends)


def _yarn(rope: Rope, config: Config) -> Scaling:
    """attention_factor overrides the two mscales; one of them alone, or 0, is ignored."""
    pair = rope.get("mscale") or None, rope.get("mscale_all_dim") or None
    attention_factor = rope.get("attention_factor")
    if None in pair or attention_factor is not None:
        pair = None, None
    return Yarn(
        _factor(rope, config),
        original(rope, config),
        rope.get("beta_fast") or 32.0,
        rope.get("beta_slow") or 1.0,
        *pair,
        attention_factor,
        bool(rope.get("truncate", True)),
    )


def _longrope(rope: Rope, config: Config) -> Scaling:
    attention_factor = rope.get("attention_factor")
    return LongRope(
        _need(rope, "short_factor"),
        _need(rope, "long_factor"),
        original(rope, config),
        _factor(rope, config) if attention_factor is None else None,
        attention_factor,
    )


SCALINGS: Mapping[str, Callable[[Rope, Config], Scaling | None]] = {
    "default": lambda rope, config: None,
    "linear": lambda rope, config: LinearScaling(_need(rope, "factor")),
    "dynamic": lambda rope, config: DynamicScaling(
        _need(rope, "factor"), config.count("max_position_embeddings")
    ),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": lambda rope, config: Proportional(
        rope.get("partial_rotary_factor", 1.0), rope.get("factor", 1.0)
    ),
}
KEYS = (
    *("rope_type", "rope_theta", "partial_rotary_factor", "factor"),
    *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor"),
    *("short_factor", "long_factor"),
)
