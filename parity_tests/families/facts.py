"""Writes `flax_attn/families/published.json`: what the classes of transformers say of a model type.

    python -m parity_tests.families.facts            # of all types
    python -m parity_tests.families.facts qwen3 glm  # of these, and keeps the others
    python -m parity_tests.families.facts --check    # what the installed transformers would change

A row of `flax_attn/families` says which fields of a config a type reads. This command builds the
type's small configs, records which fields are read, and writes their defaults, as the class of
transformers has them; the path of the attention in the whole model; fields of the class that its
attention does not read, and that of other types does; and arrays that are no weights. Which type
has the attention of another one is found by `python -m parity_tests.core.families.aliases`.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from functools import cache
from importlib import import_module
from inspect import getmembers, getsource, isclass
from pathlib import Path
from textwrap import fill, indent
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
from flax import nnx

import flax_attn
from flax_attn.families._choose import family_of
from flax_attn.families._config import USUAL, Config, Family
from flax_attn.families._published import (
    ALIASES,
    FACTS,
    INFINITY,
    VERSION,
    Facts,
    facts_of,
    has_field,
)
from flax_attn.families._table import FAMILIES, TYPES
from flax_attn.families._typos import nearest_name
from flax_attn.families._unread import OF_ANY, ROTARY, read_by_any, unread
from flax_attn.families.models.build import model
from flax_attn.families.models.files import rules_of
from flax_attn.families.models.rows import ROWS

from . import parts, witness
from .configs import CONFIGS, Small
from .parts import PARTS, Part

FILE = Path(flax_attn.__file__).parent / "families" / "published.json"
NOT_DEFAULTS = {"model_type", "rope_scaling", "is_causal"}  # read of every config
# Fields of older spellings with the base of a rotary, and the key that the class has it under.
BASES = {
    "rope_theta": "global",
    "global_rope_theta": "global",
    "rope_local_base_freq": "local",
    "local_rope_theta": "local",
}
SHARE = "partial_rotary_factor"


def smalls(name: str) -> list[Small | Part]:
    """The small configs of a type; for an alias those of the type whose attention it has."""
    family = facts_of(name).alias or name
    same = [small for small in (*CONFIGS, *PARTS) if small.name == family]
    return same if name == family else [replace(small, alias=name) for small in same]


def rows(name: str) -> list[Family]:
    """The row of a type, or of each of its parts."""
    entry = FAMILIES[facts_of(name).alias or name]
    return [entry] if isinstance(entry, Family) else [*entry.values()]


@cache
def config_class(name: str) -> Any:
    """The class of its config in transformers."""
    if name in parts.MODELS:
        return getattr(witness.library(), f"{parts.MODELS[name].prefix}Config")
    return witness.found(name, "Config")


def class_names(name: str) -> dict[str, tuple[str, str]]:
    """Fields that its config's class has under another name too, by the more common one."""
    return {x: (mapped, x) for x, mapped in config_class(name).attribute_map.items()}


@cache
def class_fields(name: str) -> dict[str, Any]:
    """The fields of its config's class, with their defaults."""
    return {
        x.name: x.default_factory() if x.default_factory is not MISSING else x.default
        for x in fields(config_class(name))
    }


def derived_defaults(name: str) -> dict[str, Any]:
    """Defaults of rotary fields, which the class keeps outside its fields or derives."""
    made = config_class(name)()
    base = getattr(made, "default_theta", None)
    bases = {x: base.get(key) if isinstance(base, Mapping) else base for x, key in BASES.items()}
    share = (getattr(made, "rope_parameters", None) or {}).get(SHARE)
    result = {**bases, SHARE: share, "rope_parameters": default_rope(name)}
    return {key: value for key, value in result.items() if value is not None}


def default_rope(name: str) -> dict[str, Any] | None:
    """The rotary parameters of a config without any, if they scale it or are by layer type."""
    cls = config_class(name)
    rope = {**(getattr(cls(), "rope_parameters", None) or {})}
    is_by_kind = any(isinstance(value, dict) for value in rope.values())
    if rope.get("rope_type", "default") in ("default", "axial") and not is_by_kind:
        return None
    if cls.from_dict({"rope_theta": 7.0}).rope_parameters.get("rope_theta") == 7.0:
        del rope["rope_theta"]  # a file's field beside the dict counts, and so its default
    return rope


@cache
def source(name: str) -> str:
    """The code of the classes of its attention in transformers."""
    classes = {cls for layer in attentions(name) for cls in type(layer).__mro__}
    return "\n".join(getsource(x) for x in classes if x.__module__.startswith("transformers"))


def attentions(name: str) -> list[Any]:
    """The modules of transformers that the small configs compare with."""
    layers = []
    for small in smalls(name):
        if isinstance(small, Part):
            model = parts.model_of(parts.config_of(small.given, name), name)
            layers.append(parts.attention(model, small))
        else:
            config = witness.config_of(small.spelt("new"), name)
            layers.append(witness.attention(config, name, small.index))
    return layers


def all_defaults(name: str) -> dict[str, Any]:
    """Of every field that the class has, and of `head_dim` where the attention alone reads it."""
    lacking = {"head_dim": None} if is_named(name, "head_dim") else {}
    return {**lacking, **class_fields(name), **derived_defaults(name)}


def is_named(name: str, field: str) -> bool:
    """Whether the code of a type's attention names a field of the config."""
    return re.search(rf'config\.{field}\b|config, "{field}"', source(name)) is not None


@cache
def fields_read(name: str) -> dict[str, str]:
    """The fields that a type's row reads of its small configs: by the class's names, ours."""
    record, value_of = dict[str, str](), Config.__getitem__

    def recorded(config: Config, field: str) -> Any:
        if field not in config._fixed:
            first = config._names.get(field, (field,))[0]
            if field != first or first not in record:  # T5 reads a field by both its names
                record[first] = field
        return value_of(config, field)

    facts = facts_of(name)
    with patch.object(Config, "__getitem__", recorded):
        for small in smalls(name):
            row = rows(name)[0] if isinstance(small, Small) else _row_of_part(name, small.part)
            defaults = {**all_defaults(name), **row.defaults}
            names = {**class_names(name), **row.names}
            for spelling in ("new", "old"):
                given = {**small.spelt(spelling), **facts.fixed}
                config = row.derived(Config(given, defaults, names))
                for index in range(config.count("num_hidden_layers")):
                    _build(row, config, index, is_compared=index == small.index)
    return record


@cache
def fields_of_whole(name: str) -> dict[str, str]:
    """The fields that a whole model reads, as `fields_read`; none for a type not built whole."""
    record, value_of = dict[str, str](), Config.__getitem__

    def recorded(config: Config, field: str) -> Any:
        record.setdefault(config._names.get(field, (field,))[0], field)
        return value_of(config, field)

    known = facts_of(name)._replace(defaults=all_defaults(name), names=class_names(name))
    with patch.object(Config, "__getitem__", recorded), patch.dict(FACTS, {name: known}):
        for small in smalls(name) if name in ROWS else ():
            given = small.spelt("new")
            with suppress(ValueError):  # a config that is not built whole
                rules_of(nnx.eval_shape(lambda given=given: model(given, rngs=nnx.Rngs(0))))
    return record


def whole_of(name: str) -> dict[str, Any]:
    """The defaults of the fields that the whole model reads and its attention does not."""
    read = fields_of_whole(name).keys() - defaults_of(name).keys() - NOT_DEFAULTS
    plain = class_fields(name)
    return {x: plain[x] for x in sorted(read & plain.keys())}


def _row_of_part(name: str, part: str) -> Family:
    entry = FAMILIES[facts_of(name).alias or name]
    assert not isinstance(entry, Family)
    return entry[part]


def _build(row: Family, config: Config, index: int, is_compared: bool) -> None:
    """Builds a layer, which may be refused if no test compares it."""
    try:
        if not row.missing_reason(config, index):
            nnx.eval_shape(lambda: row.attention(config, index, _init()))
            row.rules(config, index)
            row.path(config, index)
    except ValueError:
        if is_compared:
            raise


def _init() -> dict[str, Any]:
    return {"rngs": nnx.Rngs(0), "dtype": None, "param_dtype": jnp.float32}


def names_of(name: str) -> dict[str, tuple[str, str]]:
    """Names of the fields that its row reads, where its class maps them and no row names them."""
    read, mapped = fields_read(name).items(), class_names(name)
    return {x: mapped[x] for first, x in read if x in mapped and first == mapped[x][0]}


def defaults_of(name: str) -> dict[str, Any]:
    """The defaults of the fields that its row reads, by the names of its class."""
    read = {x: field for x, field in fields_read(name).items() if x not in NOT_DEFAULTS}
    if {*ROTARY} & {*read.values()}:  # scaled ones read it, whether a small config has one or not
        read.setdefault("max_position_embeddings", "max_position_embeddings")
    if "rope_type" in (default_rope(name) or {}):  # of every layer
        read["rope_parameters"] = "rope_parameters"
    stated = {x for row in rows(name) for x in row.defaults} | {*facts_of(name).fixed}
    result = dict[str, Any]()
    derived, plain = derived_defaults(name), class_fields(name)
    for x, field in sorted(read.items()):
        if x in stated:
            continue
        if plain.get(x) is not None:
            result[x] = plain[x]
        elif field in derived:
            result[x] = derived[field]
        elif x in plain or is_named(name, x):
            result[x] = None
    return result


def model_of(config: Any, name: str) -> Any:
    """The whole model of a config: its Model, or where it has none the first with a head.

    A config of another folder goes by the Model of this one.
    """
    place, wanted = witness.place_of(name), type(config)
    module = import_module(f"transformers.models.{place.folder}.modeling_{place.folder}")
    made = [f"{place.prefix}{place.text}Model", f"{place.prefix}Model"]
    classes = dict(getmembers(module, isclass))
    found = [classes[x] for x in made if x in classes and classes[x].config_class is wanted]
    found += [
        x
        for key, x in classes.items()
        if getattr(x, "config_class", None) is wanted and not key.endswith("PreTrainedModel")
    ]
    return found[0](config) if found else classes[made[-1]](config)


def path_in(model: Any, kind: type, index: int) -> str:
    """Where a model has the attention of a layer, {} for its number."""
    (path,) = {
        re.sub(rf"(?<=\.){index}(?=\.)", "{}", path, count=1)
        for path, module in model.named_modules()
        if isinstance(module, kind) and re.search(rf"^[^\d]*\.{index}\.", path)
    }
    return path


def path_of(name: str) -> str:
    """Where its whole models have the attention; the usual place if its row says it."""
    paths = set[str]()
    for small in smalls(name):
        if isinstance(small, Part) or _row_says_path(small):
            return USUAL
        config = witness.config_of(small.spelt("new"), name)
        kind = type(witness.attention(config, name, small.index))
        paths.add(path_in(model_of(config, name), kind, small.index))
    (path,) = paths
    return path


def _row_says_path(small: Small) -> bool:
    family, read = family_of(small.spelt("new"), None)
    return family.path(read, small.index) is not None


def buffers_of(name: str) -> list[str]:
    """Arrays that its attention saves in transformers and that are no weights."""
    each = ((layer.state_dict(), layer.named_buffers()) for layer in attentions(name))
    return sorted({x for saved, buffers in each for x, _ in buffers if x in saved})


def ignored_by(name: str, facts: Facts, by_any: Mapping[str, Any]) -> list[str]:
    """Fields of its class, and of other types' attention, that would warn but for being its own."""
    cls = config_class(name)
    class_own = sorted({*cls.attribute_map, *cls().to_dict()} & by_any.keys())
    return [x for x in class_own if unread({x: True}, rows(name)[0], facts, by_any)]


def own_fields(cls: Any) -> set[str]:
    """The fields of a config's class by all their names, but for those that every config has."""
    names = {x.name for x in fields(cls)} | {*cls.attribute_map}
    names -= {x.name for x in fields(witness.library().PreTrainedConfig)} | OF_ANY
    return {name for name in names if not name.endswith("_token_id")}


def similar(types: Mapping[str, Facts]) -> list[str]:
    """Fields of the classes of types that are not served that are near to one that is read."""
    mapping = witness.library().models.auto.configuration_auto.CONFIG_MAPPING
    classes = [mapping[name] for name in mapping]
    for cls in classes:  # and of their parts
        parts_of = getattr(cls, "sub_configs", {}).values()
        classes += [x for x in parts_of if hasattr(x, "sub_configs") and x not in classes]
    every = {x for cls in classes for x in own_fields(cls)}
    every -= {x for x in every if any(has_field(each, x) for each in types.values())}
    read = {x for each in types.values() for x in (*each.defaults, *each.names)}
    return sorted(x for x in every if nearest_name(x, read))


def facts(name: str) -> dict[str, Any]:
    """What the file says of a type, but for the fields that it ignores."""
    before = facts_of(name)
    path = path_of(name)
    return {
        "alias": before.alias,
        "fixed": dict(before.fixed),
        "defaults": defaults_of(name),
        "names": names_of(name),
        "path": "" if path == USUAL else path,
        "buffers": buffers_of(name),
        "whole": whole_of(name),
    }


def others() -> list[str]:
    """Model types that transformers knows and that are not served."""
    names = witness.library().models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    return sorted({*names} - {*FAMILIES, *ALIASES})


def version() -> str:
    """Of transformers, without its last number."""
    return ".".join(witness.library().__version__.split(".")[:2])


def contents(names: Iterable[str]) -> dict[str, Any]:
    """The contents of the file, with new facts of these types."""
    types = {**json.loads(FILE.read_text("utf-8"))["types"]}
    for name in names:
        types[name] = facts(name)
    types = {name: types[name] for name in sorted(types) if name in {*FAMILIES, *ALIASES}}
    with patch.dict(FACTS, {name: Facts(**known) for name, known in types.items()}):
        by_any = read_by_any(FAMILIES)
        for name in types:  # of all, since a field that a new row reads is one that others ignore
            types[name] |= {"ignored": (), "further": ()}
            known = Facts(**types[name])
            types[name]["ignored"] = ignored_by(name, known, by_any)
            known = Facts(**types[name])
            own = own_fields(config_class(name))
            types[name]["further"] = sorted(x for x in own if not has_field(known, x))
    fields_like = similar({name: Facts(**each) for name, each in types.items()})
    types = {name: {x: y for x, y in each.items() if y} for name, each in types.items()}
    return {"transformers": version(), "types": types, "others": others(), "similar": fields_like}


def text(made: Mapping[str, Any]) -> str:
    """The text of the file: a line for each type."""
    plain = json.loads(json.dumps(made), parse_constant=lambda _: INFINITY)
    types = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(record, sort_keys=True)}"
        for name, record in plain["types"].items()
    )
    first = f' "transformers": {json.dumps(plain["transformers"])}'
    lists = ",\n".join(f' "{key}": [\n{_filled(plain[key])}\n ]' for key in ("others", "similar"))
    return f'{{\n{first},\n "types": {{\n{types}\n }},\n{lists}\n}}\n'


def _filled(names: Iterable[str]) -> str:
    words = fill(", ".join(map(json.dumps, names)), 98, break_on_hyphens=False)
    return indent(words, "  ")


def changes(made: str) -> Iterator[str]:
    """Lines that say how a new text of the file differs from the file."""
    before, after = (json.loads(x) for x in (FILE.read_text("utf-8"), made))
    for name in sorted({*before["types"], *after["types"]}):
        old, new = (x["types"].get(name, {}) for x in (before, after))
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                yield f"{name}, {key}: {_difference(old.get(key), new.get(key))}"
    gone = {*before["others"]} - {*after["others"]}
    lists = {
        "new in transformers": {*after["others"]} - {*before["others"]},
        "served now": gone & {*after["types"]},
        "gone in transformers": gone - {*after["types"]},
    }
    yield from (f"{words}: {', '.join(sorted(names))}" for words, names in lists.items() if names)


def _difference(old: Any, new: Any) -> str:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return f"{old!r} -> {new!r}"
    keys = [key for key in sorted({*old, *new}) if old.get(key, ...) != new.get(key, ...)]
    return "; ".join(f"{key} {old.get(key, 'none')!r} -> {new.get(key, 'none')!r}" for key in keys)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the file, or says what would change; the exit status is 1 if something would."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types; all by default")
    parser.add_argument("--check", action="store_true", help="write nothing, say what would change")
    options = parser.parse_args(arguments)
    if unknown := sorted({*options.types} - {*TYPES}):
        parser.error(f"no row of flax_attn/families is for {', '.join(unknown)}.")
    made = text(contents(options.types or TYPES))
    lines = [*changes(made)]
    print("\n".join(lines) or f"nothing changes (transformers {VERSION})")
    if options.check:
        return 1 if lines else 0
    FILE.write_text(made, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
