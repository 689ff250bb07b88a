"""The Flax side: runs a copy of the module eagerly or under jit and records taps by path."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ....errors import ParityError
from ....weights.known_layers import flax_params, flax_state
from ....weights.plan import first_paths
from ... import judge
from ..calls import ITSELF, name_of
from ..jax import precision
from ..jax.evaluate import Evaluation, wide_requests
from ..leaves import refuse_unknown, split_leaves
from ..run import Run, RunRequest, is_floating, rounded
from .dtypes import clear_dtypes, pinned_dtypes
from .float64 import attention_lifted
from .recorder import Force, fold_draw, is_array, is_key, recording

# Output name of the sum of the replaced taps' anchors; see `recorder._replaced`.
ANCHOR = "anchors"
# An evaluated program runs once, and is no program of the user's.
ONCE: dict[str, str | bool] = {"xla_backend_optimization_level": "1"}

CALLS_OUT, DRAWS = f"calls back out of JAX: {ITSELF}", "draws random numbers"


class Flax:
    """Runs copies of a Flax module with any weights, eagerly or as one jitted function.

    Uses the highest matmul precision and JAX's standard dtype promotion, since `nnx.LayerNorm`
    fails under strict promotion.

    Args:
      module, call, request: as passed to `compare`.
      dtype: dtype of weights and inputs.
      jit: whether to run one jitted function.
      force: taps whose value and cotangent are recorded and then replaced by torch's.
      repeats: torch's dropout masks, if this side repeats them.
      evaluation: how the traced program is evaluated, if not as JAX does.
    """

    def __init__(
        self,
        module: nnx.Module,
        call: Callable[..., Any],
        request: RunRequest,
        dtype: str,
        jit: bool,
        force: Mapping[str, Force] | None = None,
        repeats: Sequence[np.ndarray] | None = None,
        evaluation: Evaluation = Evaluation(),  # noqa: B008 - frozen
    ):
        self.module, self.call, self.request = module, call, request
        self.dtype, self.jit, self.force = dtype, jit, dict(force or {})
        self.repeats, self.evaluation = repeats, evaluation
        self.program: Callable[..., Any] | None = None
        self.is_widened = self.is_lifted = False  # by wide requests, by evaluation
        self.findings: dict[str, list[str]] = {}
        self.lifted: dict[str, None] = {}
        parts = [type(part) for _, part in nnx.iter_modules(module)]
        self.files = {getattr(part, "__module__", "") for part in (*parts, call)}
        self.static = Static({}, {}, {}, [], [], {}, [])

    def run(self, weights: Mapping[str, np.ndarray]) -> Run:
        """Runs forward and backward; empty `weights` use the module's own."""
        with self.precise():
            self.args = self._arguments(weights)
            program = self._program(*self.args)
            run = self._cast_notes(program(*self.args))
        is_traced = self.request.grads or self.is_widened or self.is_lifted
        return self.concrete(run) if is_traced and not self.jit else run

    def concrete(self, run: Run) -> Run:
        """A run of traced code, with the outputs of a call on arrays where those are others.

        A program that was lifted to float64 rounds when it is called: its outputs are others beyond
        the precision of bfloat16.
        """
        if self.force or self.evaluation.noise is not None:
            return run
        with self.precise(), wide_requests() if self.is_widened else nullcontext():
            named, aux = self._forward()(*self.args)
        outputs = _numpy({k: x for k, x in named.items() if k != ANCHOR} | aux["exact"])
        for name, traced in run.outputs.items() if self.is_lifted else ():
            called = outputs.get(name, traced)
            if is_floating(called) and judge.within_precision(called, 0.0, traced, "bfloat16").ok:
                outputs[name] = traced
        return replace(run, outputs={**run.outputs, **outputs})

    def redraw_masks(self, times: int) -> list[list[np.ndarray]]:
        """Returns the dropout masks of `times` more calls, each with new random keys.

        A key that the module stores and splits itself continues from call to call.
        """
        masks = []
        with self.precise():
            for draw in range(1, times + 1):
                # The draw number is an argument, so that all draws share one compiled program.
                *others, rest = self.args
                self.args = *others, {**rest, "random": self.random, "turn": draw}
                masks.append(self._cast_notes(self._program(*self.args)(*self.args)).keeps)
        return masks

    def traced(self, weights: Mapping[str, np.ndarray]) -> tuple[Any, Any, tuple]:
        """Traces the forward pass: its jaxpr, output shapes and arguments."""
        with self.precise():
            args = self._arguments(weights)
            make = jax.make_jaxpr(self._forward(), return_shape=True)
            (program, shapes), _ = self._traced(lambda: make(*args))
            return program, shapes, args

    def copy(self, weights: Mapping[str, np.ndarray]) -> nnx.Module:
        """Returns a copy of the module in the run's dtype and mode, with these weights."""
        with self.precise():
            params, _, _, rest = self._arguments(weights)
            return self._merge_module(*nnx.split(self.module), params | rest["weights"])

    def _merge_module(self, graph: Any, state: Any, weights: Mapping[str, Any]) -> nnx.Module:
        """Merges the module with these weights; all other floats are cast to the run's dtype."""

        def cast(path: Sequence[Any], x: Any) -> Any:
            name = ".".join(str(key.key) for key in path if hasattr(key, "key"))
            return x if name in weights else _cast(x, self.dtype)  # replaced below: no cast

        state = jax.tree_util.tree_map_with_path(cast, state)
        copy = nnx.merge(graph, state, copy=True)
        clear_dtypes(copy)
        copy.train() if self.request.train else copy.eval()
        variables = flax_state(copy)
        for path, value in weights.items():
            variables[path].set_value(value)
        return copy

    @contextmanager
    def precise(self) -> Iterator[None]:
        """Applies the JAX settings of a run."""
        with ExitStack() as stack:
            # JAX silently truncates float64 arrays to float32 unless x64 is enabled.
            stack.enter_context(jax.enable_x64(self.dtype == "float64"))
            stack.enter_context(jax.numpy_dtype_promotion("standard"))
            stack.enter_context(jax.default_matmul_precision("highest"))
            stack.enter_context(attention_lifted(self.lifted, self.files))
            yield

    def _arguments(self, weights: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], ...]:
        """Returns params, inputs and probes, all differentiated, and the remaining arguments.

        By `device_put`: for each new shape `jnp.asarray` of a numpy array compiles a program.
        """
        arrays = self.request.arrays().items()
        inputs = {name: jax.device_put(rounded(x, self.dtype)) for name, x in arrays}
        floats = {k: v for k, v in inputs.items() if _is_inexact(v)}
        fixed = {k: v for k, v in floats.items() if self.request.is_constant(k)}
        self.inputs = {k: v for k, v in inputs.items() if k not in floats}
        # The gradient of a probe is the cotangent that arrives at its tap.
        probes = {k: jax.device_put(np.zeros_like(f.value)) for k, f in self.force.items()}
        variables = {path: jax.device_put(rounded(x, self.dtype)) for path, x in weights.items()}
        variables = variables or _unique(self.module, self.dtype)
        trained = first_paths(self.module)
        params = {k: v for k, v in variables.items() if k in trained}
        rest = {"weights": {k: v for k, v in variables.items() if k not in params}, "inputs": fixed}
        if self.request.train:
            random = {k: v.get_value() for k, v in random_state(self.module).items()}
            rest |= {"random": random, "turn": 0}
        return params, {k: v for k, v in floats.items() if k not in fixed}, probes, rest

    def _widened_products(self) -> list[str]:
        return self.findings.get("widened", [])

    def _program(self, *args: Any) -> Callable[..., Any]:
        if self.program is None:
            run = self._forward()
            run = _with_gradients(run, self.request, self.dtype) if self.request.grads else run
            # Precision is read from the jaxpr, which eager runs are traced for as well.
            traces = self.jit or not self.force or self.evaluation.lifted
            self.program = self._from_trace(run, args) if traces else run
        return self.program

    def _from_trace(self, run: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        """Traces the program; returns it, compiled under jit, or its evaluation."""
        traced, widened = self._traced(lambda: jax.jit(run).trace(*args))
        self.findings = _findings(traced.jaxpr)
        self.findings["unread"] = precision.unread(traced, args, self.request.grads)
        self.is_widened, self.is_lifted = widened, self.evaluation.changes(traced.jaxpr)
        if widened or self.is_lifted:
            return self._evaluated(traced, args)
        return traced.lower().compile() if self.jit else run

    def _traced(self, trace: Callable[[], Any]) -> tuple[Any, bool]:
        """A trace, and whether requests for float32 in it were answered by float64."""
        if self.dtype != "float64" or not self.evaluation.lifted:
            return trace(), False
        try:
            with wide_requests():
                return trace(), True
        except Exception:
            try:
                return trace(), False
            except Exception as error:
                raise NotWide(name_of(self.module), error) from error

    def _evaluated(self, traced: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
        """The evaluation of a traced program, compiled under jit."""
        tree, jaxpr = jax.tree.structure(traced.out_info), traced.jaxpr.jaxpr

        def run(consts: Sequence[Any], *args: Any) -> Any:
            flat = jax.tree.leaves(args)
            return jax.tree.unflatten(tree, self.evaluation.of(jaxpr, consts, flat))

        if self.evaluation.changes(traced.jaxpr) and self.evaluation.lifted:
            self.lifted[_lifted(self.findings)] = None
            # A result narrower than its operands is wide now.
            products = [x for x in self.findings["products"] if " into " not in x]
            self.findings |= {"casts": [], "products": products}
        with jax.enable_x64(self.dtype == "float64" or bool(self.evaluation.lifted)):
            # As arguments: XLA spends seconds on folding constants, such as a key's random bits.
            consts = list(map(jnp.asarray, traced.jaxpr.consts))
            if self.jit:
                return partial(jax.jit(run).lower(consts, *args).compile(ONCE), consts)
        return partial(run, consts)

    def _forward(self) -> Callable[..., Any]:
        """Returns a pure function from arrays to inexact outputs, and all other results as aux."""
        graph, state = nnx.split(self.module)
        request = self.request

        def forward(params, floats, probes, rest):
            copy = self._merge_module(graph, state, params | rest["weights"])
            _set_random(copy, rest)
            before = _States(copy)
            args, kwargs = request.fill({**self.inputs, **floats, **rest["inputs"]})
            with recording(copy, self.force, probes, rest.get("turn"), self.repeats) as recorder:
                out = self.call(copy, *args, **kwargs)
            outputs = split_leaves(out, is_array, request.output)
            refuse_unknown(outputs.unknown, "Flax")
            named = {k: v for k, v in outputs.arrays.items() if _is_inexact(v)}
            exact = {k: v for k, v in outputs.arrays.items() if k not in named}
            named |= {ANCHOR: sum(recorder.anchors)} if recorder.anchors else {}
            after = _States(copy)
            # Set while tracing, since a jitted function returns arrays only.
            self.static = Static(
                outputs.numbers,
                outputs.others,
                recorder.numbers if request.taps else {},
                recorder.places,
                after.changed_state(before),
                {k: np.asarray(v) for k, v in after.entries.items() if isinstance(v, int | float)},
                list(recorder.notes),
            )
            aux = {"exact": exact, "keeps": recorder.keeps, "rates": recorder.rates}
            aux |= {"taps": recorder.taps, "inputs": recorder.inputs} if request.taps else {}
            aux["state"] = {k: v for k, v in after.values.items() if k not in params}
            aux["random"] = {k: v.get_value() for k, v in random_state(copy).items()}
            return named, aux

        return forward

    def _cast_notes(self, out: Any) -> Run:
        named, aux, grads = out if self.request.grads else (*out, ({},) * 3)
        of_params, of_inputs, of_taps, *_ = grads
        static, self.random = self.static, aux["random"]
        numbers, fixed = (
            {k: rounded(x, self.dtype) for k, x in constants.items()}
            for constants in (static.numbers, static.taps)
        )
        named = {k: v for k, v in named.items() if k != ANCHOR}
        gradients = {**{f"input {k}": v for k, v in of_inputs.items()}, **of_params}
        return Run(
            outputs=_numpy({**named, **aux["exact"]}) | numbers,
            others=static.others,
            taps=_numpy(aux.get("taps", {})) | fixed,
            inputs={k: tuple(map(np.asarray, xs)) for k, xs in aux.get("inputs", {}).items()},
            gradients=_conjugate(_numpy(gradients)),
            keeps=[np.asarray(keep) for keep in aux["keeps"]],
            rates=[float(rate) for rate in aux["rates"]],
            places=static.places,
            tap_gradients=_conjugate(_numpy(of_taps)),
            state=static.state | _numpy(aux["state"]),
            changed=static.changed,
            notes=[
                *static.notes,
                *self.lifted,
                *pinned_dtypes(self.module, self.dtype),
                *self._widened_products(),
                *self.findings.get("callbacks", ()),
                *self.findings.get("unread", ()),
            ],
            findings=self.findings,
        )


def _lifted(findings: Mapping[str, Sequence[str]]) -> str:
    """A sentence on a program that asks for narrow floats in float64, and the first such line."""
    first = next(iter((*findings["casts"], *findings["products"])), "")
    where = f" ({first})" if first else ""
    return (
        f"Flax computes parts in narrower floats also where it is given float64{where}: lifted to "
        "float64, so that its formula is compared there, and its rounding in narrower dtypes only"
    )


class NotWide(ParityError):
    """Raised if a JAX side can be traced in its narrow dtypes only.

    Args:
      name: the side's name.
      error: why not in float64.
    """

    def __init__(self, name: str, error: Exception):
        message = str(error).strip()
        first = (message.splitlines() or [""])[0].rstrip(".,:")
        self.reason = f"{type(error).__name__}: {first}"
        super().__init__(f"{name} cannot be traced in float64: {self.reason}")


class Static(NamedTuple):
    """Results of a run that are not JAX arrays, so that no jitted function can return them."""

    numbers: dict[str, np.ndarray]
    others: dict[str, str]
    taps: dict[str, np.ndarray]
    places: list[str]
    changed: list[str]
    state: dict[str, np.ndarray]
    notes: list[str]


class _States:
    """Module state that a call may change: variables, and plain numbers and strings."""

    def __init__(self, module: nnx.Module):
        params = flax_params(module)
        self.entries = {path: x.get_value() for path, x in flax_state(module).items()}
        for path, node in nnx.iter_graph(module):
            name = ".".join(map(str, path))
            if isinstance(node, nnx.Variable) and name not in params:
                # Random state changes in every call and is returned separately.
                if not isinstance(node, nnx.RngState | nnx.Intermediate):
                    self.entries.setdefault(name, node.get_value())
            elif isinstance(node, int | float | str) and "_pytree__nodes" not in path:
                self.entries[name] = node
        self.values = {k: v for k, v in self.entries.items() if is_array(v)}

    def changed_state(self, before: "_States") -> list[str]:
        """Returns the paths of the entries that differ from `before`."""
        return [path for path, x in self.entries.items() if _differs(x, before.entries.get(path))]


def _differs(x: Any, before: Any) -> bool:
    """Whether an entry was changed; random keys never count."""
    if x is before or is_key(x):
        return False
    # Another array object counts as changed: traced arrays have no values to compare.
    return isinstance(x, jax.Array | np.ndarray) or type(x) is not type(before) or x != before


def _set_random(module: nnx.Module, rest: Mapping[str, Any]) -> None:
    """Sets the module's random state for this draw; does nothing in eval mode."""
    for path, variable in random_state(module).items() if "random" in rest else ():
        value = rest["random"][path]
        # Only base keys are folded: counters, and keys that the module splits, continue.
        variable.set_value(
            fold_draw(value, rest["turn"]) if isinstance(variable, nnx.RngKey) else value
        )


def random_state(module: nnx.Module) -> dict[str, nnx.Variable]:
    """Returns every variable that holds random keys or key counts, by dotted path."""
    return {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.RngState)
        or (isinstance(node, nnx.Variable) and is_key(node.get_value()))
    }


def _with_gradients(forward: Callable[..., Any], request: RunRequest, dtype: str) -> Callable:
    """Adds to `forward` the gradients of its arguments for the request's cotangents."""

    def run(params, floats, probes, rest):
        def of(params, floats, probes):
            return forward(params, floats, probes, rest)

        named, back, aux = jax.vjp(of, params, floats, probes, has_aux=True)
        # For complex outputs JAX's cotangents are the conjugates of torch's.
        cotangents = {
            name: jnp.asarray(rounded(np.conj(request.cotangent(name, x)), dtype)).astype(x.dtype)
            for name, x in named.items()
        }
        # The anchor only makes JAX run the backward passes of replaced taps; its cotangent is zero.
        cotangents |= {ANCHOR: jnp.zeros_like(named[ANCHOR])} if ANCHOR in named else {}
        # Without the barrier XLA spends seconds on folding large constants.
        return named, aux, back(jax.lax.optimization_barrier(cotangents))

    return run


def _findings(jaxpr: Any) -> dict[str, list[str]]:
    """Returns hidden casts, products below the highest precision and draws, as sentences."""
    return {
        "casts": [str(finding) for finding in precision.casts(jaxpr)],
        "products": [str(finding) for finding in precision.products(jaxpr)],
        "widened": [str(finding) for finding in precision.widened(jaxpr)],
        "callbacks": [str(x) for x in precision.calls(jaxpr, precision.CALLBACKS, CALLS_OUT)],
        "random": [str(x) for x in precision.calls(jaxpr, precision.RANDOM, DRAWS)],
    }


def _unique(module: nnx.Module, dtype: str) -> dict[str, jax.Array]:
    params = flax_params(module)
    return {
        path: _cast(params[path].get_value(), dtype)
        for path in dict.fromkeys(first_paths(module).values())
    }


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _cast(x: Any, dtype: str) -> Any:
    floating = hasattr(x, "dtype") and _is_inexact(x)
    return jnp.asarray(rounded(np.asarray(x), dtype)) if floating else x


def _numpy(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in arrays.items()}


def _conjugate(gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Converts gradients to torch's convention: complex ones are the conjugates of JAX's."""
    return {k: x.conj() if x.dtype.kind == "c" else x for k, x in gradients.items()}
