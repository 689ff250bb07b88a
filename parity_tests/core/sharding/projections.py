"""Layers with tensor parallel weights on eight devices: a program, which prints what it found.

The projections to heads are cut along their output, the one behind the heads along its input, so
that each device holds a few heads and the last product is summed over devices.
"""

import json
import os
from typing import Any

os.environ["XLA_FLAGS"] = (  # the last of a flag counts, that of whoever imports this one
    f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
)

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_attn import CrossAttention, GatedQueryAttention, GroupedQueryAttention, Rotary
from flax_attn.layers._common import contracted
from flax_attn.parity import judge

GROUPED = {"in_features": 24, "num_heads": 8, "num_kv_heads": 4, "head_dim": 6}
BIASES = {"rotary": Rotary(), "qkv_bias": True, "out_bias": True}
LAYERS = {  # the layer, its arguments, and the name of the projection behind the heads
    "grouped": (GroupedQueryAttention, {**GROUPED, **BIASES, "sinks": True}, "o_proj"),
    "gated": (GatedQueryAttention, {**GROUPED, "rotary": Rotary()}, "o_proj"),
    "cross": (CrossAttention, {"in_features": 24, "num_heads": 4}, "out_proj"),
}


def gradients(layer: nnx.Module, x: Any) -> Any:
    return nnx.grad(lambda layer, x: (layer(x) ** 2).sum(), argnums=(0, 1))(layer, x)


def placed(layer: nnx.Module, last: str, mesh: Any) -> nnx.Module:
    """The layer with its parameters cut along the heads."""
    graph, state = nnx.split(layer)

    def put(path: Any, x: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        spec = P(*[None] * (x.ndim - 1), "model")
        if last in name:
            spec = P("model", None) if x.ndim == 2 else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(put, state))


def alike(got: Any, want: Any) -> bool:
    got, want = ([np.asarray(x) for x in jax.tree.leaves(side)] for side in (got, want))
    return all(
        judge.same_function(a, b, judge.gradient_scale(want, b), zero=True).ok
        for a, b in zip(got, want, strict=True)
    )


def run(name: str) -> dict[str, bool]:
    """What a layer gives over two devices' batches and four devices' heads, beside one device."""
    kind, arguments, last = LAYERS[name]
    layer = kind(**arguments, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    x = np.random.RandomState(0).standard_normal((4, 5, 24))
    want, back = layer(x), gradients(layer, x)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    cut = placed(layer, last, mesh)
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        got, compiled = cut(x), nnx.jit(lambda layer, x: layer(x))(cut, x)
        found = nnx.jit(gradients)(cut, x)
    lies = [(*jax.typeof(y).sharding.spec,) == ("data", None, None) for y in (got, compiled)]
    return {
        "forward": alike((got, compiled), (want, want)),
        "gradients": alike(found, back),
        "batch axes stay, the width is whole": all(lies),
    }


def outputs_lie() -> dict[str, bool]:
    """How a sum lies, by the specs of tokens and weights: no mesh axis is taken twice."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "model"))
    wanted = {
        "fsdp twice": (P(("data", "fsdp"), None, "model"), P("model", "fsdp"), None),
        "fsdp once": (P("data", None, "model"), P("model", "fsdp"), "fsdp"),
        "two axes summed": (P("data", None, ("fsdp", "model")), P(("fsdp", "model"), None), None),
    }
    draw, lie = np.random.RandomState(0).standard_normal, {}
    for name, (of_x, of_kernel, width) in wanted.items():
        x, kernel = draw((4, 5, 8)), draw((8, 6))
        arrays = ((x, of_x), (kernel, of_kernel))
        cut = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in arrays]
        y = contracted(*cut, (((2,), (0,)), ((), ())))
        lie[name] = alike(y, x @ kernel) and (*jax.typeof(y).sharding.spec,) == (
            of_x[0],
            None,
            width,
        )
    return lie


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for layer in LAYERS:
        print(json.dumps({"layer": layer, **run(layer)}))
    print(json.dumps({"layer": "outputs", **outputs_lie()}))
