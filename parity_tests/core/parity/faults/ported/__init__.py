"""Ported blocks: published blocks without attention, and what porters do wrong in them."""

from . import generative, images, recurrent, sounds, words
from .mistake import Block as Block
from .mistake import Mistake as Mistake
from .table import run_all as run_all
from .table import text as text

__all__ = ["BLOCKS", "MISTAKES", "Block", "Mistake", "run_all", "text"]

MISTAKES = [
    mistake
    for module in (recurrent, words, images, sounds, generative)
    for mistake in module.MISTAKES
]
BLOCKS = list({mistake.group: mistake.block for mistake in MISTAKES}.values())
