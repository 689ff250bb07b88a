"""Parity on trained weights: what `flax-attn parity --real` proves, and the layers it keeps.

Nothing is downloaded and torch is not imported until `rows` is called.
"""

from collections.abc import Collection

from .fetch import RealError as RealError
from .fetch import cache_dir as cache_dir
from .golden import record_golden as record_golden
from .golden import replay_golden as replay_golden
from .kept import KEPT as KEPT
from .proof import Proof, Proofs, Say, prove

TOTAL = 54


def rows(say: Say = lambda text: None) -> Proofs:
    """`TOTAL` proofs as they are made: all-MiniLM-L6-v2, ANARCII, SmolLM2-135M, DINOv2 ViT-S.

    Args:
      say: called with a few words before each step.

    Raises:
      RealError: in one sentence, where weights or packages cannot be had.
    """
    from . import anarcii, dinov2, minilm, smollm2

    yield from minilm.proofs(say)
    yield from anarcii.proofs(say)
    yield from smollm2.proofs(say)
    yield from dinov2.proofs(say)


def kept(variants: Collection[str]) -> list[Proof]:
    """The proofs on trained layers of these variants that come with the package: no torch."""
    wanted = [layer for layer in KEPT if layer.variant in variants]
    return [prove(x.wheel, x.proven_equal_to, replay_golden(x), x.variant) for x in wanted]
