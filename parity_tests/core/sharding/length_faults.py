"""Faults of context parallelism, planted one after the other: the comparison must see each.

`python -m parity_tests.core.sharding.length_faults` prints for each whether it was seen. Names that
follow it say which are planted.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from parity_tests.core.sharding.lengths import run, wanted  # first: it makes the devices

# isort: split
import jax
import jax.numpy as jnp

import flax_attn.sharding.ring as ring
import flax_attn.sharding.sequence as sequence
import flax_attn.sharding.strategies as strategies
from flax_attn import Dropout
from flax_attn._internal.arrays import is_float
from flax_attn.layouts import tokens_in

Ring = ring.Ring
send, steps, forward, merged = Ring.send, sequence._steps, ring._forward, ring.merge_softmax
with_sinks = ring.blockwise.with_sinks


class Fault(NamedTuple):
    """What is put in the place of what, and the request that must differ."""

    where: Any
    name: str
    wrong: Any
    request: str
    strategy: str = "ring"
    layout: str = "contiguous"


def only_floats(self: Ring, tree: Any, by: int = 1) -> Any:
    sent = send(self, tree, by)
    return jax.tree.map(lambda x, y: y if is_float(x) else x, tree, sent)


def not_home(self: Ring, tree: Any, by: int = 1) -> Any:
    return send(self, tree, by) if by == 1 else tree


def one_step_less(*given: Any) -> dict[str, int]:
    found = steps(*given)
    return {**found, "steps": found["steps"] - 1} if found else found


def own_stats(self: Ring, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    """The forward pass, which keeps the m and l of the keys at hand for the backward one."""
    out, (given, (o, _, _)) = forward(self, q, k, v, *rest)
    alone = self._replace(sequence=self.sequence._replace(steps=1, ahead=0))
    _, m, l = forward(alone, q, k, v, *rest)[1][1]
    return out, (given, (o, m, l))


def mean_of_two(one: Any, two: Any) -> Any:
    _, m, l = merged(one, two)
    first, second = (jnp.swapaxes(x[2] > 0, 1, 2)[..., None] for x in (one, two))
    return (one[0] + two[0]) / jnp.maximum(first * 1.0 + second, 1), m, l


def sinks_of_two_steps(sinks: Any, *part: Any) -> Any:
    return with_sinks(None if sinks is None else sinks + jnp.log(2.0), *part)


def in_stripes(slots: Any, length: int, shards: int, layout: str) -> Any:
    return tokens_in(slots, length, shards, "striped" if layout == "zigzag" else layout)


def first_keys(total: jax.Array, x: jax.Array) -> jax.Array:
    return x.astype(total.dtype)


FAULTS = {
    "positions that do not travel": Fault(Ring, "send", only_floats, "causal"),
    "dk and dv that do not come home": Fault(Ring, "send", not_home, "a window both ways"),
    "a window that skips a step too many": Fault(
        sequence, "_steps", one_step_less, "a window both ways"
    ),
    "m and l of one step backward": Fault(ring, "_forward", own_stats, "causal"),
    "a mean in place of the merge": Fault(ring, "merge_softmax", mean_of_two, "causal"),
    "gradients of the last step alone": Fault(ring, "_add", first_keys, "causal"),
    "sinks in every step": Fault(
        ring.blockwise, "with_sinks", sinks_of_two_steps, "slopes, scale and sinks"
    ),
    "dropout by slot": Fault(Dropout, "at_positions", lambda self, at: self, "dropout"),
    "stripes for a zigzag": Fault(
        sequence, "tokens_in", in_stripes, "documents", "all_gather", "zigzag"
    ),
    "arrays that stay by slot": Fault(
        strategies,
        "_to_token_order",
        lambda how, x, n: x,
        "arrays by slot",
        "all_gather",
        "striped",
    ),
    "the mean of a window's keys": Fault(
        sequence.Sequence, "without_window", property(lambda self: self), "rows that see nothing"
    ),
}


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    jax.clear_caches()
    with patch.object(fault.where, fault.name, fault.wrong):
        if fault.name == "_forward":
            ring._attend.defvjp(fault.wrong, ring._backward)
        try:
            yield
        finally:
            ring._attend.defvjp(forward, ring._backward)
            jax.clear_caches()


def seen(fault: Fault) -> bool:
    wanted(fault.request)
    with planted(fault):
        found = run(fault.request, fault.strategy, fault.layout)
    return not all(found["equal"])


def main(names: list[str]) -> None:
    with jax.enable_x64(True):
        for name in names or FAULTS:
            print(json.dumps({"name": name, "seen": seen(FAULTS[name])}))
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
