"""A dispatch mode of torch, made without torch's compiler."""

import sys
from collections.abc import Callable
from typing import Any

OpHandler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def dispatch_mode(on_op: OpHandler) -> Any:
    """A mode under which every operation gives what `on_op(operation, args, kwargs)` gives.

    torch hides the method of a mode from its compiler, and imports the compiler for that, which
    takes seconds. While nobody has imported it, there is nobody to hide from.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return "torch._dynamo" in sys.modules

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return on_op(func, args, kwargs or {})

    return Mode()
