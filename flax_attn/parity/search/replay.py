"""Evaluates a part of a recorded program again, from recorded values, with some changes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ..sides.tape import Node, Ref, Tape, mapped

# Evaluates an operation otherwise: called with the operation's function, arguments and keywords.
Function = Callable[..., Any]


@dataclass(frozen=True)
class Change:
    """What one operation does otherwise.

    Attributes:
      function: evaluates it in the place of the operation's own function.
      operands: numbers of other values by index of the argument that they replace.
      detached: indices of arguments that pass no gradient; -1 for the result.
      attached: whether a `detach` lets gradients pass.
      more: numbers of further values that `function` gets, by number, as its last argument; None
        if it takes none.
      share: how much of the change there is: 0 gives torch's result.
    """

    function: Function | None = None
    operands: Mapping[int, int] = field(default_factory=dict)
    detached: frozenset[int] = frozenset()
    attached: bool = False
    more: tuple[int, ...] | None = None
    share: float = 1.0


Changes = Mapping[int, Change]


@contextmanager
def in_float64() -> Iterator[None]:
    """Quotients of integers and the like are float64, as in the recorded run."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def in_one_thread() -> Iterator[None]:
    """As `in_float64`, and in one thread: sharing small arrays takes longer than computing them."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with in_float64():
            yield
    finally:
        torch.set_num_threads(threads)


class Replay:
    """One evaluation of a program with changes.

    Values that depend on no changed operation are the recorded ones, unless gradients are wanted.

    Args:
      tape: the recorded program.
      changes: by number of the operation.
      leaves: values that are replaced, with their numbers; nothing before them is evaluated.
      whole: whether to evaluate unchanged operations too, as gradients need it.
      bounds: values that stay as recorded, even if they depend on a change.
    """

    def __init__(
        self,
        tape: Tape,
        changes: Changes,
        leaves: Mapping[int, Any] | None = None,
        whole: bool = False,
        bounds: frozenset[int] = frozenset(),
    ):
        self.tape, self.changes, self.whole, self.bounds = tape, changes, whole, bounds
        self.made: dict[int, Any] = dict(leaves or {})
        self.first = min(changes, default=0)
        self.reached: dict[int, bool] = {}

    def value(self, number: int) -> Any:
        """Evaluates a value, and what it depends on."""
        left = [number]
        while left:
            one = left[-1]
            node = self._pending(one)
            if node is None:
                left.pop()
                continue
            missing = [x for x in self._operands(node) if self._pending(x) is not None]
            if set(missing) & {*left}:
                raise RecursionError("an operation would depend on its own result")
            if missing:
                left += missing[:1]
            else:
                self._evaluate(node)
                left.pop()
        return self._get(number)

    def _get(self, number: int) -> Any:
        return self.made[number] if number in self.made else self.tape.values[number]

    def _pending(self, number: int) -> Node | None:
        """The operation to evaluate before a value is known; None if it is."""
        producer = self.tape.producers[number]
        if number in self.made or number in self.bounds or producer < 0:
            return None
        return self.tape.nodes[producer] if self.whole or self.depends(number) else None

    def depends(self, number: int) -> bool:
        """Whether a value depends on a changed operation."""
        left = [number]
        while left:
            one = left[-1]
            producer = self.tape.producers[one]
            if one in self.reached:
                left.pop()
            elif producer in self.changes and one not in self.bounds:
                self.reached[one] = True
            elif producer < self.first or one in self.bounds:
                self.reached[one] = False
            else:
                operands = self.tape.nodes[producer].operands
                missing = [x for x in operands if x not in self.reached]
                left += missing
                if not missing:
                    self.reached[one] = any(self.reached[x] for x in operands)
        return self.reached[number]

    def _operands(self, node: Node) -> list[int]:
        change = self.changes.get(node.number)
        if change is None or not (change.operands or change.more):
            return node.operands
        kept = [x for i, x in enumerate(node.args) if i not in change.operands]
        rest = replace(node, args=tuple(kept))
        return [*rest.operands, *change.operands.values(), *(change.more or ())]

    def _evaluate(self, node: Node) -> None:
        import torch

        with torch.set_grad_enabled(self.whole and node.grad):
            made = evaluated(node, self.changes.get(node.number), self._get)
        # What a change does not give, such as a norm's statistics, stays as it was.
        unchanged = {i: self.tape.values[i] for i in node.outs if i >= 0 and i not in made}
        self.made |= {**unchanged, **made}


def evaluated(node: Node, change: Change | None, get: Callable[[int], Any]) -> dict[int, Any]:
    """The results of one operation by number; `get` gives a value."""
    if change is None and node.is_flat:
        plain = [get(x.value) if x.__class__ is Ref else x for x in node.args]
        out = node.func(*plain, **node.kwargs)
        return _numbered(node, out)
    args, kwargs = _arguments(node, change, get)
    if change is None:
        out = node.func(*args, **kwargs)
    elif change.attached:
        out = args[0]
    elif change.function is None:
        out = node.func(*args, **kwargs)
    else:
        more = () if change.more is None else ({x: get(x) for x in change.more},)
        out = change.function(node.func, args, kwargs, *more)
    if change is not None and -1 in change.detached:
        out = mapped(out, lambda x: x.detach() if hasattr(x, "detach") else x)
    if change is not None and change.share != 1.0:
        plain, _ = _arguments(node, None, get)
        out = _blended(node.func(*plain, **kwargs), out, change.share)
    return _numbered(node, out)


def _numbered(node: Node, out: Any) -> dict[int, Any]:
    if not node.several:
        return {node.outs[0]: out}
    return {i: x for i, x in zip(node.outs, out, strict=False) if i >= 0}


def _blended(plain: Any, other: Any, share: float) -> Any:
    """Results between torch's and the changed ones; what is no float is the changed one."""
    if isinstance(plain, tuple | list):
        return [_blended(x, y, share) for x, y in zip(plain, other, strict=False)]
    if not hasattr(plain, "is_floating_point") or not plain.is_floating_point():
        return other
    made = plain + share * (other - plain)
    return made.where(plain.isfinite() & other.isfinite(), other)


def _arguments(
    node: Node, change: Change | None, get: Callable[[int], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def fill(x: Any) -> Any:
        return get(x.value) if isinstance(x, Ref) else x

    args = [mapped(x, fill) for x in node.args]
    for place, number in (change.operands if change else {}).items():
        # Kernels of norms take the memory of their weights as it lies.
        args[place] = get(number).contiguous()
    for place in change.detached if change else ():
        if place >= 0:
            args[place] = args[place].detach()
    return tuple(args), {k: mapped(x, fill) for k, x in node.kwargs.items()}


def ancestors(tape: Tape, targets: Iterable[int], bounds: frozenset[int]) -> list[Node]:
    """The operations that values depend on, up to the bounds, in order."""
    numbers: set[int] = set()
    left = [x for x in targets]
    seen: set[int] = set()
    while left:
        one = left.pop()
        producer = tape.producers[one]
        if one in seen or one in bounds or producer < 0:
            continue
        seen.add(one)
        if producer not in numbers:
            numbers.add(producer)
            left += tape.nodes[producer].operands
    return [tape.nodes[i] for i in sorted(numbers)]
