"""Attentions that take other inputs than tokens, each as the layer of its whole model calls it."""

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


DEBERTA = Called(with_distances, deberta)
