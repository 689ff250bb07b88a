"""Maps tensors to Params, and reads and writes checkpoints without torch.

Reads safetensors, GGUF and npz files; writes safetensors.
"""

import sys

from .._internal.lazy import Lazy

TYPE_CHECKING = False  # type checkers treat it as True; avoids importing typing
if TYPE_CHECKING:
    from ..errors import CheckpointError as CheckpointError
    from .gguf_keys import gguf_config as gguf_config
    from .load import load as load
    from .load import load_stacked as load_stacked
    from .lora import load_lora as load_lora
    from .lora import save_lora as save_lora
    from .rule import Rule as Rule
    from .save import save as save
    from .torch_file import read_torch as read_torch

# The module that defines each public name. Imported on first use.
_HOMES = {
    "CheckpointError": "..errors",
    "gguf_config": ".gguf_keys",
    "load": ".load",
    "load_lora": ".lora",
    "load_stacked": ".load",
    "read_torch": ".torch_file",
    "Rule": ".rule",
    "save": ".save",
    "save_lora": ".lora",
}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

sys.modules[__name__].__class__ = Lazy
