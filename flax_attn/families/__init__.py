"""Published configs: from a config.json and the index of a layer to its attention layer."""

from ._choose import attention as attention
from ._choose import rules as rules
