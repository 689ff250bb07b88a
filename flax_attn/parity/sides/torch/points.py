"""Finds the named points inside attention in torch's operations, without changing the module.

They surround every softmax, and any other normaliser between a product of two activations and the
product of its result with a third: a sigmoid, an entmax, a softmax written out.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

# Elementwise operations, whose result is treated as the same array as their operand.
ELEMENTWISE = {
    *("mul", "div", "add", "sub", "rsub", "neg", "masked_fill", "where", "tanh", "clone"),
    *("_to_copy", "copy_", "mul_", "div_", "add_", "sub_", "masked_fill_", "tanh_", "neg_"),
}
PRODUCTS = {"mm", "bmm", "baddbmm", "addmm"}
SOFTMAX = ("_softmax", "_safe_softmax")


class Product(NamedTuple):
    """A matrix product: its operands, and the elementwise steps applied to it since.

    `free` is whether both operands are activations; `value` is the current value, and `before` the
    value before the last step.
    """

    left: Any
    right: Any
    steps: tuple[tuple[Any, ...], ...] = ()
    free: bool = False
    value: Any = None
    before: Any = None


class Normalised(NamedTuple):
    """Result of non-elementwise operations on a product; `scores` is the value before them.

    `weights` is the value before dropout, if any.
    """

    product: Product
    scores: Any
    weights: Any = None


class Weights(NamedTuple):
    """Result of a softmax: names of its scores and weights, shape, and fully masked rows."""

    scores: str
    weights: str
    shape: tuple[int, ...]
    nothing: Any


class Operand(NamedTuple):
    """An operand of one of attention's two products, used to recognise gradients.

    For `left @ right` with gradient `g`, autograd computes `g @ right.mT`, the gradient of `left`,
    and `left.mT @ g`, the gradient of `right`.
    """

    left: bool
    other: str
    result: str | None
    shape: tuple[int, ...]


class Points:
    """Tracks products to the softmax, and weights to their product, by storage address.

    Args:
      note: called with a point's name, its value, the points it is computed from, and the steps;
        returns the name under which it was recorded.
      note_gradient: called with that name and a gradient.
      fixed: parameters and buffers; these, and values computed only from them, are not activations.
    """

    def __init__(
        self,
        note: Callable[..., str],
        note_gradient: Callable[[str, Any], None],
        fixed: Iterable[Any] = (),
    ):
        self.note, self.note_gradient = note, note_gradient
        # Keyed by address: torch passes a new Python tensor for each view of the same storage.
        self.known: dict[int, Any] = {}
        self.fixed = {_address(x) for x in fixed}
        self.noise: set[int] = set()
        self.drawn: Any = None
        self.references: list[Any] = []  # keeps tensors alive, so that no address is reused
        self.operands: dict[int, Operand] = {}
        self.backward = False
        self.muted = False

    def clear(self) -> None:
        """Releases every tensor: autograd's hooks reference this object in an unfreed cycle."""
        for references in (self.known, self.operands, self.references):
            references.clear()
        self.drawn = None

    def before_op(self, name: str, args: tuple[Any, ...]) -> None:
        """Handles an operation before it runs: a value it overwrites is cloned."""
        inside = name.endswith("_") and name not in ELEMENTWISE and not self.muted
        made = self._of(args[0]) if inside and args and hasattr(args[0], "numel") else None
        if isinstance(made, Product):
            self._remember(args[0], made._replace(value=made.value.clone()))

    def after_dropout(self, keep: Any) -> None:
        """Records a dropout mask, while it is still zeros and ones."""
        # Cloned, since `F.dropout` then scales the mask in place.
        self.noise.add(_address(keep))
        self.references.append(keep)
        self.drawn = keep.clone()

    def after_op(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        """Handles an operation below autograd after it ran."""
        if self.muted:
            return
        if name in SOFTMAX:
            self._softmax(args[0], out, args[1])
        elif name == "_softmax_backward_data":
            self._backward(args[0], args[1], out)
        elif name in PRODUCTS and self.backward:
            self._backward_product(args[-2], args[-1], out)
        elif name in PRODUCTS:
            first = 0 if name in ("mm", "bmm") else 1
            self._product(args[first], args[first + 1], out)
        elif name.startswith("_scaled_dot_product") and "backward" not in name:
            self._fused(args, out)
        elif not self.backward:
            self._other(name, args, out)

    def _other(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        """Handles any other operation: an elementwise step, or part of a normaliser."""
        inputs, made = list(_tensors(args)), list(_tensors((out,)))
        if inputs and all(_address(x) in self.fixed for x in inputs):
            self.fixed.update(map(_address, made))
            self.references += made
            return
        known = [(x, record) for x in inputs if (record := self._of(x)) is not None]
        if not known:
            return
        if name in ELEMENTWISE and len(made) == 1 and self._step(name, args, made[0], known):
            return
        _, record = next((k for k in known if not isinstance(k[1], Weights)), (None, None))
        # A result in its input's memory is a view, unless the operation works in place.
        views = {_address(x) for x in inputs} if not name.endswith("_") else set()
        if isinstance(record, Product):
            record = Normalised(record, record.value)
        for x in made if isinstance(record, Normalised) else ():
            if _address(x) not in views:
                self._remember(x, record)

    def _step(self, name: str, args: tuple[Any, ...], out: Any, known: list[Any]) -> bool:
        """Whether an operation is an elementwise step on a tracked value; records its result."""
        import torch

        for place, x in enumerate(args):
            record = self._of(x) if torch.is_tensor(x) and x.numel() == out.numel() else None
            if record is None:
                continue
            # A value combined with another that stems from the same product is a normaliser.
            others = [y for y in known if y[0] is not x and _origin(y[1]) is _origin(record)]
            if isinstance(record, Product):
                if others:
                    return False
                operands = tuple(None if i == place else y for i, y in enumerate(args))
                step = (name, place, operands, tuple(out.shape))
                steps = (*record.steps, step)
                record = record._replace(steps=steps, before=record.value, value=out)
            elif isinstance(record, Normalised) and record.weights is None:
                dropped = any(_address(y) in self.noise for y in _tensors(args) if y is not x)
                record = record._replace(weights=x) if dropped else record
            self._remember(out, record)
            return True
        return False

    def _of(self, tensor: Any) -> Any:
        return self.known.get(_address(tensor)) if tensor.numel() else None

    def _remember(self, tensor: Any, what: Any) -> None:
        if tensor.numel():
            self.known[_address(tensor)] = what
            self.references.append(tensor)

    def _softmax(self, scores: Any, weights: Any, axis: int) -> None:
        """Records scores and weights; weights of rows that are all -inf are recorded as zeros."""
        # Torch's softmax of such a row is NaN by definition; how the module handles it shows in its
        # output.
        made = self._of(scores)
        follows, steps = self._operands(made, scores) if isinstance(made, Product) else ({}, ())
        if isinstance(made, Normalised) and _with_sink(made, scores):
            self._operands(made.product, made.scores)
        nothing = (scores == float("-inf")).all(dim=axis, keepdim=True)
        before = self.note("scores", scores, follows, steps)
        weighed = without_empty_rows(weights, nothing) if nothing.any() else weights
        after = self.note("weights", weighed, {**follows, "scores": scores})
        self._remember(weights, Weights(before, after, tuple(weights.shape), nothing))

    def _backward(self, gradient: Any, weights: Any, out: Any) -> None:
        made = self._of(weights)
        if isinstance(made, Weights):
            self.note_gradient(made.weights, gradient.masked_fill(made.nothing, 0.0))
            self.note_gradient(made.scores, out.masked_fill(made.nothing, 0.0))

    def _operands(self, made: Product, scores: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Records query and key of scores; returns them and the steps applied to their product."""
        if not _fits(made, scores):
            return {}, ()
        follows = {"query": made.left, "key": made.right.mT}
        one, two = [self.note(point, value, {}) for point, value in follows.items()]
        self._watch_operands(made.left, made.right, one, two, None)
        return follows, made.steps

    def _product(self, left: Any, right: Any, out: Any) -> None:
        made = self._of(left)
        # A tanh just before the second product is the normaliser, not a soft cap of the scores.
        if isinstance(made, Product) and made.steps and made.steps[-1][0].startswith("tanh"):
            made = Normalised(made._replace(steps=made.steps[:-1]), made.before)
        if isinstance(made, Weights) and left.shape[-2:] == made.shape[-2:]:
            before = self.note("value", right, {})
            after = self.note("context", out, {"weights": left, "value": right})
            self._watch_operands(left, right, "", before, after)
        elif isinstance(made, Normalised) and self._is_weighted_sum(made, left, right):
            self._custom_normaliser_points(made, left, right, out)
        else:
            free = not {_address(left), _address(right)} & self.fixed
            self._remember(out, Product(left, right, free=free, value=out))

    def _is_weighted_sum(self, made: Normalised, left: Any, right: Any) -> bool:
        """Whether this is the second product of an attention with a custom normaliser."""
        same_size = (
            left.shape[-2:] == made.scores.shape[-2:] and left.numel() == made.scores.numel()
        )
        return made.product.free and same_size and _address(right) not in self.fixed

    def _custom_normaliser_points(self, made: Normalised, left: Any, right: Any, out: Any) -> None:
        """Records the points of an attention whose normaliser is not torch's softmax."""
        follows, steps = self._operands(made.product, made.scores)
        self.note("scores", made.scores, follows, steps)
        weights = left if made.weights is None else made.weights
        named = self.note("weights", weights, {**follows, "scores": made.scores})
        before = self.note("value", right, {})
        after = self.note("context", out, {"weights": left, "value": right})
        self._watch_operands(left, right, named if made.weights is None else "", before, after)

    def _watch_operands(
        self, left: Any, right: Any, one: str, two: str, result: str | None
    ) -> None:
        """Remembers both operands of a product to recognise their gradients later."""
        keys = _address(left), _address(right)
        # Operands in one storage, as of `x @ x.mT`, could not be told apart.
        if keys[0] != keys[1] and left.numel() and right.numel():
            self.operands[keys[0]] = Operand(True, two, result, tuple(left.shape))
            self.operands[keys[1]] = Operand(False, one, result, tuple(right.shape))
            self.references += [left, right]

    def _backward_product(self, one: Any, two: Any, out: Any) -> None:
        """Records gradients from a backward product with an operand of attention."""
        first, second = self.operands.get(_address(one)), self.operands.get(_address(two))
        if first and first.left and tuple(one.shape) == _transpose(first.shape):
            # The key was recorded as `right.mT`; only the product of scores has no result here.
            key = first.result is None
            self.note_gradient(first.other, out.mT if key else out)
        if second and not second.left and tuple(two.shape) == _transpose(second.shape):
            if second.other:
                self.note_gradient(second.other, out)
            if second.result:
                self.note_gradient(second.result, one)

    def _fused(self, args: tuple[Any, ...], out: Any) -> None:
        """Records arguments and output of torch's fused attention, which runs no softmax."""
        flat = [x.reshape(-1, *x.shape[-2:]) for x in (*args[:3], out[0])]
        follows = dict(zip(("query", "key", "value"), flat, strict=False))
        for point, value in follows.items():
            self.note(point, value, {})
        self.note("context", flat[3], follows)


def without_empty_rows(weights: Any, nothing: Any) -> Any:
    """Weights of which fully masked rows are zeros; a step of the recorded program."""
    return weights.masked_fill(nothing, 0.0)


def _fits(made: Product, scores: Any) -> bool:
    tail = (made.left.shape[-2], made.right.shape[-1])
    return tail == tuple(scores.shape[-2:]) and made.left.shape[-1] == made.right.shape[-2]


def _with_sink(made: Normalised, scores: Any) -> bool:
    """Whether a column was appended to the scores of a product."""
    before, after = tuple(made.scores.shape), tuple(scores.shape)
    return after == (*before[:-1], before[-1] + 1)


def _origin(record: Any) -> Any:
    """Returns the left operand of the product that a record stems from."""
    product = record.product if isinstance(record, Normalised) else record
    return product.left if isinstance(product, Product) else product


def _address(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    """Yields the tensors in an operation's arguments or results, also inside sequences."""
    import torch

    for value in values:
        if torch.is_tensor(value):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _transpose(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])
