"""The named points inside attention, seen from below torch: around every softmax, without edits."""

from collections.abc import Callable
from typing import Any, NamedTuple

# Operations that keep a value's place: what goes in and what comes out are one array to us.
ELEMENTWISE = {
    *("mul", "div", "add", "sub", "rsub", "neg", "masked_fill", "where", "tanh", "clone"),
    *("_to_copy", "copy_", "mul_", "div_", "add_", "sub_", "masked_fill_", "tanh_", "neg_"),
}
PRODUCTS = {"mm", "bmm", "baddbmm", "addmm"}


class Product(NamedTuple):
    """A matrix product: its two operands, and what was done to its elements since."""

    left: Any
    right: Any
    steps: tuple[tuple[Any, ...], ...] = ()


class Weights(NamedTuple):
    """What a softmax gave: the paths of its scores and weights."""

    scores: str
    weights: str
    shape: tuple[int, ...]
    nothing: Any


class Operand(NamedTuple):
    """An operand of one of attention's two products, by which its gradients are recognised.

    Behind a product `left @ right` autograd multiplies what arrives with `right`, transposed, which
    is the gradient of `left`, and `left`, transposed, with what arrives, the gradient of `right`.
    """

    left: bool
    other: str
    result: str | None
    shape: tuple[int, ...]


class Points:
    """Follows products to the softmax and weights to their product, by the memory they live in.

    Args:
      note: called with a point's name, its value, what it follows from and by which steps; returns
        the name under which it was noted.
      note_gradient: called with that name and a gradient.
    """

    def __init__(self, note: Callable[..., str], note_gradient: Callable[[str, Any], None]):
        self.note, self.note_gradient = note, note_gradient
        self.known: dict[int, Any] = {}
        self.held: list[Any] = []  # so that no memory is given out a second time
        self.operands: dict[int, Operand] = {}
        self.backward = False

    def saw(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        """One operation below autograd."""
        import torch

        if name == "_softmax":
            self._softmax(args[0], out, args[1])
        elif name == "_softmax_backward_data":
            self._backward(args[0], args[1], out)
        elif name in PRODUCTS and self.backward:
            self._product_behind(args[-2], args[-1], out)
        elif name in PRODUCTS:
            first = 0 if name in ("mm", "bmm") else 1
            self._product(args[first], args[first + 1], out)
        elif name.startswith("_scaled_dot_product") and "backward" not in name:
            self._fused(args, out)
        elif name in ELEMENTWISE and torch.is_tensor(out):
            for place, x in enumerate(args):
                found = self._of(x) if torch.is_tensor(x) and x.numel() == out.numel() else None
                if found is not None:
                    if isinstance(found, Product):
                        others = tuple(None if i == place else y for i, y in enumerate(args))
                        found = found._replace(
                            steps=(*found.steps, (name, place, others, tuple(out.shape)))
                        )
                    self._remember(out, found)
                    break

    def _of(self, tensor: Any) -> Any:
        return self.known.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None

    def _remember(self, tensor: Any, what: Any) -> None:
        if tensor.numel():
            self.known[tensor.untyped_storage().data_ptr()] = what
            self.held.append(tensor)

    def _softmax(self, scores: Any, weights: Any, axis: int) -> None:
        """Torch's softmax of a row that is all -inf is NaN by definition, not by the module: noted
        as zeros; what the module makes of that row shows in its output."""
        made, follows, steps = self._of(scores), {}, ()
        if isinstance(made, Product) and _fits(made, scores):
            steps = made.steps
            follows = {"query": made.left, "key": made.right.mT}
            one, two = [self.note(point, value, {}) for point, value in follows.items()]
            self._expect(made.left, made.right, one, two, None)
        nothing = (scores == float("-inf")).all(dim=axis, keepdim=True)
        before = self.note("scores", scores, follows, steps)
        weighed = weights.masked_fill(nothing, 0.0)
        after = self.note("weights", weighed, {**follows, "scores": scores})
        self._remember(weights, Weights(before, after, tuple(weights.shape), nothing))

    def _backward(self, gradient: Any, weights: Any, out: Any) -> None:
        made = self._of(weights)
        if isinstance(made, Weights):
            self.note_gradient(made.weights, gradient.masked_fill(made.nothing, 0.0))
            self.note_gradient(made.scores, out.masked_fill(made.nothing, 0.0))

    def _product(self, left: Any, right: Any, out: Any) -> None:
        made = self._of(left)
        if isinstance(made, Weights) and left.shape[-2:] == made.shape[-2:]:
            before = self.note("value", right, {})
            after = self.note("context", out, {"weights": left, "value": right})
            self._expect(left, right, "", before, after)
        else:
            self._remember(out, Product(left, right))

    def _expect(self, left: Any, right: Any, one: str, two: str, result: str | None) -> None:
        """Both operands of a product, so that backward products tell their gradients."""
        keys = left.untyped_storage().data_ptr(), right.untyped_storage().data_ptr()
        if keys[0] != keys[1] and left.numel() and right.numel():
            self.operands[keys[0]] = Operand(True, two, result, tuple(left.shape))
            self.operands[keys[1]] = Operand(False, one, result, tuple(right.shape))
            self.held += [left, right]

    def _product_behind(self, one: Any, two: Any, out: Any) -> None:
        """A product of the backward pass: with an operand of attention it is a gradient."""
        first = self.operands.get(one.untyped_storage().data_ptr())
        second = self.operands.get(two.untyped_storage().data_ptr())
        if first and first.left and tuple(one.shape) == _turned(first.shape):
            key = first.result is None
            self.note_gradient(first.other, out.mT if key else out)
        if second and not second.left and tuple(two.shape) == _turned(second.shape):
            if second.other:
                self.note_gradient(second.other, out)
            if second.result:
                self.note_gradient(second.result, one)

    def _fused(self, args: tuple[Any, ...], out: Any) -> None:
        """Torch's fused attention, which shows no softmax: what goes in and what comes out."""
        flat = [x.reshape(-1, *x.shape[-2:]) for x in (*args[:3], out[0])]
        follows = dict(zip(("query", "key", "value"), flat, strict=False))
        for point, value in follows.items():
            self.note(point, value, {})
        self.note("context", flat[3], follows)


def _fits(made: Product, scores: Any) -> bool:
    left, right, _ = made
    tail = (left.shape[-2], right.shape[-1])
    return tail == tuple(scores.shape[-2:]) and left.shape[-1] == right.shape[-2]


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])
