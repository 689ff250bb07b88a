"""Layers with tensor parallel weights on eight devices: a program, which prints what it found.

The projections to heads are cut along their output, the one behind the heads along its input, so
that each device holds a few heads and the last product is summed over devices.
"""

import json
import os
import re
from typing import Any

os.environ["XLA_FLAGS"] = (  # the last of a flag counts, that of whoever imports this one
    f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_attn import GroupedQueryAttention, Rotary
from flax_attn.layers._common import dot_general_sharded
from flax_attn.parity import judge
from parity_tests.core import layer_facts
from parity_tests.core.sharding.requests import COLLECTIVES

LAYERS = layer_facts.TENSOR_PARALLEL


def gradients(layer: nnx.Module, x: Any) -> Any:
    return nnx.grad(lambda layer, x: (layer(x) ** 2).sum(), argnums=(0, 1))(layer, x)


def placed(layer: nnx.Module, last: str, mesh: Any) -> nnx.Module:
    """The layer with its parameters cut along the heads."""
    graph, state = nnx.split(layer)
    return nnx.merge(graph, by_heads(state, last, mesh))


def by_heads(state: Any, last: str, mesh: Any, stacked: bool = False) -> Any:
    """Parameters cut along the heads, maybe of layers that are stacked."""

    def put(path: Any, x: Any) -> jax.Array:
        rank = x.ndim - stacked
        spec = (*[None] * (rank - 1), "model")
        if last in jax.tree_util.keystr(path):
            spec = ("model", None) if rank == 2 else ()
        return jax.device_put(x, NamedSharding(mesh, P(*[None] * stacked, *spec)))

    return jax.tree_util.tree_map_with_path(put, state)


def sent(f: Any, *arrays: Any) -> set[str]:
    """The collectives of a compiled program."""
    return {*re.findall(COLLECTIVES, f.lower(*arrays).compile().as_text() or "")}


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
    want, wanted = layer(x), gradients(layer, x)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    cut = placed(layer, last, mesh)
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        got, compiled = cut(x), nnx.jit(lambda layer, x: layer(x))(cut, x)
        found = nnx.jit(gradients)(cut, x)
    graph, state = nnx.split(cut)
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    back = jax.jit(lambda state, x: gradients(nnx.merge(graph, state), x))
    lies = [(*jax.typeof(y).sharding.spec,) == ("data", None, None) for y in (got, compiled)]
    return {
        "forward": alike((got, compiled), (want, want)),
        "gradients": alike(found, wanted),
        "one sum": sent(run, state, x) == sent(back, state, x) == {"all-reduce"},
        "batch axes stay, the width is whole": all(lies),
    }


def model(layers: int) -> tuple[Any, Any]:
    """The graph of a layer, and the parameters of so many, stacked."""
    made = [
        GroupedQueryAttention(
            **layer_facts.PARALLEL_SIZES,
            rotary=Rotary(),
            out_bias=True,
            rngs=nnx.Rngs(i),
            param_dtype=jnp.float64,
        )
        for i in range(layers)
    ]
    states = [nnx.split(layer)[1] for layer in made]
    return nnx.split(made[0])[0], jax.tree.map(lambda *x: jnp.stack(x), *states)


def loss_of(graph: Any) -> Any:
    """The loss of stacked layers, each of which is computed again in the backward pass."""

    def loss(states: Any, x: Any, labels: Any) -> Any:
        def one(x: Any, state: Any) -> tuple[Any, None]:
            return x + nnx.merge(graph, state)(x), None

        y, _ = jax.lax.scan(jax.checkpoint(one), x, states)
        return ((y - labels) ** 2).sum()

    return loss


def over_three_axes() -> dict[str, bool]:
    """Stacked layers, whose batch, length and heads are cut: loss and gradients."""
    graph, states = model(3)
    x, labels = np.random.RandomState(1).standard_normal((2, 4, 6, 24))
    step = jax.jit(jax.value_and_grad(loss_of(graph), argnums=(0, 1)))
    want = step(states, x, labels)
    mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "model"))
    with jax.set_mesh(mesh):
        cut = by_heads(states, "o_proj", mesh, stacked=True)
        arrays = [jax.device_put(y, P("data", "seq")) for y in (x, labels)]
        got, collectives = step(cut, *arrays), sent(step, cut, *arrays)
    kept = jax.tree.map(
        lambda a, b: a.sharding.is_equivalent_to(b.sharding, b.ndim), got[1][0], cut
    )
    return {
        "loss and gradients": alike(got, want),
        "gradients lie as weights": all(jax.tree.leaves(kept)),
        "sent": collectives == {"all-gather", "all-reduce", "reduce-scatter"},
    }


def step_of_adam() -> dict[str, bool]:
    """A step with weights and optimizer state on the devices that share the batch."""
    graph, states = model(2)
    x, labels = np.random.RandomState(2).standard_normal((2, 8, 6, 24))
    adam, loss = optax.adam(0.1), loss_of(graph)

    @jax.jit
    def step(states: Any, moments: Any, x: Any, labels: Any) -> Any:
        updates, moments = adam.update(jax.grad(loss)(states, x, labels), moments)
        return optax.apply_updates(states, updates), moments

    want = step(states, adam.init(states), x, labels)
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        put = {True: P(None, None, "data"), False: P()}  # matrices are cut, vectors whole
        cut = jax.tree.map(lambda w: jax.device_put(w, put[w.ndim == 3]), states)
        moments = jax.tree.map(lambda m: jax.device_put(m, put[m.ndim == 3]), adam.init(states))
        arrays = [jax.device_put(y, P("data")) for y in (x, labels)]
        got, collectives = step(cut, moments, *arrays), sent(step, cut, moments, *arrays)
    kept = jax.tree.map(
        lambda a, b: a.sharding.is_equivalent_to(b.sharding, b.ndim), got, (cut, moments)
    )
    return {
        "weights and moments": alike(got, want),
        "all lies as before": all(jax.tree.leaves(kept)),
        "sent": collectives == {"all-gather", "all-reduce"},
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
        y = dot_general_sharded(*cut, (((2,), (0,)), ((), ())))
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
    print(json.dumps({"layer": "stacked", **over_three_axes()}))
    print(json.dumps({"layer": "adam", **step_of_adam()}))
