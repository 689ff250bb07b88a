"""Writes which model types of transformers have the attention of a family under another name.

    python -m parity_tests.core.families.aliases [FOLDER ...]

A candidate is a class whose source is that of a family's attention or near it, but for the names of
classes, docstrings and annotations, or a config that goes by a family's model. It becomes an alias
if its outputs are equal, in both spellings of the family's first config, if its defaults are found,
and if the walk over its fields passes; with an encoder and a decoder, all three attentions. The
others are printed with the reason: "another function" for an output that differs, an error for a
config of the one that the other cannot read. Without folders all are searched; else the others stay
as they were. Run `ruff format` after it.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from pprint import pformat

import jax
from flax import nnx

from flax_attn import families
from flax_attn.families._choose import SERVED
from flax_attn.families._published import ALIASES, FACTS, Facts, facts_of
from flax_attn.families._table import FAMILIES
from flax_attn.parity import judge
from parity_tests.families import facts, parts, witness
from parity_tests.families.configs import CONFIGS, Small
from parity_tests.families.eager import ours, theirs
from parity_tests.families.parts import PARTS
from parity_tests.families.place import Model, Place

from .described import described, described_part
from .walk import walk

ROOT = Path(__file__).parents[3]
LARGE = ("evolla", "phi4_multimodal")
# Electra's model takes tokens as wide as its embeddings, whatever the width of its layers.
PASSED_OVER = {"electra": ("hidden_size",)}
# What most attentions do, whatever a file says, whose class lacks a field that the family's has, as
# far as it is known. `tried_lacking` compares it with each alias' own class.
UNREAD = {
    "use_sliding_window": True,
    "use_bidirectional_attention": False,
    "attention_out_bias": False,
}
UNREAD_BY: dict[str, dict[str, object]] = {"kolibri1": {"sliding_window_pattern": 5}}
ALONE = [name for name in FAMILIES if name not in parts.MODELS]  # with one attention in a layer
KINDS = ("full_attention", "sliding_attention", "chunked_attention")
LIKE, MOST = 0.6, 50  # how near a source must be to be tried, and how many are
MADE = "# Written by `python -m parity_tests.core.families.aliases`.\n"
BEFORE = {**ALIASES}


@cache
def classes(folder: str) -> dict[str, ast.ClassDef]:
    """The classes of a folder's modelling code."""
    path = Path(witness.library().__file__).parent / f"models/{folder}/modeling_{folder}.py"
    tree = ast.parse(path.read_text("utf-8")) if path.exists() else ast.Module([], [])
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def bare(node: ast.ClassDef, prefix: str) -> str:
    """The source of a class without names of classes, docstrings and annotations."""
    node = ast.parse(ast.unparse(node)).body[0]
    for part in ast.walk(node):
        if isinstance(part, ast.ClassDef | ast.FunctionDef):
            part.decorator_list = []
            first = part.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                part.body = part.body[1:] or [ast.Pass()]
        if isinstance(part, ast.FunctionDef):
            part.returns = None
        if isinstance(part, ast.arg):
            part.annotation = None
    return ast.unparse(node).replace(prefix, "").replace("torch.nn.", "nn.")


def prefix_of(name: str) -> str:
    """`Bert` of BertSelfAttention."""
    return re.sub("(Self)?Attention$", "", name)


def known() -> dict[str, list[str]]:
    """By the bare source of an attention, the families that have it."""
    found: dict[str, list[str]] = {}
    for family in ALONE:
        place = witness.place_of(family)
        here = classes(place.folder)
        called = (f"{place.text}{place.attention}", place.attention)
        names = (f"{place.prefix}{kind}" for kind in ("SelfAttention", *called))
        name = next((name for name in (*names, place.attention) if name in here), None)
        if name is not None:  # the first Mamba has none
            found.setdefault(bare(here[name], prefix_of(name)), []).append(family)
    return found


def folders() -> list[str]:
    """All folders of models but those whose whole model is too large to build."""
    models = Path(witness.library().__file__).parent / "models"
    return sorted(x.name for x in models.iterdir() if x.is_dir() and x.name not in LARGE)


def candidates(searched: Sequence[str]) -> Iterator[tuple[str, Place]]:
    """Families, and where a class of the same source stands, or of nearly the same."""
    sources = known()
    for folder in searched:
        for name, node in classes(folder).items():
            prefix = prefix_of(name)
            like = nearest(bare(node, prefix), sources) if name.endswith("Attention") else []
            for family in like:
                yield from ((family, place) for place in places_of(folder, prefix, family))
    yield from of_other_models(searched)


def of_other_models(searched: Sequence[str]) -> Iterator[tuple[str, Place]]:
    """Families, and a config of a folder of its own that goes by their model."""
    auto = witness.library().models.auto
    models = auto.modeling_auto.MODEL_MAPPING_NAMES
    here = [family for family in ALONE if not witness.place_of(family).config]
    own = {models.get(family): family for family in reversed(here)}
    for alias, config in auto.configuration_auto.CONFIG_MAPPING_NAMES.items():
        folder, family = alias.replace("-", "_"), own.get(models.get(alias, ""))
        if family is not None and folder in searched and alias not in FAMILIES:
            where = f"{folder}.{config.removesuffix('Config')}"
            yield family, witness.place_of(family)._replace(config=where)


def nearest(source: str, sources: Mapping[str, list[str]]) -> list[str]:
    """Families with this source, then the few whose source is nearest to it."""
    lines = source.split("\n")
    likeness = {x: SequenceMatcher(None, lines, x.split("\n")).ratio() for x in sources}
    near = sorted((x for x in sources if likeness[x] > LIKE), key=lambda x: -likeness[x])
    return [family for x in near[:MOST] for family in sources[x]]


def places_of(folder: str, prefix: str, family: str) -> Iterator[Place]:
    """Where the config and the model of an attention may be."""
    like = witness.place_of(family)
    made = f"{prefix}Attention("
    holders = [
        name
        for name, node in classes(folder).items()
        if any(made in ast.unparse(part) for part in node.body) and name.startswith(prefix)
    ]
    for block in [name.removeprefix(prefix) for name in holders] or [like.block]:
        texts = ("Text", "Vision", "Audio", "Backbone")
        for text in ("", *(x for x in texts if f"{prefix}{x}Model" in classes(folder))):
            here = like._replace(folder=folder, prefix=prefix, text=text, block=block)
            yield here
            if isinstance(like.path, str) and like.path.startswith("encoder."):
                yield here._replace(path=like.path.removeprefix("encoder."))


def model_type(place: Place) -> str | None:
    """Of the config of a place; None if there is no such config or it has a family already."""
    try:
        witness.PLACES["candidate"] = place
        found = witness.found("candidate", "Config").model_type
    except (AttributeError, ImportError):
        return None
    finally:
        witness.PLACES.pop("candidate")
    return None if found in FAMILIES else found or None


def lacking(alias: str, family: str) -> list[str]:
    """Fields that the family reads, and that its class has but not that of the alias."""
    first, other = ({*facts.class_fields(name)} for name in (family, alias))
    return [name for name in facts_of(family).defaults if name in first - other]


def register(alias: str, family: str, fixed: Mapping[str, object]) -> None:
    """Serves a model type as an alias, with the defaults of its class."""
    FACTS[alias], ALIASES[alias] = Facts(alias=family, fixed=fixed), family
    SERVED.add(alias)
    facts.fields_read.cache_clear()
    names, defaults = facts.names_of(alias), facts.defaults_of(alias)
    FACTS[alias] = FACTS[alias]._replace(names=names, defaults=defaults)


def forget(alias: str) -> None:
    """Serves it no longer."""
    for table in (FACTS, ALIASES, witness.PLACES, parts.MODELS):
        table.pop(alias, None)
    SERVED.discard(alias)


def without(small: Small, name: str) -> list[Small]:
    """The config without a field, and with one that says something else."""
    rest = {key: value for key, value in small.fields.items() if key != name}
    other = 12 if name == "head_dim" else not small.fields.get(name)
    return [replace(small, fields=fields) for fields in (rest, {**rest, name: other})]


def tried_lacking(alias: str, family: str) -> str:
    """Why an alias that lacks fields is none; "" if layers are equal without and with them."""
    for small in [x for x in CONFIGS if x.name == family][:2]:
        for name in lacking(alias, family):
            for each in without(replace(small, alias=alias), name):
                layer, want = theirs(each.spelt("new"), each)
                if want is None:
                    continue  # transformers refuses it
                got = ours(each.spelt("new"), each, layer)
                if isinstance(got, ValueError) or not judge.same_function(got, want).ok:
                    return f"{name}: {got if isinstance(got, ValueError) else 'another function'}"
    return ""


def tried(alias: str, family: str) -> str:
    """Why a candidate is no alias; "" if it is one."""
    small = replace(next(x for x in CONFIGS if x.name == family), alias=alias)
    for spelling in ("old", "new"):
        given = small.spelt(spelling)
        layer, want = theirs(given, small)
        if want is None:
            return f"transformers: {layer}"
        got = ours(given, small, layer)
        if isinstance(got, ValueError) or not judge.same_function(got, want).ok:
            return f"{spelling}: {got if isinstance(got, ValueError) else 'another function'}"
    whole = witness.found(alias, "Config")().to_dict()
    plain, full = (
        described(nnx.eval_shape(lambda x=x: families.attention(x, 0, rngs=nnx.Rngs(0))))
        for x in ({"model_type": alias}, {**whole, "model_type": alias})
    )
    if not {*(whole.get("layer_types") or ())} <= {*KINDS}:
        return f"some layers are no attention: {whole['layer_types']}"
    if plain != full:
        return f"defaults: {plain} and {full}"
    walk(small, "new", PASSED_OVER.get(alias, ()))
    return tried_lacking(alias, family)


def gather(searched: Sequence[str]) -> None:
    """Registers the aliases of these folders, and prints which candidates are none and why."""
    for family, place in candidates(searched):
        alias = model_type(place)
        if alias is None or alias in ALIASES:
            continue
        witness.PLACES[alias] = place
        try:
            unread = {**UNREAD, **UNREAD_BY.get(alias, {})}
            lacks = lacking(alias, family)
            register(alias, family, {x: unread[x] for x in lacks if x in unread})
            reason = tried(alias, family)
        except Exception as error:  # by whatever class: it is told
            reason = f"{type(error).__name__}: {error}"
        print(f"{alias}: {family} {place}: {reason[:300] or 'an alias'}", flush=True)
        if reason:
            forget(alias)


def models(searched: Sequence[str]) -> Iterator[tuple[str, Model]]:
    """Families with an encoder and a decoder, and models whose attention has the same source."""
    sources = {}
    for family in {small.name: None for small in PARTS}:
        folder, prefix = parts.MODELS[family]
        if (node := classes(folder).get(f"{prefix}Attention")) is not None:
            sources[bare(node, prefix)] = family
    for folder in searched:
        for name, node in classes(folder).items():
            prefix = prefix_of(name)
            family = name.endswith("Attention") and sources.get(bare(node, prefix))
            if family and f"{prefix}Model" in classes(folder):
                yield family, Model(folder, prefix)


def tried_parts(alias: str, family: str) -> str:
    """Why a model is no alias of a family with an encoder and a decoder; "" if it is one."""
    each = {small.part: replace(small, alias=alias) for small in PARTS if small.name == family}
    whole = {**parts.config_of({}, alias).to_dict(), "model_type": alias}
    for part, small in each.items():
        layer, want = theirs(small.given, small)
        if want is None:
            return f"transformers: {layer}"
        got = ours(small.given, small, layer)
        if isinstance(got, ValueError) or not judge.same_function(got, want).ok:
            return f"{part}: {got if isinstance(got, ValueError) else 'another function'}"
        plain, full = (described_part(x, 0, part) for x in ({"model_type": alias}, whole))
        if plain != full:
            return f"defaults: {plain} and {full}"
        walk(small, "new")
    return ""


def gather_models(searched: Sequence[str]) -> None:
    """As `gather`, of models with an encoder and a decoder."""
    for family, model in models(searched):
        cls = getattr(witness.library(), f"{model.prefix}Config", None)
        alias = cls and cls.model_type
        if alias is None or alias in FAMILIES or alias in ALIASES:
            continue
        parts.MODELS[alias] = model
        try:
            register(alias, family, {})
            reason = tried_parts(alias, family)
        except Exception as error:  # by whatever class: it is told
            reason = f"{type(error).__name__}: {error}"
        print(f"{alias}: {family} {model}: {reason[:300] or 'an alias'}", flush=True)
        if reason:
            forget(alias)


def is_unusual(alias: str) -> bool:
    """Whether its classes are not where the tables of transformers say."""
    place = witness.PLACES.pop(alias)
    usual = witness.place_of(alias)
    witness.PLACES[alias] = place
    return place != usual


def main(searched: Sequence[str]) -> None:
    for alias in (*ALIASES,):
        folder = (parts.MODELS.get(alias) or witness.place_of(alias)).folder
        if not searched or {folder, alias.replace("-", "_")} & {*searched}:
            forget(alias)
    with jax.enable_x64(True):
        gather(searched or folders())
        gather_models(searched or folders())
    names = sorted(ALIASES)
    new = [name for name in names if BEFORE.get(name) != ALIASES[name]]
    print(f"new aliases: {', '.join(new) or 'none; the lines above say what each type differs in'}")
    if BEFORE == ALIASES:
        return
    facts.FILE.write_text(facts.text(facts.contents(new)))
    places = {x: witness.PLACES[x] for x in names if x in witness.PLACES and is_unusual(x)}
    (ROOT / "parity_tests/families/aliases.py").write_text(
        '"""Where the classes of aliases are, if not where transformers\' own tables say."""\n\n'
        f"from .place import Model, Place\n\n{MADE}"
        f"PLACES = {pformat(places)}\n"
        f"MODELS = {pformat({x: parts.MODELS[x] for x in names if x in parts.MODELS})}\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
