"""The base of all layers."""

from typing import Any, ClassVar

from flax import nnx

from .._internal.checks import checked_arguments


class Layer(nnx.Module):
    """A module whose constructor and call say what they take if an argument does not fit."""

    mask_is_of: ClassVar[str] = "pairs"  # one of `other_names.MASKS`
    renamed_arguments: ClassVar[frozenset[str]] = frozenset()  # old ones, still taken

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("__init__", "__call__"):
            if name in vars(cls):
                setattr(cls, name, checked_arguments(vars(cls)[name]))
