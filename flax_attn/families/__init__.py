"""Builds models from published configs: attention layers, or of some types the whole model.

`attention` takes a config.json and the index of a layer. `model` builds the types in `WHOLE`, and
`load` fills one from a folder of transformers; `models/` has what stands beside their attention.

A model type is a row of a table: in `decoders.py`, `encoders.py`, `hybrids.py`, `towers.py`, or in
a file of its own if its arithmetic differs. `published.json` holds what its class in transformers
says: defaults, paths, and which type has the same attention. `parity_tests/families` compares small
configs of each type with its class.
"""

import sys

from .._internal.lazy import Lazy

TYPE_CHECKING = False  # what type checkers take for true; typing itself is not imported
if TYPE_CHECKING:
    from ._choose import attention as attention
    from ._choose import kv_shared_layer_index as kv_shared_layer_index
    from ._choose import parts as parts
    from ._naming import rules as rules
    from ._published import ALIASES as ALIASES
    from ._table import TYPES as TYPES
    from .models.build import model as model
    from .models.decoder import Decoder as Decoder
    from .models.encoder import Encoded as Encoded
    from .models.encoder import Encoder as Encoder
    from .models.files import load as load
    from .models.files import rules_of as rules_of
    from .models.files import save as save
    from .models.generate import generate as generate
    from .models.rows import WHOLE as WHOLE

# The module that defines each public name. Imported on first use.
_HOMES = {
    "ALIASES": "._published",
    "TYPES": "._table",
    "attention": "._choose",
    "kv_shared_layer_index": "._choose",
    "parts": "._choose",
    "rules": "._naming",
    "WHOLE": ".models.rows",
    "Decoder": ".models.decoder",
    "Encoded": ".models.encoder",
    "Encoder": ".models.encoder",
    "generate": ".models.generate",
    "load": ".models.files",
    "model": ".models.build",
    "rules_of": ".models.files",
    "save": ".models.files",
}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

sys.modules[__name__].__class__ = Lazy
