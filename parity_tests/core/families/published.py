"""Writes which model types transformers knows beside those that are served, and their fields.

    python -m parity_tests.core.families.published

Of a model type that is served it writes the fields of its class that its attention does not read,
as far as a warning would name them. Run it after a change of what a family reads, and then
`ruff format`.
"""

from pprint import pformat
from typing import Any

from flax_attn.families._aliases import ALIASES
from flax_attn.families._config import Family
from flax_attn.families._table import FAMILIES, TYPES
from flax_attn.families._unread import read_by_any, unread
from parity_tests.families import parts, witness

from .aliases import MADE, ROOT

WRITTEN = MADE.replace("aliases", "published")


def class_of(name: str) -> Any:
    """The class of the config of a model type that is served."""
    if name in witness.PLACES:
        return witness.found(name, "Config")
    return getattr(witness.library(), f"{parts.MODELS[name].prefix}Config")


def family_of(name: str) -> Family:
    """Its family; of an encoder with a decoder the first of them, which read the same fields."""
    family = FAMILIES[ALIASES.get(name, name)]
    return family if isinstance(family, Family) else next(iter(family.values()))


def fields_of(name: str) -> dict[str, Any]:
    """All fields of its class by every name, with their defaults."""
    cls = class_of(name)
    config = cls()
    return {**{k: getattr(config, k, None) for k in cls.attribute_map}, **config.to_dict()}


def known() -> tuple[str, ...]:
    """Model types that transformers knows and that are not served."""
    names = witness.library().models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    return tuple(sorted({*names} - {*TYPES}))


def class_fields() -> dict[str, tuple[str, ...]]:
    """By model type, the fields of its class that would be named if they were not its own."""
    by_any = read_by_any(FAMILIES)
    each = {
        name: [x for x in sorted(fields_of(name)) if unread({x: True}, "", family_of(name), by_any)]
        for name in TYPES
    }
    return {name: tuple(fields) for name, fields in each.items() if fields}


def text() -> str:
    """The file but for its layout."""
    return (
        '"""Model types of transformers 5.23: those without a family, and fields of the others."""'
        f"\n\n{WRITTEN}KNOWN = frozenset(\n    {pformat(' '.join(known()), width=92)}.split()\n)\n"
        "# Fields of their classes that their attention does not read, and that of others does.\n"
        f"CLASS_FIELDS: dict[str, tuple[str, ...]] = {pformat(class_fields())}\n"
    )


if __name__ == "__main__":
    (ROOT / "flax_attn/families/_published.py").write_text(text())
