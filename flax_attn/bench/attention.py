"""Attention of q, k and v: the task, this library's backends and the functions of others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .._internal.types import Sizes
from ..attend import attend, explain
from ..backends import BACKENDS
from ..masks import CAUSAL, FULL, Mask, Window
from ..scores import Softcap
from .competitor import OWN_FAMILY, Build, Competitor
from .program import Call, JaxProgram, TorchProgram, device
from .task import BOTH, COTANGENT, FORWARD, Arrays, Task, platform

EXTRAS = ("plain", "softcap", "sinks")
# Above this many attention weights, some rows and a smaller task are verified instead.
MAX_PROVEN_WEIGHTS = 2**25
NO_FUNCTION = "it is a layer with projections: --preset book and --variant time it"
QUADRATIC = {"torch.eager": (3, 5), "torch.compile": (3, 5)}


@dataclass(frozen=True)
class Attention(Task):
    """Attention of q, k and v of `B T N H`.

    Attributes:
      mask: "causal", "full" or "window", which is causal too.
      extra: "softcap", logits capped at 50; "sinks", one per head from -1 to 1; else "plain".
      window: number of visible keys per query of a window, including its own.

    >>> causal = Attention(length=1024, width=64, heads=2)
    >>> causal.pairs, causal.flops
    (524800, 268697600)
    """

    mask: str = "causal"
    extra: str = "plain"
    window: int | None = None

    @property
    def rule(self) -> Mask:
        """The `mask` argument of `attend`."""
        if self.window is not None:
            return Window(self.window - 1, 0)
        return CAUSAL if self.mask == "causal" else FULL

    @property
    def options(self) -> dict[str, Any]:
        """The other keyword arguments of `attend`."""
        if self.extra == "softcap":
            return {"score": Softcap(50.0)}
        return {"sinks": jnp.linspace(-1.0, 1.0, self.heads)} if self.extra == "sinks" else {}

    @property
    def table(self) -> str:
        mask = self.mask if self.window is None else f"window {self.window}"
        mask = mask if self.extra == "plain" else f"{mask}, {self.extra}"
        return f"head width {self.width}, {mask}, {self.dtype}"

    @property
    def pairs(self) -> int:
        """Number of visible query-key pairs per head."""
        if self.mask == "full":
            return self.length**2
        keys = min(self.length, self.window or self.length)
        return keys * (keys + 1) // 2 + (self.length - keys) * keys

    @property
    def flops(self) -> int:
        """FLOPs: `2 B N pairs (H + h)`; backward adds 2.5 times that."""
        forward = 2 * self.batch * self.heads * self.pairs * 2 * self.width
        return forward if self.which == FORWARD else forward * 7 // 2

    def shapes(self) -> dict[str, tuple[int, ...]]:
        heads = (self.batch, self.length, self.heads, self.width)
        return dict.fromkeys(("q", "k", "v", COTANGENT), heads)

    def weight_arrays(self) -> Arrays:
        """Weights by name, of a layer."""
        return {}

    @property
    def rows(self) -> np.ndarray:
        """Query indices verified at these sizes: all, or the ends and some between."""
        if self.weights <= MAX_PROVEN_WEIGHTS:
            return np.arange(self.length)
        draw = np.random.default_rng(self.seed).integers
        return np.unique([0, 1, self.length // 2, self.length - 1, *draw(self.length, size=12)])

    def proof_inputs(self) -> Arrays:
        inputs = self.inputs()
        cotangent = np.zeros_like(inputs[COTANGENT])
        cotangent[:, self.rows] = inputs[COTANGENT][:, self.rows]
        return {**inputs, COTANGENT: cotangent}

    def small(self) -> "Attention":
        return self if self.weights <= MAX_PROVEN_WEIGHTS else self.shortened()

    def verified(self, results: Arrays) -> Arrays:
        by_query = ("output", "q")
        return {name: x[:, self.rows] if name in by_query else x for name, x in results.items()}

    def references(self) -> tuple[Arrays, Arrays]:
        precision = str(jax.config.jax_default_matmul_precision)  # type: ignore
        both = _plain_results(replace(self, which=BOTH), precision)
        if self.which == BOTH:
            return both
        baseline, truth = ({"output": results["output"]} for results in both)
        return baseline, truth

    def formula(self, inputs: Any, visible: jax.Array) -> jax.Array:
        """The plain formula in the verified rows."""
        return plain(inputs["q"][:, self.rows], inputs["k"], inputs["v"], visible, self.options)


def plain(q: Any, k: Any, v: Any, visible: jax.Array, options: Any) -> jax.Array:
    """The plain formula, one batch entry at a time."""

    def one(inputs: Any) -> jax.Array:
        return attend(*inputs, mask=visible, backend="reference", **options)

    entry: Callable = jax.checkpoint(one)
    return jax.lax.map(entry, (q, k, v))


@cache
def _plain_results(task: Attention, precision: str) -> tuple[Arrays, Arrays]:
    """The plain formula's output and gradients in the verified rows."""
    inputs = {**task.weight_arrays(), **task.proof_inputs()}
    with jax.enable_x64(True):
        truth = _plain_run(task, {name: x.astype(np.float64) for name, x in inputs.items()})
    return _plain_run(task, inputs), truth


def _plain_run(task: Attention, inputs: Arrays) -> Arrays:
    visible = task.rule(0, 0, task.rows[:, None], np.arange(task.length)[None])
    visible = np.broadcast_to(np.asarray(visible), (len(task.rows), task.length))
    cotangent = inputs[COTANGENT][:, task.rows]
    others = {name: x for name, x in inputs.items() if name != COTANGENT}

    @jax.jit
    def both(inputs: Any, cotangent: jax.Array, visible: jax.Array) -> Any:
        out, back = jax.vjp(lambda inputs: task.formula(inputs, visible), inputs)
        return out, back(cotangent)[0]

    out, grads = jax.tree.map(np.asarray, both(others, cotangent, visible))
    if "q" in grads:
        grads["q"] = grads["q"][:, task.rows]
    return {"output": out, **grads}


def of_jax(make: Callable[[Any], Call]) -> Build:
    """Builds a JAX program from `make(task)`, which returns `call(inputs)`."""
    return lambda task: JaxProgram(make(task), task.which)


def flax_attn_competitors(backends: Sequence[str]) -> list[Competitor]:
    """Returns this library once per requested backend; "auto" lets it choose."""
    return [_flax_attn(name) for name in backends]


def _flax_attn(backend: str) -> Competitor:
    def make(task: Attention) -> Call:
        options = {"mask": task.rule, "backend": backend, **task.options}
        return lambda x: attend(x["q"], x["k"], x["v"], **options)

    if backend == "auto":
        return Competitor(OWN_FAMILY, OWN_FAMILY, of_jax(make), backend=chosen)
    return Competitor(
        f"{OWN_FAMILY}:{backend}",
        OWN_FAMILY,
        of_jax(make),
        lambda task: next(v.refusal for v in _explained(task) if v.backend == backend),
        lambda task: backend,
    )


def chosen(task: Attention) -> str:
    """The backend that "auto" selects."""
    return _explained(task).chosen


@cache
def _explained(task: Attention) -> Any:
    explanations = []
    x = jax.ShapeDtypeStruct((task.batch, task.length, task.heads, task.width), task.dtype)
    more = {"mask": task.rule, **task.options}
    jax.eval_shape(lambda x: explanations.append(explain(x, x, x, **more)), x)
    return explanations[0]


def names_of_backends() -> tuple[str, ...]:
    """All values of `--backend` except "all"."""
    return ("auto", *BACKENDS)


def _jax_nn(function: Callable, task: Attention) -> Call:
    masks: dict[str, Any] = {"is_causal": task.mask != "full"}
    if task.window is not None:
        masks["local_window_size"] = (task.window - 1, 0)
    return lambda x: function(x["q"], x["k"], x["v"], **masks)


def _nnx(task: Attention) -> Call:
    def call(x: Any) -> Any:
        masks: dict[str, Any] = {"is_causal": task.mask == "causal"}
        if task.window is not None:
            masks = {"mask": _boolean_mask(task)[None, None]}
        return nnx.dot_product_attention(x["q"], x["k"], x["v"], deterministic=True, **masks)

    return call


def _equinox(task: Attention) -> Call:
    one = import_module("equinox.nn._attention").dot_product_attention

    def call(x: Any) -> Any:
        mask = None if task.mask == "full" else _boolean_mask(task)
        heads = jax.vmap(partial(one, mask=mask), in_axes=1, out_axes=1)
        return jax.vmap(heads)(x["q"], x["k"], x["v"])

    return call


def _boolean_mask(task: Attention) -> jax.Array:
    """The mask as T S booleans, built inside the program as users of such masks build it."""
    t = jnp.arange(task.length)
    return task.rule(0, 0, t[:, None], t[None, :])


def _of_torch(make: Callable[[Attention], Callable]) -> Build:
    """Inputs are stored as B T N H, as projections output them, and passed as B N T H views."""

    def build(task: Attention) -> TorchProgram:
        call = make(task)

        def run(x: Any) -> Any:
            return call(*(x[name].transpose(1, 2) for name in "qkv")).transpose(1, 2)

        return TorchProgram(run, task.which)

    return build


def _sdpa(task: Attention) -> Callable:
    kernel = import_module("torch").nn.functional.scaled_dot_product_attention
    if task.window is None:
        return partial(kernel, is_causal=task.mask == "causal")
    return partial(kernel, attn_mask=_torch_mask(task))


def _eager(task: Attention) -> Callable:
    hidden = None if task.mask == "full" else ~_torch_mask(task)

    def formula(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.transpose(-2, -1) * task.width**-0.5  # B N T S
        if hidden is not None:
            scores = scores.masked_fill(hidden, -float("inf"))
        return scores.softmax(-1) @ v  # B N T H

    return formula


def _compiled(task: Attention) -> Callable:
    return import_module("torch").compile(_eager(task))


def _torch_mask(task: Attention) -> Any:
    mask = task.rule.static(Sizes((), 1, task.length, task.length))
    assert mask is not None
    return import_module("torch").from_numpy(mask.copy()).to(device())


def _tokamax(task: Attention) -> Call:
    flags = import_module("absl.flags").FLAGS
    if not flags.is_parsed():
        flags.mark_as_parsed()  # else tokamax parses this command's options
    more = {"logits_soft_cap": 50.0} if task.extra == "softcap" else {}
    return _jax_nn(partial(import_module("tokamax").dot_product_attention, **more), task)


def _refuses_extra(task: Attention) -> str | None:
    return None if task.extra == "plain" else f"it has no {task.extra}"


def _no_cudnn(task: Attention) -> str | None:
    """Returns why `jax.nn` cannot use cuDNN for a task, or None."""
    if platform() != "gpu":
        return "cuDNN is for NVIDIA GPUs"
    return "cuDNN takes 16 bits" if task.dtype == "float32" else _refuses_extra(task)


def _no_program(task: Attention) -> Any:
    raise NotImplementedError(NO_FUNCTION)


def others() -> list[Competitor]:
    """Returns the attention functions of other libraries."""
    jax_nn = jax.nn.dot_product_attention
    by_cudnn = partial(jax_nn, implementation="cudnn")
    builds = {
        "jax.nn": of_jax(partial(_jax_nn, jax_nn)),
        "jax.nn:cudnn": of_jax(partial(_jax_nn, by_cudnn)),
        "flax.nnx": of_jax(_nnx),
        "equinox": of_jax(_equinox),
        "torch": _of_torch(_sdpa),
        "torch.eager": _of_torch(_eager),
        "torch.compile": _of_torch(_compiled),
        "nn.MultiheadAttention": _no_program,
        "tokamax": of_jax(_tokamax),
    }
    refusals = {
        "jax.nn:cudnn": _no_cudnn,
        "nn.MultiheadAttention": lambda task: NO_FUNCTION,
        "tokamax": lambda task: "it has no sinks" if task.extra == "sinks" else None,
    }
    return [
        Competitor(
            name,
            name.partition(":")[0],
            build,
            refusals.get(name, _refuses_extra),
            quadratic=QUADRATIC.get(name, (0, 0)),
        )
        for name, build in builds.items()
    ]
