"""Whole models over data and model axes on four devices: a program, which prints what it found.

Weights are cut along both axes, the tables of words and the heads too: outputs, gradients, steps by
a cache and generated text are those of one device.
"""

import json
import os
import sys
from typing import Any

os.environ["XLA_FLAGS"] = (  # the last of a flag counts, that of whoever imports this one
    f"--xla_force_host_platform_device_count=4 {os.environ.get('XLA_FLAGS', '')}"
)

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import NamedSharding, P

from flax_attn import Lengths, families
from flax_attn.sharding import context_parallel, place, unplace
from parity_tests.core.families.folders import drawn
from parity_tests.core.sharding.projections import alike

SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "vocab_size": 12}
GROUPS = {**SIZES, "num_key_value_heads": 2, "num_hidden_layers": 2}
IMAGES = {**SIZES, "num_hidden_layers": 2, "image_size": 12, "patch_size": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**GROUPS, "tie_word_embeddings": False},
    "gemma3_text": {**GROUPS, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 3},
    "cohere": GROUPS,
    "gpt2": {"n_embd": 24, "n_head": 4, "n_layer": 2, "vocab_size": 12, "n_positions": 16},
    "bert": {**SIZES, "num_hidden_layers": 2},
    "clip_text_model": {**SIZES, "num_hidden_layers": 2, "eos_token_id": 3},
    "siglip_vision_model": IMAGES,
    "vit": IMAGES,
}
MODELS["gemma3_text"]["layer_types"] = ["sliding_attention", "full_attention"] * 2
KINDS = ("Auto", "Explicit")


def spec(path: Any, x: Any) -> P:
    """How an array is cut: matrices along both axes, the others not at all."""
    name = jax.tree_util.keystr(path)
    stacked = "'stack'" in name
    if x.ndim - stacked != 2 or any(n % 2 for n in x.shape[stacked:]):
        return P()
    first = any(word in name for word in ("o_proj", "down_proj", "embedding'"))
    return P(*[None] * stacked, *(("model", "data") if first else ("data", "model")))


def inputs(config: dict[str, Any]) -> Any:
    random = np.random.RandomState(0)
    images = random.standard_normal((4, 12, 12, 3))
    return images if "image_size" in config else random.randint(0, 12, (4, 6))


def rows(name: str, scan: bool, kinds: tuple[str, ...]) -> Any:
    """What one model gives over the mesh, beside one device."""
    config = {"model_type": name, **MODELS[name]}
    model = drawn(config, dtype=np.float64, scan=scan)
    graph, weights, rest = nnx.split(model, nnx.Param, ...)
    x = inputs(config)

    def values(weights: Any, x: Any) -> Any:
        out = nnx.merge(graph, weights, rest)(x)
        return [y for y in out if y is not None] if isinstance(out, tuple) else [out]

    def loss(weights: Any, x: Any) -> Any:
        out = values(weights, x)
        return sum((y * y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum() for y in out), out

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    want, words = step(weights, x), text(graph, weights, rest, x)
    for kind in kinds:
        axes = (getattr(jax.sharding.AxisType, kind),) * 2
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axes)

        def put(path: Any, x: Any, mesh: Any = mesh) -> jax.Array:
            return jax.device_put(x, NamedSharding(mesh, spec(path, x)))

        with jax.set_mesh(mesh):
            cut = jax.tree_util.tree_map_with_path(put, weights)
            tokens = jax.device_put(x, NamedSharding(mesh, P("data")))
            got, written = step(cut, tokens), text(graph, cut, rest, tokens)
        yield {
            "name": f"{name}, {'scan, ' * scan}{kind}",
            "outputs": alike(got[0][1], want[0][1]),
            "gradients": alike(got[1], want[1]),
            "text": all(map(np.array_equal, written, words)),
            "rows stay": kind == "Auto" or jax.typeof(got[0][1][0]).sharding.spec[0] == "data",
        }


def text(graph: Any, weights: Any, rest: Any, x: Any) -> list[np.ndarray]:
    """What a decoder writes."""
    model = nnx.merge(graph, weights, rest)
    if not isinstance(model, families.Decoder):
        return []
    return [np.asarray(families.generate(model, x, 5))]


def over_length(name: str) -> dict[str, Any]:
    """Whether padded rows are the same where their length is cut in another order."""
    model, x = drawn({"model_type": name, **MODELS[name]}, dtype=np.float64), inputs(MODELS[name])
    graph, state = nnx.split(model)
    x, counts, equal = np.repeat(x, 2, axis=1)[:2, :8], jnp.asarray([3, 5]), True
    for valid in (Lengths(counts), ~Lengths(8 - counts)):  # padding behind, and before
        want = np.asarray(jax.tree.leaves(model(jnp.asarray(x), valid=valid))[0])
        mesh = jax.make_mesh((2, 2), ("data", "seq"))
        with context_parallel("ring", layout="zigzag"), jax.set_mesh(mesh):
            tokens = jax.device_put(place(x, 2, "zigzag", axis=1), P("data", "seq"))
            got = nnx.merge(graph, jax.device_put(state, P()))(tokens, valid=valid)
        got = unplace(jax.device_get(jax.tree.leaves(got)[0]), 2, "zigzag", axis=1)
        real = np.asarray(valid.real_tokens((2, 8)))
        equal &= alike(got[real], want[real])
    return {"name": f"{name}, zigzag", "outputs": equal}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    every = [(name, scan, KINDS) for name in MODELS for scan in (False, True)]
    few = [("llama", False, KINDS[:1]), ("gemma3_text", True, KINDS[1:])]
    for case in every if "--more" in sys.argv else few:
        for row in rows(*case):
            print(json.dumps(row), flush=True)
    for name in ("gpt2", "bert", "llama") if "--more" in sys.argv else ("gpt2",):
        print(json.dumps(over_length(name)), flush=True)
