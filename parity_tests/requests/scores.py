"""Random scores, each with its meaning and its gradients written out in numpy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import flax_attn as fa

from . import masks
from .masks import Indices, Random, Sizes, offset

Rounding = Callable[..., np.ndarray]  # of an operation's result, and its error in units
Back = Callable[[np.ndarray], tuple[np.ndarray, list[np.ndarray]]]

TANH = 3  # units of eps: XLA's tanh errs by 2.4 in float32, 2.9 in float64; its exp by 0.7


class Step(NamedTuple):
    """One score of a chain.

    Attributes:
      words: the score in words.
      draw: floating arrays and integer arrays of one request.
      build: flax_attn's score, from such arrays.
      apply: the logits changed, and what leads their gradient back to the logits and to the
        floating arrays: `apply(x, floats, ints, at, rnd)`, in the dtype of `x`; `rnd` sees the
        result of every operation.
      last: whether nothing but sums may follow.
    """

    words: str
    draw: Callable[[Random], tuple[list[np.ndarray], list[np.ndarray]]]
    build: Callable[[list, list], Any]
    apply: Callable[[np.ndarray, list, list, Indices, Rounding], tuple[np.ndarray, Back]]
    last: bool = False


class Chain(NamedTuple):
    """Scores one after the other; `nested` says whether they are chained from the right."""

    steps: list[Step]
    nested: bool

    @property
    def words(self) -> str:
        return " >> ".join(step.words for step in self.steps) or "none"

    def draw(self, drawn: Random) -> tuple[list, list]:
        """Floating and integer arrays of one request, a list for each step."""
        pairs = [step.draw(drawn) for step in self.steps]
        return [floats for floats, _ in pairs], [ints for _, ints in pairs]

    def build(self, floats: list, ints: list) -> Any:
        """flax_attn's score."""
        scores = [s.build(*xs) for s, *xs in zip(self.steps, floats, ints, strict=True)]
        if not scores:
            return fa.IDENTITY
        if self.nested:
            whole = scores[-1]
            for score in scores[-2::-1]:
                whole = score >> whole
            return whole
        whole = scores[0]
        for score in scores[1:]:
            whole = whole >> score
        return whole


def score_chain(drawn: Random, sizes: Sizes, dtype: str) -> Chain:
    """A random chain of at most three scores, arrays in `dtype`."""
    steps: list[Step] = []
    for _ in range(drawn.choice(4, p=[0.4, 0.3, 0.2, 0.1])):
        huge = any(step.last for step in steps)
        kinds = SUMS if huge else KINDS
        step = kinds[drawn.randint(len(kinds))](drawn, sizes, dtype)
        if not (huge and step.last):  # two of them are beyond what a float can hold
            steps.append(step)
    return Chain(steps, bool(drawn.rand() < 0.5))


def softcap(drawn: Random, sizes: Sizes, dtype: str) -> Step:
    """`cap * tanh(x / cap)`, the cap a number or a traced array."""
    number = float(drawn.choice([0.5, 2.0, 30.0]))
    traced = drawn.rand() < 0.5

    def draw(drawn):
        return ([np.asarray(number * (0.5 + drawn.rand()))] if traced else []), []

    def apply(x, floats, ints, at, rnd):
        cap = floats[0] if traced else x.dtype.type(number)
        part = rnd(x / cap)
        tanh = rnd(np.tanh(part), TANH)
        slope = rnd(1 - rnd(tanh * tanh))

        def back(dy):
            if not traced:
                return rnd(dy * slope), []
            return rnd(dy * slope), [summed(rnd(dy * rnd(tanh - rnd(part * slope))), (), rnd)]

        return rnd(cap * tanh), back

    words = f"Softcap({'traced' if traced else number})"
    return Step(words, draw, lambda fs, xs: fa.Softcap(fs[0] if traced else number), apply)


def alibi(drawn: Random, sizes: Sizes, dtype: str) -> Step:
    """`x - slope * |q + offset - k|`."""
    by = offset(drawn, sizes, static_only=False, entries=False)
    entries = drawn.rand() < 0.3
    shape = (*sizes.batch, sizes.N) if entries else (sizes.N,)

    def draw(drawn):
        return [drawn.rand(*shape) * 0.3 - 0.05], by.draw(drawn)

    def apply(x, floats, ints, at, rnd):
        distance = np.abs(at[3] - at[2] - by.value(ints, at[0])).astype(x.dtype)
        slopes = floats[0].reshape(-1, sizes.N, 1, 1)

        def back(dy):
            slope = -summed(rnd(dy * distance), slopes.shape, rnd)
            return dy, [slope.reshape(shape)]

        return rnd(x - rnd(slopes * distance)), back

    words = f"Alibi({list(shape)}, {by.words})"
    return Step(words, draw, lambda fs, xs: fa.Alibi(fs[0], by.build(xs)), apply)


def additive(drawn: Random, sizes: Sizes, dtype: str) -> Step:
    """`x + array`, at times with -inf or huge negative numbers as the additive masks of others."""
    whole = (*sizes.batch, sizes.N, sizes.T, sizes.S)
    shape = masks._shape_within(drawn, whole)
    least = float(ml_dtypes.finfo(dtype).min)
    fills = {"-inf": -np.inf, "finfo.min": least, "-1e9": max(-1e9, least)}
    fill = drawn.choice(["", "-inf", "finfo.min", "-1e9"], p=[0.55, 0.15, 0.15, 0.15])
    layout = drawn.choice(["padding", "rows", "anywhere"])
    if fill and layout == "padding":  # as Hugging Face makes it
        shape = (*sizes.batch, 1, sizes.T, sizes.S)

    def draw(drawn):
        array = drawn.standard_normal(shape)
        if fill:
            hidden = _hidden(drawn, shape, layout)
            array = np.where(hidden, fills[fill], 0 * array if layout == "padding" else array)
        return [np.asarray(array)], []

    def apply(x, floats, ints, at, rnd):
        array = np.broadcast_to(floats[0], _padded(floats[0], len(whole)))
        array = np.broadcast_to(array, (*sizes.batch, *array.shape[-3:]))
        array = array.reshape(-1, *array.shape[-3:])

        def back(dy):
            grad = dy.reshape(whole)
            return dy, [summed(grad, _padded(floats[0], len(whole)), rnd).reshape(shape)]

        return rnd(x + array), back

    words = f"Additive({list(shape)}{f', {fill} in {layout}' if fill else ''})"
    return Step(words, draw, lambda fs, xs: fa.Additive(fs[0]), apply, last=bool(fill))


def _hidden(drawn: Random, shape: tuple[int, ...], layout: str) -> np.ndarray:
    """Where the fill stands: left padding under a causal mask, whole rows, or anywhere."""
    if layout == "padding":
        T, S = shape[-2:]
        padding = drawn.randint(0, S + 1, (*shape[:-2], 1, 1))
        keys = np.arange(S)
        return (keys < padding) | (keys > np.arange(T).reshape(-1, 1) + S - T)
    if layout == "rows" and len(shape) > 1:
        return np.broadcast_to(drawn.rand(*shape[:-1], 1) < 0.4, shape)
    return drawn.rand(*shape) < 0.3


def _padded(array: np.ndarray, ndim: int) -> tuple[int, ...]:
    return (1,) * (ndim - array.ndim) + array.shape


def relative(drawn: Random, sizes: Sizes, dtype: str) -> Step:
    """A table of relative places, looked up by a score function with parameters."""
    R = int(drawn.randint(1, 6))

    def ours(table, x, b, n, q, k):
        return x + table.astype(x.dtype)[n, jnp.clip(jnp.asarray(k - q), -R, R) + R]

    def apply(x, floats, ints, at, rnd):
        place = np.minimum(np.maximum(at[3] - at[2], -R), R)[0, 0] + R  # T S

        def back(dy):
            heads = np.moveaxis(dy, 1, -1)  # B T S N
            entries = [added(heads[:, place == i], (0, 1), rnd) for i in range(2 * R + 1)]
            return dy, [np.stack(entries, axis=-1)]

        return rnd(x + floats[0][:, place]), back

    def draw(drawn):
        return [drawn.standard_normal((sizes.N, 2 * R + 1))], []

    words = f"ScoreFn(table of {2 * R + 1})"
    return Step(words, draw, lambda fs, xs: fa.ScoreFn(ours, fs[0]), apply)


def t5(drawn: Random, sizes: Sizes, dtype: str) -> Step:
    """T5's bias, its buckets by the published formula."""
    two = bool(drawn.rand() < 0.5)
    rows = int(drawn.randint(2, 5))
    single, buckets = rows // 2, rows * (1 + two)
    most = single + 1 + int(drawn.randint(1, 9))
    by = offset(drawn, sizes, static_only=False, entries=False)
    how = {"buckets": buckets, "max_distance": most, "bidirectional": two}

    def places(ints, at):
        behind = at[2] + by.value(ints, at[0]) - at[3]  # B|1 1 T S
        far = np.abs(behind) if two else np.maximum(behind, 0)
        ramp = np.log(np.maximum(far, 1) / single) / np.log(most / single) * (rows - single)
        last = np.minimum(single + np.floor(ramp + 1e-9).astype(int), rows - 1)
        return np.where(far < single, far, last) + rows * (two & (behind < 0))

    def apply(x, floats, ints, at, rnd):
        place = np.broadcast_to(places(ints, at)[:, 0], (x.shape[0], *x.shape[2:]))  # B T S

        def back(dy):
            heads = np.moveaxis(dy, 1, -1)  # B T S N
            return dy, [np.stack([added(heads[place == i], (0,), rnd) for i in range(buckets)])]

        return rnd(x + np.moveaxis(floats[0][place], -1, 1)), back

    def draw(drawn):
        return [drawn.standard_normal((buckets, sizes.N))], by.draw(drawn)

    def build(fs, xs):
        return fa.T5Bias(fs[0], **how, offset=by.build(xs))

    return Step(f"T5Bias({buckets}, {most}, {two}, {by.words})", draw, build, apply)


def _gate(params, x, b, n, q, k):
    own = params["w"][n].astype(x.dtype)
    return x + params["a"].astype(x.dtype) * jnp.tanh(own * x)


def gate(drawn: Random, sizes: Sizes, dtype: str) -> Step:
    """`x + a * tanh(w[n] * x)`, its parameters a dictionary."""

    def apply(x, floats, ints, at, rnd):
        a, w = floats[0], floats[1].reshape(1, -1, 1, 1)
        tanh = rnd(np.tanh(rnd(w * x)), TANH)
        slope = rnd(1 - rnd(tanh * tanh))

        def back(dy):
            own = rnd(rnd(a * dy) * slope)
            da = summed(rnd(dy * tanh), (), rnd)
            return rnd(dy + rnd(own * w)), [da, summed(rnd(own * x), w.shape, rnd).ravel()]

        return rnd(x + rnd(a * tanh)), back

    def draw(drawn):
        return [np.asarray(drawn.standard_normal()), drawn.standard_normal(sizes.N)], []

    def build(fs, xs):
        return fa.ScoreFn(_gate, {"a": fs[0], "w": fs[1]})

    return Step("ScoreFn(gate)", draw, build, apply)


def _by_distance(x, b, n, q, k):
    return x - 0.25 * jnp.abs(jnp.asarray(q - k)).astype(x.dtype)


def by_distance(drawn: Random, sizes: Sizes, dtype: str) -> Step:
    """A score function without parameters."""

    def apply(x, floats, ints, at, rnd):
        distance = np.abs(at[3] - at[2]).astype(x.dtype)
        return rnd(x - distance / x.dtype.type(4)), lambda dy: (dy, [])

    return Step(
        "ScoreFn(distance)", lambda d: ([], []), lambda fs, xs: fa.ScoreFn(_by_distance), apply
    )


def closure(drawn: Random, sizes: Sizes, dtype: str) -> Step:
    """A score function that closes over a differentiated array."""

    def build(fs, xs):
        def ours(x, b, n, q, k):
            return x + fs[0][n].astype(x.dtype) * jnp.asarray(k % 3).astype(x.dtype)

        return fa.ScoreFn(ours)

    def apply(x, floats, ints, at, rnd):
        w, third = floats[0].reshape(1, -1, 1, 1), (at[3] % 3).astype(x.dtype)

        def back(dy):
            return dy, [summed(rnd(dy * third), w.shape, rnd).ravel()]

        return rnd(x + rnd(w * third)), back

    return Step("ScoreFn(closure)", lambda d: ([d.standard_normal(sizes.N)], []), build, apply)


def identity(x: np.ndarray, units: float = 1) -> np.ndarray:
    """The rounding hook of the truth."""
    return x


def added(x: np.ndarray, axis: Any, rnd: Rounding) -> np.ndarray:
    """The sum, one addition after the other if each has noise."""
    if rnd is identity:
        return np.asarray(x.sum(axis=axis))
    axes = range(x.ndim) if axis is None else np.atleast_1d(axis)
    x = np.moveaxis(x, axes, range(len(axes)))
    partial = x.reshape(-1, *x.shape[len(axes) :]).cumsum(axis=0)
    moves = rnd(partial) - partial
    return np.asarray(partial[-1:].sum(axis=0) + moves.sum(axis=0))


def summed(x: np.ndarray, shape: tuple[int, ...], rnd: Rounding) -> np.ndarray:
    """The sum over the axes along which an array of this shape was spread."""
    lead = tuple(range(x.ndim - len(shape)))
    along = tuple(i + len(lead) for i, n in enumerate(shape) if n == 1)
    return added(x, (*lead, *along), rnd).reshape(shape)


SUMS = (additive, alibi, relative, t5, by_distance, closure)
KINDS = (softcap, softcap, gate, additive, additive, *SUMS)
