"""Flax's attention modules run twice, by their own `attention_fn` and by ours, and compared."""

import contextlib
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from flax_attn import flax_attention
from flax_attn.parity import judge

WIDTH, HEADS = 12, 3


class Found(NamedTuple):
    """What one run gave: output, gradients of weights and inputs, and what was sown."""

    out: np.ndarray
    gradients: dict[str, np.ndarray]
    sown: tuple[np.ndarray, ...] = ()


def draw(seed: int, *shape: int) -> np.ndarray:
    """Normal numbers that float16 holds exactly, so that every dtype has one truth."""
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float16).astype(np.float64)


def as_flax_runs(x64: bool) -> contextlib.ExitStack:
    """Flax's own code promotes dtypes and ranks."""
    stack = contextlib.ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore", DeprecationWarning)  # of nnx's own sow outside of nnx.capture
    stack.enter_context(jax.enable_x64(x64))
    stack.enter_context(jax.numpy_dtype_promotion("standard"))
    stack.enter_context(jax.numpy_rank_promotion("allow"))
    return stack


def written_out(*args: Any, **kwargs: Any) -> jax.Array:
    """nnx's own function off its fast path, which takes a float64 softmax in float32."""
    drops = kwargs["dropout_rate"] > 0
    return nnx.dot_product_attention(*args, **kwargs if drops else {**kwargs, "dropout_rate": 0.5})


def drawn_like(params: Any) -> Any:
    """A tree of these shapes and dtypes, biases and norms drawn too, held exactly by float16."""
    leaves, tree = jax.tree.flatten(params)
    scaled = [draw(i, *x.shape) * len(x.shape) ** -2 for i, x in enumerate(leaves)]
    arrays = [
        jnp.asarray(d.astype(np.float16).astype(x.dtype))
        for d, x in zip(scaled, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


def differentiated(call: Any, params: Any, inputs: tuple, gradients: bool, whole: bool) -> Found:
    """Output, gradients by their paths, and what was sown, of `call(params, inputs)`.

    Eagerly: cases of the same shapes then share what is compiled, a fifth of the time of `jax.jit`.
    As a `whole` program where no other case has these shapes, which is quicker then.
    """

    def both_ways(params: Any, inputs: tuple) -> tuple:
        if not gradients:
            out, sown = call(params, inputs)
            return out, (), sown
        out, back, sown = jax.vjp(call, params, inputs, has_aux=True)
        return out, back(jnp.asarray(draw(99, *out.shape)).astype(out.dtype)), sown

    found = (jax.jit(both_ways) if whole else both_ways)(params, inputs)
    out, back, sown = jax.tree.map(np.asarray, found)
    paths = jax.tree_util.tree_leaves_with_path(back)
    named = {jax.tree_util.keystr(path): x for path, x in paths}
    return Found(out, named, tuple(jax.tree.leaves(sown)))


def by_nnx(
    fn: Any,
    config: dict,
    inputs: list,
    steps: int = 0,
    key: int | None = None,
    gradients: bool = True,
    whole: bool = False,
    **call: Any,
) -> Found:
    """`nnx.MultiHeadAttention`, token by token if `steps`, with a stream of `key` if given."""
    own = {} if fn is None else {"attention_fn": fn}
    layer = nnx.MultiHeadAttention(
        **{"num_heads": HEADS, "in_features": WIDTH, "decode": bool(steps), **config, **own},
        kernel_init=nnx.initializers.zeros,  # drawn below
        rngs=nnx.Rngs(params=0, dropout=7),
    )
    inputs = tuple(jnp.asarray(x, layer.dtype or layer.param_dtype) for x in inputs)
    if steps:
        layer.init_cache(inputs[0].shape, dtype=inputs[0].dtype)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def run(params, inputs):
        layer = nnx.merge(graph, params, rest, copy=True)
        if key is not None:
            call["rngs"] = nnx.Rngs(dropout=key)
        parts = [tuple(x[..., t : t + 1, :] for x in inputs) for t in range(steps)] or [inputs]
        out = jnp.concatenate([layer(*part, **call) for part in parts], axis=-2)
        return out, nnx.pop(layer, nnx.Intermediate)

    return differentiated(run, drawn_like(params), inputs, gradients, whole)


def by_linen(
    fn: Any,
    config: dict,
    inputs: list,
    steps: int = 0,
    key: int = 7,
    gradients: bool = True,
    whole: bool = False,
    kind: Any = linen.MultiHeadDotProductAttention,
    **call: Any,
) -> Found:
    """`linen.MultiHeadDotProductAttention`, its dropout by the key `key`."""
    own = {} if fn is None else {"attention_fn": fn}
    layer = kind(**{"num_heads": HEADS, "decode": bool(steps), **config, **own})
    inputs = tuple(jnp.asarray(x, layer.dtype or layer.param_dtype) for x in inputs)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    mode = {name: x for name, x in call.items() if name == "deterministic"}
    state = jax.eval_shape(lambda: layer.init(keys, *inputs, **mode))
    params = drawn_like(state.pop("params"))
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)

    def run(params, inputs):
        outs, sown, now = [], {}, state
        parts = [tuple(x[..., t : t + 1, :] for x in inputs) for t in range(steps)] or [inputs]
        for part in parts:
            out, after = layer.apply(
                {"params": params, **now},
                *part,
                **call,
                mutable=["cache", "intermediates"],
                rngs={"dropout": jax.random.key(key)},
            )
            now = {"cache": after["cache"]} if "cache" in after else {}
            sown = after.get("intermediates", {})
            outs.append(out)
        return jnp.concatenate(outs, axis=-2), sown

    return differentiated(run, params, inputs, gradients, whole)


def same(got: Found, want: Found) -> None:
    """One function, in float64: outputs, all gradients, and what was sown."""
    assert got.out.dtype == want.out.dtype and got.gradients.keys() == want.gradients.keys()
    verdicts = {"out": judge.same_function(got.out, want.out)}
    everything = [*want.gradients.values()]
    for name, x in want.gradients.items():
        scale = judge.gradient_scale(everything, x)
        verdicts[name] = judge.same_function(got.gradients[name], x, scale)
    assert len(got.sown) == len(want.sown)
    for i, x in enumerate(want.sown):
        assert got.sown[i].dtype == x.dtype
        verdicts[f"sown {i}"] = judge.same_function(got.sown[i], x)
    wrong = {name: verdict for name, verdict in verdicts.items() if not verdict.ok}
    assert not wrong, wrong


def both(by: Any, config: dict, inputs: list, **call) -> tuple[Found, Found]:
    """Ours and flax's own, in float64."""
    config, own = {"param_dtype": jnp.float64, **config}, written_out if by is by_nnx else None
    with as_flax_runs(x64=True):
        return by(flax_attention, config, inputs, **call), by(own, config, inputs, **call)
