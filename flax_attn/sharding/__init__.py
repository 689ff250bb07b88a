"""Context parallelism: strategies for sharded lengths, and layouts of tokens.

`attend`, and every layer that uses it, takes arrays that are sharded over several devices, as
`entry` describes. This package holds what a user may choose.
"""

import sys

from .._internal.lazy import Lazy

TYPE_CHECKING = False  # what type checkers take for true; typing itself is not imported
if TYPE_CHECKING:
    from ..token_layouts import place as place
    from ..token_layouts import positions as positions
    from ..token_layouts import unplace as unplace
    from .context import context_parallel as context_parallel
    from .context import on as on

# The module that defines each public name. Imported on first use.
_HOMES = {
    "context_parallel": ".context",
    "on": ".context",
    "place": "..token_layouts",
    "positions": "..token_layouts",
    "unplace": "..token_layouts",
}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

sys.modules[__name__].__class__ = Lazy
