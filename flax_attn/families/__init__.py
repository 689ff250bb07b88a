"""Published configs: from a config.json and the index of a layer to its attention layer.

A family is one file here and its line in `_choose.py`; in `parity_tests/families` a line says where
its classes in transformers are, and two configs or more are proven. Model types that have the same
attention under another name are found by `python -m parity_tests.core.families.aliases`.
"""

from ._aliases import ALIASES as ALIASES
from ._choose import attention as attention
from ._choose import parts as parts
from ._naming import rules as rules
from ._table import TYPES as TYPES

__all__ = ["ALIASES", "TYPES", "attention", "parts", "rules"]


def __dir__() -> list[str]:
    return sorted(__all__)
