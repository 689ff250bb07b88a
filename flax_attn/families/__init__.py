"""Builds attention layers from published configs: a config.json and the index of a layer.

A family is one file here and its line in `_table.py`; `parity_tests/families` names its classes in
transformers and compares at least two configs with them. Model types that have the same attention
under another name are found by `python -m parity_tests.core.families.aliases`.
"""

from ._aliases import ALIASES as ALIASES
from ._choose import attention as attention
from ._choose import parts as parts
from ._naming import rules as rules
from ._table import TYPES as TYPES

__all__ = ["ALIASES", "TYPES", "attention", "parts", "rules"]


def __dir__() -> list[str]:
    return sorted(__all__)
