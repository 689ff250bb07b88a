"""Attentions over images, each as the layer of its whole model calls it."""

from importlib import import_module
from typing import Any

import numpy as np

from .calls import drawn
from .place import Called

SIDES = 7, 9  # of an image that need not fit the config


def whereabouts(config: Any, index: int) -> tuple[int, int]:
    """The stage of a block and its place in there."""
    ends = np.cumsum(config.depths)
    stage = int(np.searchsorted(ends, index, side="right"))
    return stage, index - int(ends[stage]) + config.depths[stage]


def of_stage(config: Any, index: int) -> dict[str, np.ndarray]:
    """Two images of the width of a block's stage."""
    width = config.hidden_sizes[whereabouts(config, index)[0]]
    return {"x": drawn("x", 2, *SIDES, width)}


def segformer(attention: Any, config: Any, index: int, x: Any) -> Any:
    """SegFormer's, which takes an image row by row."""
    return attention(x.flatten(1, 2), *x.shape[1:3])[0].reshape(x.shape)


def with_class(config: Any, index: int) -> dict[str, np.ndarray]:
    """The same; of the last stage all tokens and the class token, as one row."""
    stage = whereabouts(config, index)[0]
    if stage < config.num_encoder_blocks - 1:
        return of_stage(config, index)
    return {"x": drawn("x", 2, 1, SIDES[0] * SIDES[1] + 1, config.hidden_sizes[stage])}


def pvt(attention: Any, config: Any, index: int, x: Any) -> Any:
    """PVT's, which is told the sides without the class token."""
    return attention(x.flatten(1, 2), *SIDES)[0].reshape(x.shape)


def segformer_path(config: Any, index: int) -> str:
    """Where SegFormer has a block."""
    return "stages.{}.blocks.{}.attention".format(*whereabouts(config, index))


def pvt_path(config: Any, index: int) -> str:
    """Where PVT has a block."""
    return "encoder.block.{}.{}.attention".format(*whereabouts(config, index))


SEGFORMER = Called(of_stage, segformer)
PVT = Called(with_class, pvt)


def sam_sides(config: Any, index: int) -> dict[str, np.ndarray]:
    """Windows, or images that are wider than the tables are made for."""
    window = config.window_size if index not in config.global_attn_indexes else 0
    patches = config.image_size // config.patch_size
    sides = (window, window) if window else (patches, patches + 1)
    return {"x": drawn("x", 2, *sides, config.hidden_size)}


def sam(attention: Any, config: Any, index: int, x: Any) -> Any:
    """SAM's."""
    return attention(x)[0]


def swin_path(config: Any, index: int) -> str:
    """Where Swin has a block's attention."""
    return "encoder.layers.{}.blocks.{}.attention".format(*whereabouts(config, index))


def swin_image(config: Any, index: int) -> dict[str, np.ndarray]:
    """Images of the size that a block is given of one of the config's size."""
    stage = whereabouts(config, index)[0]
    whole, patch = (np.broadcast_to(x, 2) for x in (config.image_size, config.patch_size))
    sides = -(-whole // patch)  # what is too few for a patch is padded
    for _ in range(stage):
        sides = (sides + 1) // 2
    return {"x": drawn("x", 2, *map(int, sides), config.embed_dim * 2**stage)}


def swin(attention: Any, config: Any, index: int, x: Any, after: str = "drop_path") -> Any:
    """Swin's block as far as the module after the attention, and without the norm before it."""
    import torch

    model = import_module("transformers").AutoModel.from_config(config).eval().to(x.dtype)
    block = model.get_submodule(swin_path(config, index).removesuffix(".attention"))
    block.layernorm_before, block.attention = torch.nn.Identity(), attention
    kept: list[Any] = []
    block.get_submodule(after).register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    block(x.flatten(1, 2), x.shape[1:3])
    return kept[0].reshape(x.shape)


def swin2(attention: Any, config: Any, index: int, x: Any) -> Any:
    """Swin v2's, with the distances in the type of x: the class has them in float32."""
    import torch

    inner = attention.self
    trained = inner.pretrained_window_size
    sides = trained if trained[0] > 0 else inner.window_size
    steps = [
        8 * torch.arange(1 - window, window, dtype=x.dtype) / max(side - 1, 1)
        for window, side in zip(inner.window_size, sides, strict=True)
    ]
    logs = [step.sign() * torch.log2(step.abs() + 1) / 3 for step in steps]
    inner.relative_coords_table = torch.stack(torch.meshgrid(*logs, indexing="ij"), dim=-1)[None]
    return swin(attention, config, index, x, "layernorm_before")


SAM = Called(sam_sides, sam)
SWIN = Called(swin_image, swin)
SWIN2 = Called(swin_image, swin2)


def centres(config: Any, index: int) -> dict[str, np.ndarray]:
    """The patches of an image with the places of their centres, after its other tokens."""
    rows, columns = (2 * (np.arange(side) + 0.5) / side - 1 for side in DINO_SIDES)
    places = np.stack([x.ravel() for x in np.meshgrid(rows, columns, indexing="ij")])
    before = 1 + config.num_register_tokens
    places = 2 * np.pi * np.pad(places, ((0, 0), (before, 0)))
    return {"x": drawn("x", places.shape[1], config.hidden_size), "positions": places}


def dino(attention: Any, config: Any, index: int, x: Any, positions: Any) -> Any:
    """DINOv3's, which finds the places by the sides of the image."""
    import torch

    sides = (side * config.patch_size for side in DINO_SIDES)
    module = import_module(type(attention).__module__)
    turned = module.DINOv3ViTRopePositionEmbedding(config).eval()(torch.zeros(1, 3, *sides))
    return attention(x[None], position_embeddings=turned)[0][0]


def placed(layer: Any, x: Any, positions: Any) -> Any:
    """Ours, without gradients of the places, which the class makes by itself."""
    import jax

    return layer(x, positions=jax.lax.stop_gradient(positions))


DINO_SIDES = 3, 5
DINO = Called(centres, dino, placed)
