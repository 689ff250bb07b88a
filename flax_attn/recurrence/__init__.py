"""Linear recurrences over tokens: their states, packed documents and padding, and short memories.

Pure functions; `flax_attn.layers` holds the modules that are made of them.
"""

from .convolution import causal_convolution as causal_convolution
from .elementwise import elementwise_recurrence as elementwise_recurrence
from .linear import linear_recurrence as linear_recurrence

__all__ = ["causal_convolution", "elementwise_recurrence", "linear_recurrence"]


def __dir__() -> list[str]:
    return sorted(__all__)
