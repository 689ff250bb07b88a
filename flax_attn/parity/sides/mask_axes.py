"""Carries dropout masks between channels-first and channels-last layouts by their axes.

The shapes of a mask on both sides usually determine the order of its axes. Where sizes are equal,
the order is the one that makes the inputs of the two dropouts agree; the outputs of the whole
module decide if a dropout is a function, whose input nobody sees.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from .. import judge
from .leaves import counted
from .match import Match
from .run import Run, axis_orders, is_floating

Order = tuple[int, ...]


class MaskAxes:
    """Axis orders from Flax's masks to torch's, by the number of the mask.

    A mask without an order is carried by `fit_mask`.
    """

    def __init__(self) -> None:
        self.orders: dict[int, Order] = {}

    def to_torch(self, keeps: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [x.transpose(self.orders.get(i, range(x.ndim))) for i, x in enumerate(keeps)]

    def to_flax(self, keeps: Sequence[np.ndarray]) -> list[np.ndarray]:
        back = {i: tuple(np.argsort(order)) for i, order in self.orders.items()}
        return [x.transpose(back.get(i, range(x.ndim))) for i, x in enumerate(keeps)]

    def learn(self, got: Run, torch_run: Run) -> bool:
        """Corrects orders by the dropouts' inputs; returns whether one changed.

        Only the first wrong one is sure, since it changes all inputs after it; later masks of the
        same shapes follow it until their own inputs show otherwise.
        """
        for i, current, orders in self._ambiguous(got, torch_run):
            errors = dict(_input_errors(got, torch_run, i, orders))
            best = min(errors, key=lambda order: errors[order], default=current)
            if best != current and errors[best] < judge.TELLS * errors.get(current, judge.INF):
                shapes = _shapes(got, torch_run, i)
                same = [j for j, _, _ in self._ambiguous(got, torch_run)]
                same = [j for j in same if j >= i and _shapes(got, torch_run, j) == shapes]
                self.orders |= dict.fromkeys(same, best)
                return True
        return False

    def guesses(self, got: Run, torch_run: Run) -> Iterator["MaskAxes"]:
        """Yields other orders of masks whose dropouts' inputs are unknown, if outputs differ."""
        unknown: dict[tuple, list[int]] = {}
        orders_of: dict[tuple, list[Order]] = {}
        for i, current, orders in self._ambiguous(got, torch_run):
            if not dict(_input_errors(got, torch_run, i, orders)):
                shapes = _shapes(got, torch_run, i)
                unknown.setdefault(shapes, []).append(i)
                orders_of[shapes] = [order for order in orders if order != current]
        for shapes, numbers in unknown.items():
            for order in orders_of[shapes] if not outputs_agree(got, torch_run) else ():
                other = MaskAxes()
                other.orders = self.orders | dict.fromkeys(numbers, order)
                yield other

    def _ambiguous(self, got: Run, torch_run: Run) -> Iterator[tuple[int, Order, list[Order]]]:
        """Yields number, current order and possible orders of masks whose shapes leave a choice."""
        for i, (mine, other) in enumerate(zip(got.keeps, torch_run.keeps, strict=False)):
            orders = axis_orders(mine.shape, other.shape)
            default = tuple(range(mine.ndim)) if mine.shape == other.shape else (*orders, ())[0]
            if len(orders) > 1:
                yield i, self.orders.get(i, default), orders


def misplaced(got: Run, torch_run: Run, pairs: Iterable[tuple[str, str, Match]]) -> int | None:
    """Number of the first mask with permuted axes, if nothing shows that the axes are permuted.

    Outputs that agree show it, or the dropout's inputs, or another tap whose axes are permuted too.
    Otherwise a mask of such a shape may as well belong to another place.
    """
    masks = zip(got.keeps, torch_run.keeps, strict=False)
    permuted = [
        i
        for i, (mine, other) in enumerate(masks)
        if mine.shape[-2:] != other.shape[-2:] and axis_orders(mine.shape, other.shape)
    ]
    if not permuted or outputs_agree(got, torch_run):
        return None
    others = (x for name, _, x in pairs if name.partition("#")[0] not in torch_run.places)
    if any(len(match.layout.way) == 2 for match in others):
        return None
    for i in permuted:
        orders = axis_orders(got.keeps[i].shape, torch_run.keeps[i].shape)
        if not any(x <= judge.LIKENESS for _, x in _input_errors(got, torch_run, i, orders)):
            return i
    return None


def outputs_agree(got: Run, torch_run: Run) -> bool:
    """Whether all floating outputs of the two runs are alike."""
    pairs = [(got.outputs[k], x) for k, x in torch_run.outputs.items() if k in got.outputs]
    return all(judge.allclose(x, y) for x, y in pairs if is_floating(y))


def _shapes(got: Run, torch_run: Run, i: int) -> tuple[Order, Order]:
    return got.keeps[i].shape, torch_run.keeps[i].shape


def _input_errors(
    got: Run, torch_run: Run, i: int, orders: Sequence[Order]
) -> Iterator[tuple[Order, float]]:
    """Yields the error between the inputs of the two dropouts in each order, if both are known."""
    call = torch_run.calls.get(_call_name(torch_run, i))
    mine = next(iter(got.inputs.get(_call_name(got, i), ())), None)
    want = call.inputs.get("0") if call is not None else None
    if mine is None or want is None:
        return
    for order in orders:
        if mine.ndim == len(order) and mine.transpose(order).shape == want.shape:
            yield order, judge.error(mine.transpose(order), want)


def _call_name(run: Run, i: int) -> str:
    """The tap of the call that drew a mask: a module that is called again draws again."""
    names: dict[str, None] = {}
    for place in run.places[: i + 1]:
        names[counted(names, place)] = None
    return [*names][-1]
