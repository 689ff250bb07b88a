"""Writes where whole models of transformers have the attention of a layer.

    python -m parity_tests.core.families.paths

Only what is not the usual place; where it depends on the layer, the family says it. Run `ruff
format` after it.
"""

import re
from dataclasses import replace
from importlib import import_module
from inspect import getmembers, isclass
from pprint import pformat
from typing import Any

from flax_attn.families._aliases import ALIASES
from flax_attn.families._choose import family_of
from flax_attn.families._config import USUAL
from flax_attn.families._table import TYPES
from parity_tests.families import witness
from parity_tests.families.configs import CONFIGS, Small

from .aliases import MADE, ROOT

WRITTEN = MADE.replace("aliases", "paths")


def small_of(name: str) -> list[Small]:
    """The small configs of a model type."""
    family = ALIASES.get(name, name)
    found = [small for small in CONFIGS if small.name == family]
    return found if name == family else [replace(small, alias=name) for small in found]


def model_of(config: Any, name: str) -> Any:
    """The whole model of a config: its Model, or where it has none the first with a head.

    A config of another folder goes by the Model of this one.
    """
    place, wanted = witness.PLACES[name], type(config)
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
    (found,) = {
        re.sub(rf"(?<=\.){index}(?=\.)", "{}", path, count=1)
        for path, module in model.named_modules()
        if isinstance(module, kind) and re.search(rf"^[^\d]*\.{index}\.", path)
    }
    return found


def path_of(small: Small) -> str:
    """Where the whole model has the attention of the layer that a small config looks at."""
    config = witness.config_of(small.spelt("new"), small.model_type)
    kind = type(witness.attention(config, small.model_type, small.index))
    return path_in(model_of(config, small.model_type), kind, small.index)


def unusual() -> dict[str, str]:
    """By model type, the place that all its layers have, where it is not the usual one."""
    each = {
        name: {path_of(small) for small in small_of(name)}
        for name in sorted({*TYPES} & {*witness.PLACES})
        if says_nothing(name)
    }
    return {name: path for name, (path,) in each.items() if path != USUAL}


def says_nothing(name: str) -> bool:
    """Whether the family of a model type leaves it to the table."""
    reads = ((*family_of(x.spelt("new"), None), x.index) for x in small_of(name))
    return all(family.path(read, index) is None for family, read, index in reads)


def text() -> str:
    """The file but for its layout."""
    return (
        f'"""Where whole models have the attention of a layer, if not at `{USUAL}`."""\n\n'
        f"{WRITTEN}PATHS: dict[str, str] = {pformat(unusual())}\n"
    )


if __name__ == "__main__":
    (ROOT / "flax_attn/families/_paths.py").write_text(text())
