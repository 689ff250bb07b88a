"""What transformers says of each model type, as `published.json` holds it.

`python -m parity_tests.families.facts` writes that file from the classes of transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ._config import NONE, NOTHING, USUAL, Names

INFINITY = {"__float__": "Infinity"}  # as transformers writes it, since JSON has no such number


class Facts(NamedTuple):
    """What the classes of one model type say.

    Attributes:
      defaults: of the fields that its attention reads, by the names of its config's class.
      names: of fields that the class has under another name too, both, as in `Family`.
      alias: the model type whose attention it has, if not one of its own.
      fixed: fields of that type which its class lacks, with what it does whatever a file says.
      path: of a layer's attention in the whole model, {} for its number.
      ignored: fields of its class that its attention does not read, and that of other types does.
      further: other fields of its class, which no attention reads.
      buffers: arrays of its attention that are no weights, and may be in files.
      whole: defaults of the fields that its whole model reads and its attention does not.
    """

    defaults: Mapping[str, Any] = NOTHING
    names: Names = NONE
    alias: str = ""
    fixed: Mapping[str, Any] = NOTHING
    path: str = USUAL
    ignored: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    whole: Mapping[str, Any] = NOTHING


def _number(fields: dict[str, Any]) -> Any:
    return float("inf") if fields == INFINITY else fields


_FILE = json.loads(
    Path(__file__).with_name("published.json").read_text("utf-8"), object_hook=_number
)
VERSION: str = _FILE["transformers"]
FACTS: dict[str, Facts] = {name: Facts(**fields) for name, fields in _FILE["types"].items()}
KNOWN = frozenset(_FILE["others"])  # model types of transformers that are not served
# Fields of their classes that look like one that some attention reads.
SIMILAR = frozenset(_FILE["similar"])
# All model types with the attention of another one, and that one.
ALIASES: Mapping[str, str] = {name: facts.alias for name, facts in FACTS.items() if facts.alias}


def facts_of(name: Any) -> Facts:
    """Returns what the file holds of a model type; nothing for one that it lacks."""
    return FACTS.get(str(name), Facts())


def has_field(facts: Facts, name: str) -> bool:
    """Whether a type's class in transformers has a field of this name, or attention reads it."""
    groups = (facts.defaults, facts.names, facts.fixed, facts.ignored, facts.further)
    return any(name in group for group in groups) or any(name in x for x in facts.names.values())
