"""The benchmark: every competitor is proven equal at the same shapes before it is timed."""

from functools import partial

from .._internal.moved import old_module

__getattr__ = partial(old_module, __name__)
