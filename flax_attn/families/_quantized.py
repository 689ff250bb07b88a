"""Checkpoints with quantised weights: float8 is read, and others if they leave the attention alone.

The latter are files such as those of gpt-oss and Laguna.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from flax import nnx

from ..weights.rule import Rule, spread
from ._reading import OF_IMAGES

# Fields in which quantisation methods list the modules that are not quantised.
FIELDS = ("modules_to_not_convert", "ignore", "exclude_modules", "llm_int8_skip_modules")
# Prefixes of a layer's name in the files of whole models, for text and for images.
TEXTS = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
IMAGES = ("", "visual.", "model.visual.", "vision_tower.", "model.vision_tower.", "vision_model.")
IMAGES += ("model.vision_model.", "vision_tower.vision_model.")
# Values of float8 formats that `weights.load` reads; None for a missing field.
FP8 = {"fmt": (None, "e4m3"), "weight_block_size": (None, [128, 128], (128, 128))}
COMPRESSED = {"num_bits": (8,), "type": ("float",), "strategy": ("channel", "tensor", "block")}
COMPRESSED |= {"block_structure": FP8["weight_block_size"]}
READ = "float8 e4m3 with a scale per tensor, per row or per block of 128 x 128"
BITNET = "bitnet"  # its quantization_config describes computation; its weights are plain


def check_unquantized(
    config: Mapping[str, Any], layer: nnx.Module, rules: Sequence[Rule], places: Sequence[str]
) -> None:
    """Raises ValueError if a config quantises the weights of this layer, except to float8.

    Args:
      config: of the model.
      layer: the attention, or its shapes.
      rules: of its weights, from the names in files.
      places: its paths in the model, as "layers.3.self_attn".
    """
    quantized = config.get("quantization_config")
    if not quantized:
        return
    method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
    unread = _unread_format(quantized)
    if config.get("model_type") == method == BITNET or not unread:
        return
    left_alone = [x for field in FIELDS for x in _listed(quantized, field)]
    names = {f"{place}.{name}" for place in places for name in _linears(layer, rules)}
    prefixes = IMAGES if _is_of_images(config) else TEXTS
    converted = sorted(name for name in names if not _is_left_alone(name, left_alone, prefixes))
    if converted:
        raise ValueError(
            f"The config has a quantization_config of {unread}, and weights of attention are "
            f"read of {READ} alone: {converted[0]} is quantised, for example, since neither "
            f"{' nor '.join(FIELDS)} names it. Dequantise the checkpoint and leave the field out."
        )


def _unread_format(quantized: Any) -> str:
    """Describes a format of weights that is not read; "" for float8 with scales."""
    fields = quantized if isinstance(quantized, Mapping) else {}
    method = fields.get("quant_method")
    if method == "fp8":
        return _unread_values("fp8", fields, FP8)
    if method != "compressed-tensors":
        bits = f" of {fields['bits']} bits" if "bits" in fields else ""
        return f"{method or 'no known method'}{bits}"
    groups = fields.get("config_groups")
    groups = [*groups.values()] if isinstance(groups, Mapping) else []
    for group in groups:
        group = group if isinstance(group, Mapping) else {}
        kind = group.get("format") or fields.get("format")
        weights = group.get("weights")
        if kind != "float-quantized" or not isinstance(weights, Mapping):
            return f"{method} in the format {kind}"
        if unread := _unread_values(kind, weights, COMPRESSED):
            return unread
    return "" if groups else f"{method} without config_groups"


def _unread_values(name: str, fields: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Describes the values of a format that are not among the known ones."""
    odd = [f"{x} {fields.get(x)}" for x, values in known.items() if fields.get(x) not in values]
    return f"{name} with {' and '.join(odd)}" if odd else ""


def _is_of_images(config: Mapping[str, Any]) -> bool:
    name = str(config.get("model_type"))
    return "vision" in name or name == "pixtral" or any(x in config for x in OF_IMAGES)


def _listed(quantized: Any, field: str) -> Sequence[str]:
    values = quantized.get(field) if isinstance(quantized, Mapping) else None
    values = values if isinstance(values, list | tuple) else ()
    return [value for value in values if isinstance(value, str)]


def _linears(layer: nnx.Module, rules: Sequence[Rule]) -> Iterator[str]:
    """Yields the modules with a weight matrix, by their names in the file."""
    linears = [
        ".".join(map(str, path))
        for path, module in nnx.iter_modules(layer)
        if isinstance(module, nnx.Linear | nnx.LinearGeneral)
    ]
    renamed = set()
    for rule in rules:
        if rule.kind != "move":
            continue
        sources, targets = map(spread, rule.sides)
        together = rule.layout is not None  # every source maps to every target
        for source, target in (
            product(sources, targets) if together else zip(sources, targets, strict=True)
        ):
            source, target = _module_of(source), _module_of(target)
            for name in linears:
                if name == target or name.startswith(f"{target}."):
                    renamed.add(name)
                    yield source + name.removeprefix(target)
    yield from (name for name in linears if name not in renamed)


def _module_of(name: str) -> str:
    """Strips a weight's own name from a name in a rule, which leaves the module."""
    owner, _, leaf = name.rpartition(".")
    return owner if leaf in ("weight", "bias", "kernel") else name


def _is_left_alone(name: str, patterns: Sequence[str], prefixes: Sequence[str]) -> bool:
    """Whether a pattern matches a module, under any prefix: in full, at its start, or its end.

    A pattern is a regular expression, as in transformers; compressed-tensors marks it with "re:".
    """
    for pattern in patterns:
        expression = pattern.removeprefix("re:")
        if name.endswith(f".{expression}"):
            return True
        try:
            bounded = re.compile(rf"(?:{expression})(?:(?<=\.)|(?=\.|$))")
        except re.error:
            continue
        if any(bounded.match(prefix + name) for prefix in prefixes):
            return True
    return False
