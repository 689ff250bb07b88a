"""The source notebooks' layers, with the weights that torch draws under the printed seeds.

`python -m parity_tests.core.layers.notebook` draws them with torch and stores them.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flax import nnx

import flax_attn
from flax_attn.parity import port
from flax_attn.parity.port import flax_values, set_flax

DATA = Path(__file__).parents[2] / "data"
STORED = DATA / "notebook_weights.npz"
TABLES = json.loads((DATA / "notebook_tables.json").read_text("utf-8"))

# Name: seed, file of the twin, class, constructor arguments, layers that are built before it.
LAYERS: dict[str, tuple[int, str, str, tuple, tuple[str, ...]]] = {
    "v1": (123, "self_attention_v1", "SelfAttentionV1", (3, 2), ()),
    "v2": (789, "self_attention_v2", "SelfAttentionV2", (3, 2), ()),
    "exercise_v2": (789, "self_attention_v2", "SelfAttentionV2", (3, 2), ("v1",)),
    "causal": (123, "causal_attention", "CausalAttention", (3, 2, 6, 0.0), ()),
    "wrapper": (123, "multi_head_wrapper", "MultiHeadAttentionWrapper", (3, 2, 6, 0.0, 2), ()),
    "multi_head": (123, "multi_head", "MultiHeadAttention", (3, 2, 6, 0.0, 2), ()),
}


def table(group: str, name: str) -> np.ndarray:
    """One printed table; "-inf" as -inf."""
    return np.asarray(TABLES[group][name]["values"], dtype=object).astype(float)


def inputs() -> np.ndarray:
    """The six words, 6 x 3."""
    return np.asarray(TABLES["inputs"]["values"], np.float32)


def layer(name: str) -> nnx.Module:
    """A Flax layer of the notebooks with the stored weights."""
    made = _empty(name)
    with np.load(STORED) as stored:
        dot = f"{name}/"
        set_flax(made, {k.removeprefix(dot): stored[k] for k in stored if k.startswith(dot)})
    return made


def head() -> tuple[nnx.Module, np.ndarray]:
    """The single unscaled head, and its random inputs, 4 x 8 x 32."""
    with np.load(STORED) as stored:
        return layer("head"), stored["head_inputs"]


def draw() -> dict[str, np.ndarray]:
    """Everything stored, drawn by torch and carried by `port`."""
    found: dict[str, np.ndarray] = {}
    for name in (*LAYERS, "head"):
        twin, extra = _twin(name)
        made = port(twin, _empty(name))
        found |= extra | {f"{name}/{path}": value for path, value in flax_values(made).items()}
    return found


def _empty(name: str) -> nnx.Module:
    rngs = nnx.Rngs(0)
    if name == "head":
        return flax_attn.SingleHeadAttention(32, 16, value=False, rngs=rngs)
    _, _, cls, arguments, _ = LAYERS[name]
    return getattr(flax_attn, cls)(*arguments, rngs=rngs)


def _twin(name: str) -> tuple[object, dict[str, np.ndarray]]:
    from importlib import import_module

    import torch

    def made(file: str, cls: str) -> Callable:
        return getattr(import_module(f"torch_ref.{file}"), cls)

    if name == "head":
        torch.manual_seed(1337)
        x = torch.randn(4, 8, 32).numpy()
        return made("single_head", "SingleHeadAttention")(32, 16, value=False), {"head_inputs": x}
    seed, file, cls, arguments, before = LAYERS[name]
    torch.manual_seed(seed)
    for other in before:
        _, other_file, other_cls, other_arguments, _ = LAYERS[other]
        made(other_file, other_cls)(*other_arguments)
    return made(file, cls)(*arguments), {}


if __name__ == "__main__":
    np.savez_compressed(STORED, **draw())
    print(f"stored {STORED.name}")
