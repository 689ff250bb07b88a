"""Cases: lists of module pairs to compare; finding, recording, running and reporting them."""

from functools import partial

from ..._internal.moved import old_module

__getattr__ = partial(old_module, __name__)
