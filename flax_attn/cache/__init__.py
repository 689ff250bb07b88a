"""Caches of keys and values: attention of new tokens over all tokens so far."""

from ..quantized import Float8 as Float8
from ..quantized import Int8 as Int8
from .attention import attend_cached as attend_cached
from .attention import attend_memory as attend_memory
from .memory import Memory as Memory
from .paged import PagedCache as PagedCache
from .slots import Cache as Cache
from .state import State as State
