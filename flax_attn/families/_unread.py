"""Config fields about attention that the family does not read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from flax import nnx

from .._internal.caller import warn_once
from ._as_built import is_as_built
from ._config import ByPart, Family, Names
from ._published import FACTS, SIMILAR, Facts, facts_of, has_field
from ._reading import is_class_of
from ._typos import nearest_name

ROTARY = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
ROTARY = (*ROTARY, "original_max_position_embeddings")
ALWAYS = ("head_dim", "is_causal")  # every family reads or rejects these
# Fields that a config of any class may have.
OF_ANY = {
    *("model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "auto_map"),
    *("use_cache", "tie_word_embeddings", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("id2label", "label2id", "problem_type", "return_dict", "output_attentions"),
    *("output_hidden_states", "quantization_config", "attn_implementation", "initializer_range"),
}
# Fields that also concern other parts of a model: depth, length, activation and norms. The last is
# the first layer with a window, which has no effect if there is none.
GENERAL = {
    *("n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"),
    *("num_hidden_layers", "max_position_embeddings", "hidden_act", "intermediate_size"),
    *("image_size", "patch_size"),
    "position_embedding_type",
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "max_window_layers"),
}


def names_of(family: Family, facts: Facts) -> Names:
    """The names of fields in the files of a model type."""
    return {**facts.names, **family.names}


def read_by(family: Family, facts: Facts) -> set[str]:
    """All fields that a model type reads, under every name in its files."""
    others = (x for names in names_of(family, facts).values() for x in names)
    names = {*facts.defaults, *facts.fixed, *family.defaults, *ALWAYS, *others}
    has_rope = "rope_theta" in {*names, *family.names} or "rope_parameters" in names
    return {*names, *(ROTARY if has_rope else ())}


class Reading(NamedTuple):
    """How types read a field: its standard name, and whether False is an explicit choice."""

    word: str
    treats_false_as_set: bool


def read_by_any(families: Mapping[str, Family | ByPart]) -> dict[str, Reading]:
    """All fields that any model type reads for its attention.

    False is an explicit choice if the types that read the field default to True.
    """
    each = [
        (row, facts_of(name))
        for name, entry in families.items()
        for row in ([entry] if isinstance(entry, Family) else entry.values())
    ]
    every = (names_of(row, facts).items() for row, facts in each)
    words = {x: word for pairs in every for word, names in pairs for x in names}
    defaults: dict[str, list[Any]] = {
        name: [] for row, facts in each for name in read_by(row, facts) - GENERAL
    }
    for row, facts in each:
        for name, default in {**facts.defaults, **row.defaults}.items():
            if name in defaults:
                defaults[name].append(default)
    return {
        name: Reading(words.get(name, name), True in values and False not in values)
        for name, values in defaults.items()
    }


def unread(
    config: Mapping[str, Any], family: Family, facts: Facts, by_any: Mapping[str, Reading]
) -> dict[str, str | None]:
    """Returns attention fields that have no effect, each with the field it may be a typo of.

    A field counts if another model type reads it, or if no config has it in transformers and it is
    a typo of one that this type reads. Fields of the type's own class, whose attention does not
    read them either, do not count, nor does another type's name for a field with the same value.

    Args:
      config: of the model.
      family: the row of its type.
      facts: of its type.
      by_any: from `read_by_any`.
    """
    known, fields = sorted(read_by(family, facts)), dict[str, str | None]()
    for field, value in config.items():
        is_own = field in known or field in GENERAL or field in facts.ignored
        if is_own or field.startswith("_"):
            continue
        if field in by_any:
            word, treats_false_as_set = by_any[field]
            names = {*names_of(family, facts).get(word, (word,))} - {field}
            is_explicit = value or (value is False and treats_false_as_set)
            if is_explicit and all(config.get(each) != value for each in names):
                fields[field] = None
        elif value is not None and (slip := nearest_name(field, known)):
            if field not in SIMILAR and not any(has_field(x, field) for x in FACTS.values()):
                fields[field] = slip
    return fields


def warn_of_another_class(config: Mapping[str, Any], facts: Facts, known: set[str]) -> None:
    """Warns of fields, but for known ones, that a type lacks, if `architectures` are another's."""
    name, classes = config["model_type"], config.get("architectures") or ()
    classes = [classes] if isinstance(classes, str) else classes
    if not classes or any(is_class_of(each, name) for each in classes):
        return
    known = known | GENERAL | OF_ANY
    for field, value in config.items():
        is_known = field in known or field.startswith("_") or field.endswith("_token_id")
        if value is not None and not is_known and not has_field(facts, field):
            warn_once(
                f"{field}={value!r} is no field of model_type {name!r}, and architectures say "
                f"{classes[0]}: the attention is built without it. If that class reads it there, "
                "this layer is another one."
            )


def warn_of_unread(
    config: Mapping[str, Any],
    name: str,
    family: Family,
    by_any: Mapping[str, Reading],
    layer: nnx.Module,
) -> None:
    """Warns, once for each sentence, of `unread` fields that differ from the built layer."""
    fields = {
        field: slip
        for field, slip in unread(config, family, facts_of(name), by_any).items()
        if slip or not is_as_built(field, config[field], layer)
    }
    if fields:
        words = [
            f"{field}={config[field]!r}" + (f" (did you mean {slip}?)" if slip else "")
            for field, slip in fields.items()
        ]
        warn_once(
            f"model_type {name!r} does not read {', '.join(words)}; its attention is built without."
        )
    facts = facts_of(name)
    warn_of_another_class(config, facts, {*read_by(family, facts), *fields})
