"""The rate of a module's dropout on its attention weights."""

from dataclasses import dataclass, replace

from ..parity.sides.live import Live
from .program import Program


@dataclass(frozen=True)
class Drops:
    """What a module draws in train mode.

    Attributes:
      rate: share of the weights that are dropped; 0.0 for none.
      elsewhere: whether it also drops other values.
    """

    rate: float
    elsewhere: bool


def dropout_of(live: Live, in_eval: Program) -> Drops:
    """Tells the dropout from one run in train mode.

    Args:
      live: the module with its call.
      in_eval: its recorded run in eval mode.
    """
    run = replace(live, request=replace(live.request, train=True)).alone("float64", None)
    sizes = {in_eval.tape.values[weights].numel() for _, weights in in_eval.softmaxes}
    drawn = [*zip(run.keeps, run.rates, strict=True)]
    rates = {round(1 - rate, 9) for keep, rate in drawn if keep.size in sizes}
    elsewhere = any(keep.size not in sizes for keep, _ in drawn)
    return Drops(max(rates, default=0.0), elsewhere or len(rates) > 1)
