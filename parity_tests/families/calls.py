"""Attentions that take other inputs than tokens, each as the layer of its whole model calls it."""

from importlib import import_module
from typing import Any

import numpy as np

from .place import Called


def drawn(name: str, *shape: int) -> np.ndarray:
    """Numbers of a shape, others for another name."""
    return np.random.RandomState(sum(name.encode())).standard_normal(shape)


def with_distances(config: Any, index: int) -> dict[str, np.ndarray]:
    """Tokens, and the embeddings of their distances."""
    furthest = config.max_relative_positions
    furthest = config.max_position_embeddings if furthest < 1 else furthest
    buckets = getattr(config, "position_buckets", -1)
    rows = 2 * (buckets if buckets > 0 else furthest)
    width = config.hidden_size
    return {"x": drawn("x", 2, 7, width), "rel_embeddings": drawn("rows", rows, width)}


def deberta(attention: Any, config: Any, index: int, x: Any, rel_embeddings: Any) -> Any:
    """DeBERTa-v2's, all of whose tokens are there."""
    import torch

    there = torch.ones(1, 1, 1, x.shape[1], dtype=torch.bool)
    return attention(x, there, rel_embeddings=rel_embeddings)[0]


def patches(config: Any, index: int) -> dict[str, np.ndarray]:
    """Patches of one image, with their rows and columns."""
    width = getattr(config, "embed_dim", config.hidden_size)
    return {
        "x": drawn("x", 7, width),
        "positions": np.asarray([[0, 0, 0, 1, 1, 2, 4], [*range(7)]]),
    }


def angles(attention: Any, config: Any, x: Any, positions: Any) -> Any:
    """Cosines and sines, as the class beside the attention makes them."""
    module = import_module(type(attention).__module__)
    name = next(x for x in vars(module) if x.endswith("VisionRotaryEmbedding"))
    return getattr(module, name)(config)(x, positions.T)


def tower(attention: Any, config: Any, index: int, x: Any, positions: Any) -> Any:
    """Qwen's and GLM's, which are told where an image ends."""
    import torch

    ends = torch.tensor([0, len(x)], dtype=torch.int32)
    turned = angles(attention, config, x, positions)
    return attention(x, cu_seqlens=ends, position_embeddings=turned)


def pixtral(attention: Any, config: Any, index: int, x: Any, positions: Any) -> Any:
    """Pixtral's."""
    turned = angles(attention, config, x, positions)
    return attention(x[None], position_embeddings=turned)[0][0]


def grid(config: Any, index: int) -> dict[str, np.ndarray]:
    """All patches of an image and its class token, with their columns and rows from 1."""
    side = config.image_size // config.patch_size
    rows, columns = np.divmod(np.arange(side**2), side) + np.asarray([[1], [1]])
    places = np.pad(np.stack([columns, rows]), ((0, 0), (0, 1)))
    return {"x": drawn("x", side**2 + 1, config.hidden_size), "positions": places}


def llama4(attention: Any, config: Any, index: int, x: Any, positions: Any) -> Any:
    """Llama 4's."""
    module = import_module(type(attention).__module__)
    turned = module.Llama4VisionRotaryEmbedding(config)(x)
    return attention(x[None], turned)[0][0]


TOWER = Called(patches, tower)
PIXTRAL = Called(patches, pixtral)
LLAMA4 = Called(grid, llama4)
DEBERTA = Called(with_distances, deberta)
