"""What is heard while a Flax module runs: submodules' outputs, taps, dropout masks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from ... import taps
from ...weights.known_layers import a
from .leaves import counted, leaves, name_of_leaf, rebuilt, split_leaves
from .run import fit_mask


class Force(NamedTuple):
    """What torch had at a tap, in Flax's shape: its value, and its gradient where it is known."""

    value: np.ndarray
    gradient: np.ndarray | None


class Recorder:
    """Notes what is heard in the trace it was made in, and puts torch's values in its place; inside
    a scan or a vmap there are no values that could be brought out, so nothing is noted there.

    Attributes:
      taps, inputs: of submodules and named points, by path; what each submodule was called with.
      numbers: taps that are Python numbers or numpy arrays, which `jax.jit` could not return.
      keeps, rates, places: dropout masks as they were drawn, what each was asked to keep (NaN
        where that is not known), and which submodule drew it.
      repeats: torch's masks, which go on in their places where their shapes fit; None if the drawn
        ones do.
      notes: sentences about outputs of submodules that are not compared.
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
        """Notes a tap and, of a submodule's output, what the call was given."""
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
        """Notes every leaf of a submodule's output; what goes on holds torch's values."""
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
        """Notes a mask that was drawn; what goes on is torch's, if there is one."""
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
        """A key made outside all modules, another one for another turn."""
        return key if self.draw is None or self.path else fold_draw(key, self.draw)


def is_array(x: Any) -> bool:
    """Whether a leaf is an array of JAX's that holds numbers, as keys do not."""
    return isinstance(x, jax.Array) and not is_key(x)


def is_key(x: Any) -> bool:
    """Whether a leaf is an array of random keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def fold_draw(key: jax.Array, draw: Any) -> jax.Array:
    """The keys themselves in turn 0, others in every other one."""
    fold: Callable[..., jax.Array] = lambda one: jax.random.fold_in(one, draw)  # noqa: E731
    for _ in range(key.ndim - (not is_key(key))):
        fold = jax.vmap(fold)
    return jnp.where(draw == 0, key, fold(key))


def _wrapped(
    original: Callable[..., Any], recorder: Recorder, paths: Mapping[int, str]
) -> Callable:
    """A module's call that notes what it is given and what it returns."""

    def call(self, *args, **kwargs):
        path = paths.get(id(self))
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
    """Hears every submodule's output, every tap and every Bernoulli draw of `module` meanwhile.

    Args:
      force, probes: what torch had at taps, and zeros whose gradients arrive there.
      turn: a number by which keys that the call itself makes become others; None leaves them.
      repeats: torch's dropout masks, if Flax repeats them.
    """
    recorder = Recorder(force, probes, draw, repeats)
    paths = {id(part): ".".join(map(str, path)) for path, part in nnx.iter_modules(module)}
    kinds = {type(part) for _, part in nnx.iter_modules(module) if callable(part)}
    plain = {kind: kind.__dict__.get("__call__") for kind in kinds}
    try:
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
    """Notes every Bernoulli draw, which is how other people's dropout draws, and hands other keys
    to a call that makes them itself, outside its modules."""
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
    """Torch's value, and an anchor: a zero that every output of the run depends on.

    Behind it torch's gradient goes on, and what arrived is the probe's. Without the anchor JAX
    would pass by a point where a gradient was stopped, and torch's would not go on.
    """

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
