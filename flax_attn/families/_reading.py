"""Reads a config from its contents or a file's path, and splits multimodal configs into parts.

A multimodal model's file has a config for its text, one for images, one for sound. Their
`model_type` often equals that of the whole model, or is missing; it is then derived from the whole
model's `model_type`, or from the `architectures` of the file.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from .._internal.caller import warn_once

NAME = "config.json"
MAX_BYTES = 2**24  # the largest that is published has less than a hundredth of it
# Fields in which the files of multimodal models have the configs of their parts.
PARTS: Mapping[str, tuple[str, ...]] = {
    "text": ("text_config", "llm_config", "language_config"),
    "vision": ("vision_config",),
    "audio": ("audio_config",),
}
# Suffixes that turn the whole model's model_type into a part's.
ENDS = {"text": ("_text", "_text_model"), "vision": ("_vision", "_vision_model", "_vit")}
ENDS["audio"] = ("_audio", "_encoder", "_audio_encoder")
# Suffixes of class names after their model_type.
CLASSES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "EncoderModel", "ForMaskedLM")
CLASSES += ("ForImageClassification", "ForSequenceClassification", "PreTrainedModel", "Model")
# Fields that occur only in configs of image models.
OF_IMAGES = ("patch_size", "depth", "image_size", "spatial_merge_size")


def contents(config: Any) -> Mapping[str, Any]:
    """Returns the fields of a config, read from a file if it is a path of one or of its folder.

    `{"__float__": "Infinity"}`, as transformers writes it, becomes a number.

    Raises:
      ValueError: for a missing file, or one that contains no JSON object.
      TypeError: for any other type.
    """
    if isinstance(config, str | os.PathLike):
        config = _from_file(Path(config))
    if not isinstance(config, Mapping):
        raise TypeError(
            "config must be a dict, the contents of a config.json or to_dict() of a config, or the "
            f"path of such a file or of its folder; got {type(config).__name__}."
        )
    fields = {name: _plain(name, value) for name, value in config.items()}
    parts = [fields.get(name) for names in PARTS.values() for name in names]
    for each in (fields, *(part for part in parts if isinstance(part, Mapping))):
        _check_names(each)
    return fields


def _check_names(fields: Mapping[str, Any]) -> None:
    """Raises ValueError for a model_type or architectures that are no names."""
    name, classes = fields.get("model_type"), fields.get("architectures")
    if not isinstance(name, str | None):
        raise ValueError(f"model_type must be a name, as in 'llama'; got {name!r}.")
    if classes is None or isinstance(classes, str):
        return
    if not isinstance(classes, list | tuple) or not all(isinstance(x, str) for x in classes):
        raise ValueError(f"architectures must be a list of names; got {classes!r}.")


def _from_file(path: Path) -> Any:
    file = path / NAME if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read: {error.strerror}. It must be a config.json or the folder of "
            "one; nothing is downloaded."
        ) from error
    if len(raw) > MAX_BYTES:
        raise ValueError(f"{file} has more than {MAX_BYTES} bytes: is it a config.json?")
    try:
        fields = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} holds {type(fields).__name__} in place of a config's fields.")
    return fields


def _plain(name: Any, value: Any) -> Any:
    """Decodes numbers that transformers writes in a special form, since JSON lacks them."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return _special(value["__float__"])
        return {key: _plain(key, each) for key, each in value.items()}
    if isinstance(value, int) and value.bit_length() > 63:
        raise ValueError(f"{name} is a number of {value.bit_length()} bits; 63 are read.")
    return [_plain(name, each) for each in value] if isinstance(value, list) else value


def _special(number: Any) -> float:
    try:
        return float(number)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"__float__ must be a number, as in 'Infinity'; got {number!r}.") from None


def whole(config: Mapping[str, Any], served: Collection[str]) -> dict[str, dict[str, Any]]:
    """Returns a multimodal model's configs by "text", "vision" and "audio"; else an empty dict.

    Old files have no config of the text: its fields are at the top level.

    Args:
      config: its contents.
      served: the supported model types.
    """
    configs: dict[str, dict[str, Any]] = {}
    for part, fields in PARTS.items():
        for field in fields:
            if isinstance(config.get(field), Mapping):
                configs[part] = {**config[field]}
    if not configs:
        return {}
    fields = {field for names in PARTS.values() for field in names}
    if "text" not in configs and "num_attention_heads" in config:
        rest = {name: x for name, x in config.items() if name not in fields}
        configs = {"text": rest, **configs}
    of = _type_of_whole(config, served)
    for part, each in configs.items():
        each["model_type"] = type_of_part(each, part, of, served)
        quantized = config.get("quantization_config")
        if quantized is not None:
            each.setdefault("quantization_config", quantized)
    return configs


def _type_of_whole(config: Mapping[str, Any], served: Collection[str]) -> Any:
    """Its model_type if some part's type extends it, else the one from its `architectures`."""
    name = config.get("model_type")
    ends = [end for each in ENDS.values() for end in each if end]
    wholes = {x.removesuffix(end) for x in served for end in ends if x.endswith(end)}
    return name if name in wholes else _by_classes(config.get("architectures"), wholes) or name


def has_text(config: Mapping[str, Any]) -> bool:
    """Whether a file has a separate config for the text."""
    return any(isinstance(config.get(field), Mapping) for field in PARTS["text"])


def type_of_part(
    config: Mapping[str, Any], part: str, of: Any, served: Collection[str]
) -> str | None:
    """Returns a part's model_type: its own, with a suffix, or from the whole model or classes."""
    mine = config.get("model_type")
    candidates = [mine, *_with_ends(mine, part), *_with_ends(of, part)]
    candidates += [_by_classes(config.get("architectures"), served)]
    return next((x for x in candidates if x in served), mine)


def typed(config: Mapping[str, Any], served: Collection[str]) -> Mapping[str, Any]:
    """Returns a config with a supported model_type, if its fields or `architectures` give one.

    Warns if an unknown model_type is replaced because of its `architectures`.
    """
    name = config.get("model_type")
    if name in served:
        return config
    part = "vision" if any(x in config for x in OF_IMAGES) else "text"
    is_one = part == "vision" or "num_attention_heads" in config
    for candidate in _with_ends(name, part) if is_one else ():
        if candidate in served:
            return {**config, "model_type": candidate}
    known = _by_classes(config.get("architectures"), served)
    if known is None:
        return config
    if name is not None:
        warn_once(
            f"model_type {name!r} is not known here; its architectures say "
            f"{config['architectures'][0]}, so it is read as {known!r}."
        )
    return {**config, "model_type": known}


def _with_ends(name: Any, part: str) -> Iterable[str]:
    return [name + end for end in ENDS[part]] if isinstance(name, str) else []


def _by_classes(architectures: Any, served: Collection[str]) -> str | None:
    """Returns the model_type that matches one of these class names, or None."""
    names = architectures if isinstance(architectures, list | tuple) else ()
    by_letters = {_letters(name): name for name in served}
    for name in (x for x in names if isinstance(x, str)):
        for end in CLASSES:
            if name.endswith(end) and _letters(name.removesuffix(end)) in by_letters:
                return by_letters[_letters(name.removesuffix(end))]
    return None


def is_class_of(architecture: str, name: str) -> bool:
    """Whether a class is named after a model_type: LlamaForCausalLM after llama, not after llama4.

    >>> is_class_of("Gemma3ForCausalLM", "gemma3_text"), is_class_of("Llama4ForCausalLM", "llama")
    (True, False)
    >>> is_class_of("Dinov2WithRegistersModel", "dinov2_with_registers")
    True
    """
    stems = {name, *(name.removesuffix(end) for ends in ENDS.values() for end in ends)}
    ends = "For[A-Z]|LMHead|PreTrained|Model|Encoder|Backbone"
    bases = (re.split(end, architecture)[0] for end in (ends, f"{ends}|With[A-Z]"))
    letters = {_letters(base.removesuffix("Text").removesuffix("Vision")) for base in bases}
    return not letters.isdisjoint(map(_letters, stems))


def _letters(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()
