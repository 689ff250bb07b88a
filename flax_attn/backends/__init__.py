"""Backends: the ways one attention can be computed, in the order in which "auto" tries them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax

from .. import reference
from ..rules import Rules
from . import blockwise, cudnn, protocol, splash, tokamax

Forward = Callable[[jax.Array, jax.Array, jax.Array, Rules], tuple[jax.Array, jax.Array]]
Refusal = Callable[[jax.Array, jax.Array, jax.Array, Rules], str | None]


def _never(q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> str | None:
    return None


class Backend(NamedTuple):
    """`forward(q, k, v, rules) -> (o, lse)` on B T N H arrays and bound rules.

    `refusal` gives, from static facts alone, the reason why it cannot serve a request, or None;
    `aside` the reason why "auto" passes it over although it could, or None.
    """

    forward: Forward
    refusal: Refusal
    aside: Refusal = _never


_known = protocol.with_known_lengths
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "cudnn": Backend(cudnn.forward, _known(cudnn.refusal), protocol.aside),
        "tokamax": Backend(tokamax.forward, _known(tokamax.refusal), protocol.aside),
        "splash": Backend(splash.forward, _known(splash.refusal), protocol.aside),
        "blockwise": Backend(blockwise.forward, _known(_never), blockwise.aside),
        "reference": Backend(reference.forward, _never),
    }
)
