"""Records submodule outputs, taps and dropout masks while a Flax module runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from .... import taps
from ....weights.known_layers import a
from ..leaves import counted, leaves, name_of_leaf, rebuilt, split_leaves
from ..run import fit_mask


class Force(NamedTuple):
    """Torch's value at a tap, in Flax's shape, and its gradient where it is known."""

    value: np.ndarray
    gradient: np.ndarray | None


class Recorder:
    """Records values, and replaces them by torch's, in the trace in which it was created.

    Inside a scan or vmap nothing is recorded, since values cannot leave that trace.

    Attributes:
      taps, inputs: outputs of submodules and named points by path; arguments of each submodule.
      numbers: taps that are Python numbers or numpy arrays, which `jax.jit` cannot return.
      keeps, rates, places: dropout masks as drawn, the requested keep rate of each (NaN if
        unknown), and the submodule that drew it.
      repeats: torch's masks, which replace those drawn where their shapes fit; None keeps those.
      anchors: zeros that tie replaced taps to the outputs; see `_replaced`.
      notes: sentences about submodule outputs that are not compared.
    """

    def __init__(
        self,
        force: Mapping[str, Force],
        probes: Mapping[str, jax.Array],
        draw: Any = None,
        repeats: Sequence[np.ndarray] | None = None,
    ) -> None:
        self.trace = get_opaque_trace_state(convention="flax")
        self.force, self.probes, self.draw, self.repeats = force, probes, draw, repeats
        self.taps: dict[str, jax.Array] = {}
        self.inputs: dict[str, tuple[Any, ...]] = {}
        self.numbers: dict[str, np.ndarray] = {}
        self.keeps: list[jax.Array] = []
        self.rates: list[Any] = []
        self.places: list[str] = []
        self.anchors: list[jax.Array] = []
        self.notes: dict[str, None] = {}
        self.path: list[str] = []

    def here(self) -> bool:
        return self.trace == get_opaque_trace_state(convention="flax")

    def note(self, name: str, value: Any, inputs: tuple[Any, ...] | None = None) -> Any:
        """Records a tap, with the call's arguments if it is a submodule's output."""
        if not self.here():
            return value
        name = counted({**self.taps, **self.numbers}, name)
        if inputs is not None:
            self.inputs[name] = inputs
        if isinstance(value, np.ndarray):
            self.numbers[name] = value
            return value
        self.taps[name] = value
        force = self.force.get(name)
        if force is None or force.value.shape != value.shape:
            return value
        value, anchor = _replaced(value, self.probes[name], force)
        self.anchors.append(anchor)
        return value

    def output(self, path: str, inputs: tuple[Any, ...], out: Any) -> Any:
        """Records each leaf of a submodule's output; with torch's values where `force` has them."""
        outputs = split_leaves(out, is_array, path)
        called = name_of_leaf(path, outputs)
        for name, value in outputs.numbers.items():
            self.note(called(name), value, inputs)
        for name, value in outputs.unknown.items():
            self.notes[f"{name} of Flax is {a(type(value))}, which is not compared there"] = None

        def change(name: str, leaf: Any) -> Any:
            return self.note(called(name), leaf, inputs) if is_array(leaf) else leaf

        return rebuilt(out, change, path)

    def keep(self, value: jax.Array, rate: Any = np.nan) -> jax.Array:
        """Records a drawn mask; returns torch's if there is one that fits."""
        if not self.here():
            return value
        self.keeps.append(value)
        self.rates.append(jnp.mean(jnp.asarray(rate, jnp.float32)))
        self.places.append(self.path[-1] if self.path else "")
        if self.repeats is None or len(self.keeps) > len(self.repeats):
            return value
        fitted = fit_mask(self.repeats[len(self.keeps) - 1], value.shape)
        return value if fitted is None else jnp.asarray(fitted, value.dtype)

    def tap(self, name: str, value: jax.Array) -> jax.Array:
        if name != "keep":
            return self.note(
                f"{self.path[-1]}.{name}" if self.path and self.path[-1] else name, value
            )
        return self.keep(value)

    def other_prng_key(self, key: Any) -> Any:
        """Returns a key created outside all modules, folded with the number of the draw."""
        # Keys that a module stores are folded by `flax._set_random` instead.
        return key if self.draw is None or self.path else fold_draw(key, self.draw)


def is_array(x: Any) -> bool:
    """Whether a leaf is a JAX array other than random keys."""
    return isinstance(x, jax.Array) and not is_key(x)


def is_key(x: Any) -> bool:
    """Whether a leaf is an array of random keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def fold_draw(key: jax.Array, draw: Any) -> jax.Array:
    """Returns the keys unchanged for draw 0, and other keys for every other draw."""
    fold: Callable[..., jax.Array] = lambda one: jax.random.fold_in(one, draw)  # noqa: E731
    # `fold_in` takes one key; the last axis of raw uint32 keys belongs to the key.
    for _ in range(key.ndim - (not is_key(key))):
        fold = jax.vmap(fold)
    # No Python branch: the draw number is traced under jit.
    return jnp.where(draw == 0, key, fold(key))


def _wrapped(
    original: Callable[..., Any], recorder: Recorder, paths: Mapping[int, str]
) -> Callable:
    """Wraps a module's `__call__` to record its arguments and output."""

    def call(self, *args, **kwargs):
        path = paths.get(id(self))
        # `super().__call__` enters the same module again: only the outermost call is recorded.
        if path is None or (recorder.path and recorder.path[-1] == path):
            return original(self, *args, **kwargs)
        args, kwargs = rebuilt(
            (args, kwargs), lambda _, x: recorder.other_prng_key(x) if is_key(x) else x, ""
        )
        recorder.path.append(path)
        try:
            out = original(self, *args, **kwargs)
        finally:
            recorder.path.pop()
        # The root's output is compared as the output of the run, not as a tap.
        if not path:
            return out
        arguments = (x for _, x in leaves((*args, *kwargs.values())))
        arrays = tuple(x for x in arguments if is_array(x) or isinstance(x, np.ndarray))
        return recorder.output(path, arrays, out)

    return call


@contextmanager
def recording(
    module: nnx.Module,
    force: Mapping[str, Force],
    probes: Mapping[str, jax.Array],
    draw: Any = None,
    repeats: Sequence[np.ndarray] | None = None,
) -> Iterator[Recorder]:
    """Records submodule outputs, taps and Bernoulli draws of `module` inside the block.

    Args:
      force, probes: torch's values at taps, and zeros whose gradients are the taps' cotangents.
      draw: number folded into keys that the call itself creates; None leaves them unchanged.
      repeats: torch's dropout masks, if Flax repeats them.
    """
    recorder = Recorder(force, probes, draw, repeats)
    paths = {id(part): ".".join(map(str, path)) for path, part in nnx.iter_modules(module)}
    kinds = {type(part) for _, part in nnx.iter_modules(module) if callable(part)}
    # None marks an inherited `__call__`: the wrapper is deleted afterwards, not replaced.
    plain = {kind: kind.__dict__.get("__call__") for kind in kinds}
    try:
        # Classes are patched, since Python looks `__call__` up on the type, not on the instance.
        for kind in kinds:
            kind.__call__ = _wrapped(kind.__call__, recorder, paths)
        with taps.listen(recorder.tap), _record_draws(recorder):
            yield recorder
    finally:
        for kind, original in plain.items():
            if original is None:
                del kind.__call__
            else:
                kind.__call__ = original


@contextmanager
def _record_draws(recorder: Recorder) -> Iterator[None]:
    """Records every Bernoulli draw, and folds keys that the call creates outside its modules."""
    # `nnx.Dropout` and other dropouts draw by `jax.random.bernoulli`, so no class need be known.
    plain = {name: getattr(jax.random, name) for name in ("bernoulli", "key", "PRNGKey")}

    def bernoulli(key, p=0.5, *args, **kwargs):
        return recorder.keep(plain["bernoulli"](key, p, *args, **kwargs), p)

    def made(name):
        return lambda *args, **kwargs: recorder.other_prng_key(plain[name](*args, **kwargs))

    jax.random.bernoulli = bernoulli
    jax.random.key, jax.random.PRNGKey = made("key"), made("PRNGKey")
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(jax.random, name, function)


def _replaced(value: jax.Array, probe: jax.Array, force: Force) -> tuple[jax.Array, jax.Array]:
    """Returns torch's value, and an anchor: a zero that becomes an extra output of the run.

    In the backward pass torch's gradient replaces the cotangent, which becomes the gradient of the
    probe. Without the anchor JAX would skip the backward pass of a tap whose gradient is stopped
    later, and torch's gradient would not be propagated.
    """

    # A custom_vjp, since the gradient passed on is not that of the function computed here.
    @jax.custom_vjp
    def put(value, probe):
        return jnp.asarray(force.value, value.dtype), jnp.zeros((), value.dtype)

    def forward(value, probe):
        return put(value, probe), None

    def back(_, cotangents):
        cotangent, _ = cotangents
        if force.gradient is None:
            return cotangent, cotangent
        # Torch's gradient of a complex value is the conjugate of JAX's.
        return jnp.asarray(np.conj(force.gradient), cotangent.dtype), cotangent

    put.defvjp(forward, back)
    return put(value, probe)
