"""Faults of decoding with a cache: one step with a ring of S slots."""

import jax.numpy as jnp

from . import trial_flax as right
from .fault import Fault, part
from .setup import first_row, mixed
from .weights import _tiled

C = "cache"


def stepped(name, wrong, low=mixed):
    return part(name, wrong, low=low, pair="step")


def integer(right_part, wrong):
    """Low: the last sequence alone."""

    def low(*args):
        good, bad = right_part(*args), wrong(*args)
        return good.at[-1].set(bad[-1])

    return low


def _row(right_part, wrong):
    return lambda *args: first_row(right_part(*args), wrong(*args))


def slotted(wrong):
    return stepped("slot", wrong, integer)


def seen(wrong):
    return stepped("written", wrong, _row)


def _rotated_again(cache, new):
    return right.rotate(new, jnp.arange(new.shape[1]))


def outputs(**change):
    """Returned values changed; at low amplitude mixed in."""

    def wrong(out):
        return {name: change.get(name, right.same)(x) for name, x in out.items()}

    return stepped("outputs", wrong)


def _through_bfloat16(x):
    return x.astype(jnp.bfloat16).astype(x.dtype)


KEY, VALUE, SCORES = "key", "value", "scores"
FAULTS = [
    Fault("one slot late", C, slotted(lambda before, z: (before + 1) % z.S), KEY),
    Fault("one slot early", C, slotted(lambda before, z: (before - 1) % z.S), KEY),
    Fault("overflow clamped", C, slotted(lambda before, z: jnp.minimum(before, z.S - 1)), KEY),
    Fault("overflow not written", C, slotted(lambda before, z: before), KEY),
    Fault(
        "every sequence at the first one's slot",
        C,
        slotted(lambda before, z: jnp.full_like(before, before[0] % z.S)),
        KEY,
    ),
    Fault("the new key not seen", C, stepped("read_k", lambda old, new: old), KEY),
    Fault("the new value not seen", C, stepped("read_v", lambda old, new: old), VALUE),
    Fault(
        "keys added to what was there",
        C,
        stepped("write_k", lambda here, new, cache: jnp.where(here, new + cache, cache)),
        KEY,
    ),
    Fault("keys of another sequence", C, stepped("read_k", lambda old, new: new[::-1]), KEY),
    Fault("cached keys rotated again", C, stepped("read_k", _rotated_again), KEY),
    Fault("keys cached unturned", C, stepped("rotate_k", lambda k, p: k), KEY),
    Fault("key at the position before", C, stepped("columns", lambda p: p - 1), KEY),
    Fault("key at its slot, not its position", C, stepped("columns", lambda p: p % 15), KEY),
    Fault("query at position zero", C, stepped("rows", lambda p: p * 0), "query", "not rotated"),
    Fault("query at the position after", C, stepped("rows", lambda p: p + 1), "query"),
    Fault(
        "query at the first one's position",
        C,
        stepped("rows", lambda p: jnp.full_like(p, p[0, 0])),
        "query",
    ),
    Fault(
        "unwritten slots seen",
        C,
        seen(lambda before, z: right.RIGHT.written(before, z) | True),
        SCORES,
        "mask missing|shown and 0 hidden",
    ),
    Fault(
        "the new key hidden",
        C,
        seen(lambda before, z: jnp.arange(z.S) < before[:, None]),
        SCORES,
        "mask: 0 places shown",
    ),
    Fault(
        "one unwritten slot seen",
        C,
        seen(lambda before, z: jnp.arange(z.S) <= before[:, None] + 1),
        SCORES,
        "shifted|shown and 0 hidden",
    ),
    Fault(
        "overflow forgets",
        C,
        seen(lambda before, z: jnp.arange(z.S) <= (before % z.S)[:, None]),
        SCORES,
        "mask: 0 places shown",
    ),
    Fault("key heads tiled", C, stepped("repeat_k", _tiled), KEY, "tiled"),
    Fault(
        "the cache returned one slot off",
        C,
        outputs(cache_k=lambda x: jnp.roll(x, 1, 1)),
        "output.cache_k",
        "shifted by one",
    ),
    Fault(
        "values returned in bfloat16",
        C,
        outputs(cache_v=_through_bfloat16),
        "output.cache_v",
        "bfloat16",
    ),
]
