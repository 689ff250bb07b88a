"""Attentions over images, each as the layer of its whole model calls it."""

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
