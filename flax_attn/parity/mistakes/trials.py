"""Runs torch with one porting mistake at a time."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..sides.changes import Change, Changes, Operation
from ..sides.original import Trial, inside
from ..sides.run import Run
from ..torch_module import to_numpy, to_torch
from .catalogue import mistakes

# Maximum number of operations of all trials of one comparison, and maximum size of tensors that are
# identified by their values.
BUDGET, KNOWN = 60_000, 1 << 16
# Periods of alternating operations on one line, such as the gates of a recurrent cell; and maximum
# number of operations to try one by one.
STRIDES, SINGLE = (2, 3, 4), 6


@dataclass
class TorchFaultTrials:
    """All mistakes that can be made in one run of torch, up to a total number of operations.

    Attributes:
      run: runs torch with changes and replaced weights.
      truth: the unchanged run.
      inputs: of the whole call.
      built: the module's weights when it was built.
    """

    run: Callable[[Changes, dict[str, np.ndarray]], Run]
    truth: Run
    inputs: Mapping[str, np.ndarray]
    built: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        self.changes = Changes()
        self.run(self.changes, {})
        self.left = BUDGET
        known = {**self.truth.taps, **{f"input {k}": x for k, x in self.inputs.items()}}
        self.values = {k: x for k, x in known.items() if 1 < x.size <= KNOWN}
        self.by_bytes = {x.tobytes(): name for name, x in reversed(self.values.items())}

    @property
    def operations(self) -> list[Operation]:
        return self.changes.noted

    @property
    def count(self) -> int:
        return len(self.operations)

    def end(self, path: str) -> int:
        """Number of the last operation in a submodule; the total if there is none."""
        numbers = [op.number for op in self.operations if inside(op.path, path)]
        return numbers[-1] if numbers else len(self.operations)

    def start(self, path: str) -> int:
        """Number of the first operation in a submodule; the total if there is none."""
        numbers = (op.number for op in self.operations if inside(op.path, path))
        return next(numbers, len(self.operations))

    def among(self, wanted: Callable[[int, str], bool]) -> Iterator[Trial]:
        """Yields every mistake in the wanted operations, the last operation first."""
        sites: dict[tuple[Any, ...], list[Operation]] = {}
        for op in self.operations:
            if wanted(op.number, op.path):
                sites.setdefault(op.site, []).append(op)
        for site in sorted(sites.values(), key=lambda ops: -ops[-1].number):
            for what, ops in self._subsets(site):
                for description, change in self._mistakes(ops[0]):
                    yield self._trial(ops, f"{description}{what}", change)
        yield from self._swapped_slices(wanted)

    def _mistakes(self, op: Operation) -> Iterator[tuple[str, Change]]:
        yield from mistakes(op, self.named)
        if op.name in ("add", "sub", "mul"):
            yield from self._other_tap(op)

    def _other_tap(self, op: Operation) -> Iterator[tuple[str, Change]]:
        """Another tap as an operand, for example in a residual."""
        import torch

        for place in (0, 1):
            x = op.args[place]
            if not torch.is_tensor(x) or not x.is_floating_point():
                continue
            torch_name = self.named(x)
            for name, value in self.values.items():
                if value.shape == tuple(x.shape) and name != torch_name and x.ndim > 1:
                    where = f", where torch takes {torch_name}" if torch_name else ""
                    what = "residual or part" if op.name != "mul" else "factor"
                    yield f"another {what}: {name}{where}", _other_operand(place, to_torch(value))

    def _swapped_slices(self, wanted: Callable[[int, str], bool]) -> Iterator[Trial]:
        """Exchanged slices of one tensor, such as a manually split fused projection."""
        families: dict[tuple[Any, ...], list[Operation]] = {}
        for op in self.operations:
            if wanted(op.number, op.path) and op.name in ("slice", "select") and len(op.args) > 2:
                key = (id(op.args[0]), op.name, op.args[1], tuple(op.out.shape))
                families.setdefault(key, []).append(op)
        for ops in families.values():
            for i, one in enumerate(ops[:SINGLE]):
                for two in ops[i + 1 : SINGLE]:
                    description = (
                        f"two parts of {self.named(one.args[0]) or 'one array'} exchanged: "
                    )
                    description += (
                        f"another order of {list(one.args[1:4])} and {list(two.args[1:4])}"
                    )
                    swap = {one.number: _cut_as(two), two.number: _cut_as(one)}
                    run = partial(self._run, swap)
                    yield Trial(one.path, one.number, two.number, description, run)

    def named(self, x: Any) -> str:
        """Name of a tensor that is a parameter, an input or a submodule's output, or ""."""
        parameter = self.changes.names.get(x.untyped_storage().data_ptr())
        if parameter:
            return parameter
        small = 1 < x.numel() <= KNOWN and x.is_floating_point()
        return self.by_bytes.get(to_numpy(x).tobytes(), "") if small else ""

    def _subsets(self, ops: list[Operation]) -> Iterator[tuple[str, list[Operation]]]:
        """Subsets of the operations on one line: all, by parameter, alternating, one by one."""
        yield "", ops
        by_name: dict[str, list[Operation]] = {}
        for op in ops if len(ops) > 1 else ():
            names = [self.named(x) for x in op.args if hasattr(x, "untyped_storage")]
            by_name.setdefault(re.sub(r"\d+|_reverse", "", " ".join(names)), []).append(op)
        if 1 < len(by_name) <= SINGLE:
            yield from (("", few) for few in by_name.values())
        for strides in STRIDES:
            if len(ops) % strides == 0 and len(ops) > strides:
                yield from (
                    (f", of {strides} in turn the {nth(i)}", ops[i::strides])
                    for i in range(strides)
                )
        if 1 < len(ops) <= SINGLE:
            yield from ((f", the {nth(i)} of {len(ops)}", [op]) for i, op in enumerate(ops))

    def _trial(self, ops: Sequence[Operation], description: str, change: Change) -> Trial:
        run = partial(self._run, {op.number: change for op in ops})
        return Trial(ops[0].path, ops[0].number, ops[-1].number, description, run)

    def without(self, names: Sequence[str]) -> Iterator[Trial]:
        """Parameters that a rule skips, as if Flax lacked them: zeros, or ones."""
        groups = [[*names], *([name] for name in names if len(names) > 1)]
        for group in groups if names else ():
            listed, last = ", ".join(group), len(self.operations)
            which = "a rule skips" if len(group) == 1 else "rules skip"
            for number, what in ((0.0, "added"), (1.0, "multiplied, a scale or factor")):
                description = f"{listed}, which {which}, missing: it is {what} in torch"
                others = {name: np.full_like(self.built[name], number) for name in group}
                yield Trial("", 0, last, description, partial(self._run, {}, others))

    def other_gradients(self) -> Iterator[Trial]:
        """Gradients that continue where torch stops them, or stop where torch's continue."""
        calls = self.changes.calls
        detached = [i for i, (name, _) in enumerate(calls) if name in ("detach", "detach_")]
        for i in [detached] if len(detached) < 2 else [detached, *([i] for i in detached)]:
            if i:
                description = (
                    "a gradient that goes on where torch stops it: a detach left out, as of a "
                )
                description += "straight-through estimator"
                which = f", the {nth(detached.index(i[0]))} of {len(detached)}"
                description += which if len(i) < len(detached) else ""
                changes = Changes({-1: _no_operation}, through=frozenset(i))
                yield Trial("", 0, self.count, description, partial(self._run_with, changes))
        for i, (name, path) in enumerate(calls):
            description = (
                f"a gradient that is stopped behind {name}{f' in {path}' if path else ''}, as by "
            )
            changes = Changes({-1: _no_operation}, stops=frozenset([i]))
            description += "a stop_gradient that torch does not have"
            yield Trial(path, 0, self.count, description, partial(self._run_with, changes))

    def _run(
        self, by_number: Mapping[int, Change], others: dict[str, np.ndarray] | None = None
    ) -> Run | None:
        """Runs with changed operations, or with other weights."""
        return self._run_with(Changes(by_number), others)

    def _run_with(
        self, changes: Changes, others: dict[str, np.ndarray] | None = None
    ) -> Run | None:
        """Runs once; None if torch fails with the mistake, or the budget is used up."""
        if self.left <= 0:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self.run(changes, others or {})
        except Exception:  # a mistake may produce incompatible shapes
            return None
        finally:
            self.left -= changes.count


def _no_operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Placeholder change of a nonexistent operation, which disables recording."""
    raise AssertionError("no operation has this number")


def _other_operand(place: int, value: Any) -> Change:
    return lambda func, args, kwargs: func(
        *args[:place], value.to(args[place].dtype), *args[place + 1 :], **kwargs
    )


def _cut_as(op: Operation) -> Change:
    """Calls an operation with the other arguments of another one on the same tensor."""
    return lambda func, args, kwargs: func(args[0], *op.args[1:], **kwargs)


def nth(i: int) -> str:
    """Formats an index as an ordinal.

    >>> nth(0), nth(1), nth(3)
    ('first', 'second', '4th')
    """
    return ("first", "second", "third")[i] if i < 3 else f"{i + 1}th"
