"""The request and the recorded results of one run of either side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import numpy as np

from ...errors import ParityError
from ...taps import POINTS
from .. import draw
from .leaves import leaves, rebuilt

# Name of a module's output; the second if the module has a submodule called `output`.
OUTPUT, MODEL_OUTPUT = "output", "model output"


@dataclass
class Run:
    """Results of one forward and backward pass, as numpy arrays.

    Attributes:
      outputs: numeric leaves of the output by name: "output", or "output[0]", "output.key" if
        there are several; includes Python numbers and numpy arrays. "model output" instead of
        "output" if a submodule is called so.
      others: `repr` of the other leaves: None and strings.
      taps: outputs of submodules and named points by path, in call order.
      gradients: gradients of inputs ("input x") and parameters (the module's own names).
      keeps: dropout keep-masks in the order drawn; for Flax those it drew, even if it then used
        torch's.
      rates: requested keep rate of each mask, NaN if unknown.
      places: the submodule that drew each mask.
      redrawn: masks of further Flax calls with other random keys.
      tap_gradients: gradients of taps, where known.
      state: running statistics and other variables or buffers after the call, by path.
      changed: paths of the module state that the call changed.
      bessel: how much larger torch's running variances are for averaging unbiased variances.
      order: torch's submodules in the order in which their calls began.
      calls: what each tap of torch was computed from.
      inputs: array arguments of Flax's submodules, by the names of their outputs' taps.
      notes: sentences about the run.
      findings: hidden casts, and products below the requested precision, of the program.
    """

    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    taps: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    keeps: list[np.ndarray] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    redrawn: list[list[np.ndarray]] = field(default_factory=list)
    tap_gradients: dict[str, np.ndarray] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    bessel: dict[str, np.ndarray] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    calls: dict[str, "Call"] = field(default_factory=dict)
    inputs: dict[str, tuple[np.ndarray, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    findings: dict[str, list[str]] = field(default_factory=dict)

    def point(self, tap: str) -> str:
        """Returns the point inside attention, such as `"scores"`; "" for a submodule's output.

        The name alone is ambiguous: a submodule may be called `query` too.
        """
        name = tap.rpartition(".")[2].partition("#")[0]
        call = self.calls.get(tap)
        is_output = tap in self.inputs if call is None else call.kind != name
        return "" if is_output or name not in POINTS else name

    def forget_masks(self) -> None:
        """Drops the masks drawn, where each side draws by itself."""
        self.keeps, self.rates, self.places = [], [], []


@dataclass(frozen=True)
class Step:
    """One elementwise operation between the query-key product and the softmax.

    Attributes:
      name: torch's name, without trailing underscores.
      place: index of the operand that is the value itself.
      others: the operands, None at index `place`.
      shape: shape of the result.
    """

    name: str
    place: int
    others: tuple[Any, ...]
    shape: tuple[int, ...]


@dataclass
class Call:
    """What one tap was computed from, in torch.

    Attributes:
      kind: type name of a submodule, or name of a point inside attention.
      inputs: its array arguments; for a point, the points it is computed from.
      params: the submodule's own parameters and buffers, by role.
      facts: the submodule's numeric attributes, such as eps.
      steps: for scores, the operations applied to the query-key product.
    """

    kind: str
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    params: dict[str, np.ndarray] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class RunRequest:
    """What both sides run.

    Attributes:
      args, kwargs: the call's arguments; numpy arrays, also inside containers, are inputs,
        everything else is passed unchanged.
      seed: seed of the cotangents.
      train: whether both modules are in train mode.
      grads, taps: whether to compute gradients, and to record taps.
      constants: names of inputs, or of containers of inputs, that are not differentiated.
      output: name of the output.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seed: int
    train: bool
    grads: bool
    taps: bool
    constants: frozenset[str] = frozenset()
    output: str = OUTPUT

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the input arrays by name: keyword or position, then the path below it."""
        named = {**{str(i): arg for i, arg in enumerate(self.args)}, **self.kwargs}
        pairs = (leaf for name, value in named.items() for leaf in leaves(value, name))
        return {name: value for name, value in pairs if is_input(value)}

    def fill(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with their arrays replaced by `values`."""

        def filled(name: str, value: Any) -> Any:
            return rebuilt(value, lambda at, leaf: values.get(at, leaf), name)

        args = tuple(filled(str(i), arg) for i, arg in enumerate(self.args))
        return args, {name: filled(name, value) for name, value in self.kwargs.items()}

    def in_dtype(self, dtype: str) -> "RunRequest":
        """Returns the request with its inputs rounded to `dtype`."""
        args, kwargs = self.fill(narrowed(self.arrays(), dtype))
        return replace(self, args=args, kwargs=kwargs)

    def is_constant(self, name: str) -> bool:
        """Whether an input array is one of `constants`, or inside one."""
        return any(name == c or name.startswith((f"{c}.", f"{c}[")) for c in self.constants)

    def cotangent(self, name: str, like: Any) -> np.ndarray:
        """Draws the random cotangent of an output, the same under both names."""
        name = OUTPUT + name.removeprefix(self.output)
        return draw.like(self.seed, f"cotangent/{name}", like.shape, "complex" in str(like.dtype))


def checked_constants(names: Iterable[str], request: RunRequest) -> RunRequest:
    """Returns the request with `names` as its constants.

    Raises:
      TypeError: if `names` is a string.
      ValueError: for a name that matches no input.
    """
    if isinstance(names, str):
        raise TypeError(f"constants are names in a tuple, ({names!r},); got {names!r}.")
    with_names = replace(request, constants=frozenset(map(str, names)))
    arrays = list(request.arrays())
    for name in with_names.constants:
        one = replace(request, constants=frozenset([name]))
        if not any(map(one.is_constant, arrays)):
            raise ValueError(
                f"constants names the input {name!r}, but the inputs that hold arrays are "
                f"{', '.join(arrays) or 'none'}."
            )
    return with_names


def is_input(value: Any) -> bool:
    """Whether a leaf of the arguments is an array, which each side receives as its own type."""
    return isinstance(value, np.ndarray) and value.dtype.kind not in "OUSMm"


def is_floating(array: Any) -> bool:
    """Whether an array holds floating or complex numbers, bfloat16 included."""
    return array.dtype.kind in "fc" or array.dtype.name in ("bfloat16", "float16")


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """Casts a floating array to `dtype`; other arrays are returned unchanged.

    Complex arrays get the precision of `dtype`, but at least that of float32. Nothing is copied if
    the dtype is already right.
    """
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    if array.dtype.kind == "c":
        kind = np.dtype(complex_dtype(dtype))
    return array.astype(kind, copy=False) if is_floating(array) else array


def narrowed(arrays: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Applies `rounded` to each array."""
    return {name: rounded(x, dtype) for name, x in arrays.items()}


class MaskMismatch(ParityError):
    """Raised if a dropout mask of Flax does not fit torch's dropout.

    Args:
      number: number of the mask, counted from 1.
      shape, want: shape of Flax's mask, and of torch's.
      place: torch's dropout submodule.
      drawn: the Flax submodule that drew it, if known.
    """

    def __init__(
        self, number: int, shape: Sequence[int], want: Sequence[int], place: str, drawn: str = ""
    ):
        self.facts = number, shape, want, place
        where = f", drawn in {drawn}," if drawn else ""
        super().__init__(
            f"Dropout mask {number} has shape {list(shape)} in Flax{where} and {list(want)} in "
            f"{place or 'the module'} of torch: this dropout stands in another place."
        )


def fit_mask(keep: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Gives a dropout mask the other side's shape: reshaped, or its axes in another order.

    None unless only leading axes are merged, or the axes of three and more are permuted.

    >>> fit_mask(np.ones((6, 5, 4)), (2, 3, 5, 4)).shape, fit_mask(np.ones((5, 4)), (4, 5))
    ((2, 3, 5, 4), None)
    >>> fit_mask(np.ones((2, 5, 4)), (2, 4, 5)).shape  # channels last, and first
    (2, 4, 5)
    """
    # A merged `(B N)` axis keeps the order of elements; any other reshape would permute the mask.
    same_matrix = keep.shape[-2:] == shape[-2:] and min(keep.ndim, len(shape)) >= 2
    if keep.shape == shape or (same_matrix and keep.size == int(np.prod(shape))):
        return keep.reshape(shape)
    order = next(iter(axis_orders(keep.shape, shape)), None)
    return None if order is None else keep.transpose(order)


def axis_orders(shape: tuple[int, ...], want: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The orders of three and more axes that turn `shape` into `want`, the fewest moves first.

    Orders that differ only in axes of size 1 count once.

    >>> axis_orders((2, 4, 4), (2, 4, 4)), axis_orders((2, 1, 4), (2, 4, 1))
    ([(0, 1, 2), (0, 2, 1)], [(0, 2, 1)])
    """
    if len(shape) < 3 or sorted(shape) != sorted(want):
        return []
    orders: dict[tuple[int, ...], tuple[int, ...]] = {}
    for order in permutations(range(len(shape))):
        if tuple(shape[i] for i in order) == want:
            orders.setdefault(tuple(i for i in order if shape[i] != 1), order)
    moves = {
        order: sum(a > b for i, a in enumerate(wide) for b in wide[i + 1 :])
        for wide, order in orders.items()
    }
    return sorted(moves, key=lambda order: moves[order])


def bessel_excess(x: np.ndarray, momentum: float, before: np.ndarray | float) -> np.ndarray:
    """How much larger a running variance of B C ... is after a call than with biased variances.

    A call averages in its own unbiased variance, and scales what earlier calls averaged in.

    >>> bessel_excess(np.array([[1.0], [3.0]]), 0.5, 0.0)  # variances 2 and 1
    array([0.5])
    """
    axes = (0, *range(2, x.ndim))
    gap = np.var(x, axis=axes, ddof=1) - np.var(x, axis=axes)
    return (1 - momentum) * before + momentum * gap


def complex_dtype(dtype: str) -> str:
    """Complex dtype of a run: complex64 unless `dtype` is float64."""
    return "complex128" if dtype == "float64" else "complex64"
