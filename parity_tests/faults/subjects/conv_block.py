"""A convolutional block: torch's images are channels first, Flax's channels last."""

from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from flax_attn.taps import tap

from ...port import Port, always


class Theirs(torch.nn.Module):
    """Grouped convolution, norm over the batch, GELU, and a convolution that enlarges."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(6, 8, (3, 2), stride=(1, 2), padding=(1, 0), groups=2)
        self.norm = torch.nn.BatchNorm2d(8)
        self.act = torch.nn.GELU()
        self.up = torch.nn.ConvTranspose2d(8, 5, (4, 3), stride=(2, 1), padding=(1, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.act(self.norm(self.conv(x))))  # B C H W


class BatchNorm(nnx.BatchNorm):
    """Keeps the variance that torch keeps, over n - 1; `nnx.BatchNorm` keeps the one over n."""

    def __call__(self, x: jax.Array, **options: Any) -> jax.Array:
        before, n = self.var.get_value(), x.size // x.shape[-1]
        out = super().__call__(x, **options)
        if not self.use_running_average:
            old = self.momentum * before
            self.var.set_value(old + (self.var.get_value() - old) * (n / (n - 1)))
        return out


class Block(nnx.Module):
    """The same block; what is nested in torch's names is a tap here."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(
            6,
            8,
            (3, 2),
            strides=(1, 2),
            padding=((1, 1), (0, 0)),
            feature_group_count=2,
            rngs=rngs,
        )
        self.norm = BatchNorm(8, momentum=0.9, use_fast_variance=False, rngs=rngs)
        # Torch's padding p takes p rows away from what is here k - 1 - p.
        self.up = nnx.ConvTranspose(
            8,
            5,
            (4, 3),
            strides=(2, 1),
            padding=((2, 2), (2, 2)),
            transpose_kernel=True,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.gelu(self.norm(self.conv(x)), approximate=False)
        return self.up(tap("act", y))  # B H W C


def torch_call(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Channels last in, channels last out, whatever is between."""
    return module(x.movedim(-1, 1)).movedim(1, -1)


# Four images of 5 x 7 with 6 channels.
IMAGES = np.random.RandomState(0).standard_normal((4, 5, 7, 6))
PORTS = [
    Port("convolutional block", Theirs, Block, always(IMAGES), (), {"torch_call": torch_call}),
    Port(
        "convolutional block in training",
        Theirs,
        Block,
        always(IMAGES),
        (),
        {"torch_call": torch_call, "train": True},
    ),
]
