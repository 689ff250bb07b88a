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


class Backend(NamedTuple):
    """`forward(q, k, v, rules) -> (o, lse)` on B T N H arrays and bound rules.

    `refusal` gives, from static facts alone, the reason why it cannot serve a request, or None;
    `aside` the reason why "auto" passes it over although it could, or None.
    """

    forward: Forward
    refusal: Refusal
    aside: Refusal = lambda q, k, v, rules: None


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "cudnn": Backend(cudnn.forward, cudnn.refusal, protocol.aside),
        "tokamax": Backend(tokamax.forward, tokamax.refusal, protocol.aside),
        "splash": Backend(splash.forward, splash.refusal, protocol.aside),
        "blockwise": Backend(blockwise.forward, lambda q, k, v, rules: None, blockwise.aside),
        "reference": Backend(reference.forward, lambda q, k, v, rules: None),
    }
)
