"""PyTorch modules of many styles, and what each one is."""

from .attention import ATTENTION as ATTENTION
from .near_misses import NEAR_MISSES
from .others import MIXERS

OTHERS = (*MIXERS, *NEAR_MISSES)
SUBJECTS = (*ATTENTION, *OTHERS)
