"""Published blocks in torch, each with a right port to Flax."""

from . import experts, graphs, images, llama, mixers, recurrent, sequences, speech
from .block import Block as Block

__all__ = ["BLOCKS", "Block"]

MODULES = (speech, mixers, recurrent, images, graphs, sequences, experts, llama)
BLOCKS = [block for module in MODULES for block in module.BLOCKS]
