"""Builds models from published configs: attention layers, or of some types the whole model.

`attention` takes a config.json and the index of a layer. `model` builds the types in `WHOLE`, and
`load` fills one from a folder of transformers; `models/` has what stands beside their attention.

A model type is a row of a table: in `decoders.py`, `encoders.py`, `hybrids.py`, `towers.py`, or in
a file of its own if its arithmetic differs. `published.json` holds what its class in transformers
says: defaults, paths, and which type has the same attention. `parity_tests/families` compares small
configs of each type with its class.
"""

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

__all__ = ["ALIASES", "TYPES", "attention", "kv_shared_layer_index", "parts", "rules"]
__all__ += ["WHOLE", "Decoder", "Encoded", "Encoder", "generate", "load", "model", "rules_of"]
__all__ += ["save"]


def __dir__() -> list[str]:
    return sorted(__all__)
