"""The same attentions in plain PyTorch, as on a whiteboard: what flax_attn is measured against.

Each is found here too by its name alone: `torch_ref.CausalAttention`.
"""

from importlib import import_module
from pkgutil import iter_modules


def __getattr__(name):
    """The class of that name, whichever file holds it; torch is imported only then."""
    files = (f"{__name__}.{found.name}" for found in iter_modules(__path__))
    for module in map(import_module, files if name[0].isupper() else ()):
        if getattr(getattr(module, name, None), "__module__", None) == module.__name__:
            return getattr(module, name)
    raise AttributeError(f"torch_ref has no {name!r}.")
