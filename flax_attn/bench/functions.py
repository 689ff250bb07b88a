"""Competitors for attention of q, k and v: this library's backends and other libraries."""

from collections.abc import Callable, Sequence
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
from .competitor import OWN_FAMILY, Competitor
from .program import JaxProgram, Program, TorchProgram, device
from .workload import Workload, platform

NAMES = ("q", "k", "v")
LAYER = "it is a layer with projections: --preset book and --variant time it"
Call = Callable[[Any], Any]


def flax_attn_competitors(backends: Sequence[str]) -> list[Competitor]:
    """Returns this library once per requested backend; "auto" lets it choose."""
    return [_flax_attn(name) for name in backends]


def _flax_attn(backend: str) -> Competitor:
    def make(w: Workload) -> Call:
        return lambda inputs: attend(*inputs, mask=w.rule, backend=backend, **w.options)

    def refusal(w: Workload, which: str) -> str | None:
        return None if backend == "auto" else _verdict(w, backend)

    return Competitor(
        OWN_FAMILY if backend == "auto" else f"{OWN_FAMILY}:{backend}",
        OWN_FAMILY,
        partial(_jax, make),
        refusal,
        chosen if backend == "auto" else lambda w: backend,
    )


def _verdict(w: Workload, backend: str) -> str | None:
    verdicts = _explained(w)
    return next(verdict.refusal for verdict in verdicts if verdict.backend == backend)


def chosen(w: Workload) -> str:
    """The backend that "auto" selects."""
    return _explained(w).chosen


@cache
def _explained(w: Workload) -> Any:
    explanations = []
    x = jax.ShapeDtypeStruct((w.batch, w.length, w.heads, w.width), w.dtype)
    jax.eval_shape(lambda x: explanations.append(explain(x, x, x, mask=w.rule, **w.options)), x)
    return explanations[0]


def names_of_backends() -> tuple[str, ...]:
    """All values of `--backend` except "all"."""
    return ("auto", *BACKENDS)


def _jax(make: Callable[[Workload], Call], w: Workload, which: str) -> Program:
    def pack(arrays: Any) -> Any:
        return tuple(arrays[name] for name in NAMES)

    return JaxProgram(make(w), pack, lambda grads: dict(zip(NAMES, grads, strict=True)), which)


def _no_cudnn(w: Workload, which: str) -> str | None:
    """Returns why `jax.nn` cannot use cuDNN for a workload, or None."""
    if platform() != "gpu":
        return "cuDNN is for NVIDIA GPUs"
    return "cuDNN takes 16 bits" if w.dtype == "float32" else _refuses_extra(w, which)


def _jax_nn(function: Callable, w: Workload) -> Call:
    mask_kwargs: dict[str, Any] = {"is_causal": w.mask != "full"}
    if w.window is not None:
        mask_kwargs["local_window_size"] = (w.window - 1, 0)
    return lambda inputs: function(*inputs, **mask_kwargs)


def _nnx(w: Workload) -> Call:
    def call(inputs: Any) -> Any:
        mask_kwargs: dict[str, Any] = {"is_causal": w.mask == "causal"}
        if w.window is not None:
            mask_kwargs = {"mask": _boolean_mask(w)[None, None]}
        return nnx.dot_product_attention(*inputs, deterministic=True, **mask_kwargs)

    return call


def _equinox(w: Workload) -> Call:
    one = import_module("equinox.nn._attention").dot_product_attention

    def call(inputs: Any) -> Any:
        mask = None if w.mask == "full" else _boolean_mask(w)
        heads = jax.vmap(partial(one, mask=mask), in_axes=1, out_axes=1)
        return jax.vmap(heads)(*inputs)

    return call


def _boolean_mask(w: Workload) -> jax.Array:
    """The mask as T S booleans, built inside the program as users of such masks build it."""
    t = jnp.arange(w.length)
    return w.rule(0, 0, t[:, None], t[None, :])


def dense(w: Workload) -> np.ndarray:
    """The mask as a numpy array of T S booleans."""
    mask = w.rule.static(Sizes((), 1, w.length, w.length))
    assert mask is not None
    return mask


def _torch(make: Callable[[Workload], Callable], w: Workload, which: str) -> Program:
    """Inputs are stored as B T N H, as projections output them, and passed as B N T H views."""
    call = make(w)

    def run(inputs: Sequence[Any]) -> Any:
        return call(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)

    def pack(tensors: Any) -> Any:
        return [tensors[name] for name in NAMES]

    def unpack(grads: Any) -> Any:
        return dict(zip(NAMES, grads, strict=True))

    return TorchProgram(run, pack, lambda inputs: inputs, unpack, which)


def _sdpa(w: Workload) -> Callable:
    kernel = import_module("torch").nn.functional.scaled_dot_product_attention
    if w.window is None:
        return partial(kernel, is_causal=w.mask == "causal")
    return partial(kernel, attn_mask=_torch_mask(w))


def _eager(w: Workload) -> Callable:
    hidden = None if w.mask == "full" else ~_torch_mask(w)

    def plain(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.transpose(-2, -1) * w.width**-0.5  # B N T S
        if hidden is not None:
            scores = scores.masked_fill(hidden, -float("inf"))
        return scores.softmax(-1) @ v  # B N T H

    return plain


def _compiled(w: Workload) -> Callable:
    return import_module("torch").compile(_eager(w))


def _torch_mask(w: Workload) -> Any:
    return import_module("torch").from_numpy(dense(w).copy()).to(device())


def _tokamax(w: Workload) -> Call:
    flags = import_module("absl.flags").FLAGS
    if not flags.is_parsed():
        flags.mark_as_parsed()  # else tokamax parses this command's options
    more = {"logits_soft_cap": 50.0} if w.extra == "softcap" else {}
    return _jax_nn(partial(import_module("tokamax").dot_product_attention, **more), w)


def _refuses_extra(w: Workload, which: str) -> str | None:
    return None if w.extra == "plain" else f"it has no {w.extra}"


def _no_program(w: Workload, which: str) -> Program:
    raise NotImplementedError(LAYER)


def others() -> list[Competitor]:
    """Returns the attention functions of other libraries."""
    jax_nn = partial(_jax_nn, jax.nn.dot_product_attention)
    by_cudnn = partial(_jax_nn, partial(jax.nn.dot_product_attention, implementation="cudnn"))
    builds = {
        "jax.nn": partial(_jax, jax_nn),
        "jax.nn:cudnn": partial(_jax, by_cudnn),
        "flax.nnx": partial(_jax, _nnx),
        "equinox": partial(_jax, _equinox),
        "torch": partial(_torch, _sdpa),
        "torch.eager": partial(_torch, _eager),
        "torch.compile": partial(_torch, _compiled),
        "nn.MultiheadAttention": _no_program,
        "tokamax": partial(_jax, _tokamax),
    }
    quadratic_counts = {"torch.eager": (3, 5), "torch.compile": (3, 5)}
    refusals = {
        "jax.nn:cudnn": _no_cudnn,
        "nn.MultiheadAttention": lambda *_: LAYER,
        "tokamax": lambda w, which: "it has no sinks" if w.extra == "sinks" else None,
    }
    return [
        Competitor(
            name,
            name.partition(":")[0],
            build,
            refusals.get(name, _refuses_extra),
            quadratic=quadratic_counts.get(name, (0, 0)),
        )
        for name, build in builds.items()
    ]
