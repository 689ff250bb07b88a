"""Creates a torch dispatch mode without importing torch's compiler."""

import sys
from collections.abc import Callable
from typing import Any

OpHandler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def dispatch_mode(on_op: OpHandler) -> Any:
    """Returns a mode that replaces every operation by `on_op(operation, args, kwargs)`.

    Torch excludes the method of a mode from compilation, and imports its compiler for that, which
    takes seconds. As long as the compiler is not imported, nothing needs to be excluded.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        # Torch disables dynamo for a mode's handler unless this returns False.
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return "torch._dynamo" in sys.modules

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return on_op(func, args, kwargs or {})

    return Mode()
