"""Which kernel serves the attention of a model type beside a cache, and why none does.

`python -m parity_tests.core.pages.decoding_kernels --write` renews its table in docs/kernels.md, in
some minutes. Layers of every model type, with the sizes that its class has, are traced in bfloat16
for machines that are assumed; nothing is computed.
"""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

from flax_attn import assume_platform, explain
from flax_attn._internal.markdown import table, text_between
from flax_attn.backends import tokamax
from flax_attn.backends.choice import KERNELS
from flax_attn.cache import Cache, by_slot
from flax_attn.families import TYPES, attention, parts
from flax_attn.reference import Stats

from .kernels import DEVICES, PAGE, tokamax_is_there
from .pages import write_or_print

MARKS = text_between("<!-- decoding -->", "<!-- end of decoding -->")
STORED, CHUNK, LAYERS = 8192, 1024, 8
PLACES = tuple(name for name in DEVICES if name != "CPU")


def layers(model_type: str) -> Iterator[tuple[str, nnx.Module]]:
    """The different layers of a model type that keep keys and values, without their numbers."""
    seen = set()
    for part in parts({"model_type": model_type}) or (None,):
        for index in range(LAYERS):

            def build(part=part, index=index):
                kind = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
                config, rngs = {"model_type": model_type}, nnx.Rngs(0)
                layer = attention(config, index, part=part, rngs=rngs, **kind)
                layer.eval()
                return layer

            try:
                layer = nnx.eval_shape(build)
                cache = jax.eval_shape(lambda layer=layer: layer.init_cache(1, STORED))
            except (ValueError, AttributeError):  # no such layer, or one without a cache
                continue
            if not isinstance(cache, Cache) or layer.mask.shows_later or part == "cross":
                continue
            if getattr(layer, "relative_attention_bias", layer) is None:  # it takes the first's
                continue
            key = str(nnx.split(layer))
            if key not in seen:
                seen.add(key)
                yield (model_type if part is None else f"{model_type}, {part}"), layer


def served(layer: Any, device: str, tokens: int) -> list[tuple[str | None, str]]:
    """By what is asked while a call is traced: the kernel, and why there is none."""
    found: list[tuple[str | None, str]] = []

    def recorded(request: Any, backend: str, ask: Any = by_slot.kernel_for) -> str | None:
        name, rules = ask(request, backend), request.rules
        shown = {"mask": rules.mask, "score": rules.score, "sinks": rules.sinks}
        said = explain(request.q, request.k, request.v, **shown, scale=rules.scale)
        kernels = KERNELS[DEVICES[device][0]]
        reasons = [f"`{v.backend}` {v.refusal}" for v in said if v.backend in kernels]
        reasons = [text for text in reasons if "compute capability" not in text]
        found.append((name, "" if name else "; ".join(reasons)))
        return name

    graph, state = nnx.split(layer)
    last = next(name for name in ("o_proj", "out_proj", "o", "dense") if hasattr(layer, name))
    x = jax.ShapeDtypeStruct((1, tokens, getattr(layer, last).out_features), jnp.bfloat16)
    cache = jax.eval_shape(lambda: layer.init_cache(1, STORED))
    with (
        assume_platform(*DEVICES[device]),
        tokamax_is_there(),
        mock.patch.object(by_slot, "kernel_for", recorded),
        mock.patch.object(tokamax.Tokamax, "run", _played),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        jax.eval_shape(lambda s, x, c: nnx.merge(graph, s)(x, cache=c), state, x, cache)
    return found


def _played(self: Any, q: jax.Array, k: jax.Array, v: jax.Array, extras: Any) -> Any:
    """Shapes of what tokamax returns, which need not be installed."""
    lse = jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    return jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), Stats(lse, lse)


def row(layer: Any) -> tuple[str, ...]:
    """A layer's cells: by device the kernels of a step, a prompt and a chunk; and why not."""
    cells, reasons = [], {}
    for device in PLACES:
        step, *_ = served(layer, device, 1) or [(None, _unasked(layer))]
        asked = served(layer, device, CHUNK) or [step]
        chunk, prompt = asked[0] if len(asked) > 1 else (None, ""), asked[-1]
        names = [f"`{name}`" if name else "no" for name, _ in (step, prompt, chunk)]
        cells.append(", ".join(names))
        reason = step[1] or prompt[1]
        reasons |= {reason: device} if reason and reason not in reasons else {}
    return *cells, "; ".join(f"{device}: {text}" for text, device in reasons.items())


def _unasked(layer: Any) -> str:
    """Why no kernel is asked for a step."""
    score = type(getattr(getattr(layer, "rules", None), "score", None)).__name__
    if score == "Identity":
        return "the keys of each query are chosen by slot"
    return f"{'its bias' if score == 'NoneType' else score} reads positions"


def page(types: Iterable[str] = TYPES) -> str:
    """The table, one row for all layers of which the same is so."""
    rows: dict[tuple[str, ...], dict[str, None]] = {}
    for name in types:
        for label, layer in layers(name):
            rows.setdefault(row(layer), {})[label] = None
    lines = [(", ".join(labels), *cells) for cells, labels in rows.items()]
    return f"\n{table(('model types', *PLACES, 'why not'), lines)}\n"


if __name__ == "__main__":
    write_or_print(PAGE, MARKS, page())
