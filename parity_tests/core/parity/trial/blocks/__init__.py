"""Published blocks in torch, each with a right port to Flax."""

from . import experts, graphs, images, llama, mixers, recurrent, sequences, speech

MODULES = (speech, mixers, recurrent, images, graphs, sequences, experts, llama)
BLOCKS = [block for module in MODULES for block in module.BLOCKS]
