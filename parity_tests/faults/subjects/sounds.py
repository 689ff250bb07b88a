"""Blocks of sound models: Wav2Vec2's positions by a convolution, DAC's decoder."""

import jax
import jax.numpy as jnp
from flax import nnx

from flax_attn.parity import Rule

from ...port import Port
from .draws import channels_last, drawn


def wav2vec2():
    from transformers import Wav2Vec2Config
    from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2PositionalConvEmbedding

    sizes = {"num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 4}
    return Wav2Vec2PositionalConvEmbedding(Wav2Vec2Config(hidden_size=8, **sizes))


class NormedConv(nnx.Module):
    """A convolution whose kernel is `g v / |v|`, with one norm for each place in the kernel."""

    def __init__(self, *, rngs):
        self.g = nnx.Param(jnp.ones((6, 1, 1)))
        self.v = nnx.Param(jnp.ones((6, 2, 8)))
        self.bias = nnx.Param(jnp.zeros(8))

    def __call__(self, x):  # B T D
        v = self.v[...]
        kernel = self.g[...] * v / jnp.linalg.norm(v, axis=(1, 2), keepdims=True)
        layout = ("NWC", "WIO", "NWC")
        y = jax.lax.conv_general_dilated(
            x, kernel, (1,), ((3, 2),), dimension_numbers=layout, feature_group_count=4
        )
        return y + self.bias[...]


class Positions(nnx.Module):
    def __init__(self, *, rngs):
        self.conv = NormedConv(rngs=rngs)

    def __call__(self, x):
        return nnx.gelu(self.conv(x), approximate=False)


def dac():
    from transformers import DacConfig
    from transformers.models.dac.modeling_dac import DacDecoderBlock

    return DacDecoderBlock(DacConfig(decoder_hidden_size=24), stride=2, stride_index=1)


class Snake(nnx.Module):
    """x + sin(a x)^2 / a."""

    def __init__(self, width, *, rngs):
        self.alpha = nnx.Param(jnp.ones(width))

    def __call__(self, x):
        alpha = self.alpha[...]
        return x + jnp.sin(alpha * x) ** 2 / (alpha + 1e-9)


class Unit(nnx.Module):
    """A residual unit with a dilated convolution."""

    def __init__(self, width, dilation, *, rngs):
        self.snake1 = Snake(width, rngs=rngs)
        self.conv1 = nnx.Conv(width, width, (7,), kernel_dilation=dilation, rngs=rngs)
        self.snake2 = Snake(width, rngs=rngs)
        self.conv2 = nnx.Conv(width, width, (1,), rngs=rngs)

    def __call__(self, x):
        return x + self.conv2(self.snake2(self.conv1(self.snake1(x))))


class Decoder(nnx.Module):
    def __init__(self, *, rngs):
        self.snake1 = Snake(12, rngs=rngs)
        self.conv_t1 = nnx.ConvTranspose(
            12,
            6,
            (4,),
            strides=(2,),
            padding=((2, 2),),
            transpose_kernel=True,
            rngs=rngs,
        )
        self.res_unit1 = Unit(6, 1, rngs=rngs)
        self.res_unit2 = Unit(6, 3, rngs=rngs)
        self.res_unit3 = Unit(6, 9, rngs=rngs)

    def __call__(self, x):  # B T C
        x = self.conv_t1(self.snake1(x))
        return self.res_unit3(self.res_unit2(self.res_unit1(x)))


NORMED = "conv.parametrizations.weight"
PORTS = [
    Port(
        "Wav2Vec2PositionalConvEmbedding",
        wav2vec2,
        Positions,
        drawn("wav2vec2", (3, 9, 8)),
        (
            Rule(f"{NORMED}.original0 -> conv.g", "1 1 k -> k 1 1"),
            Rule(f"{NORMED}.original1 -> conv.v", "o i k -> k i o"),
        ),
    ),
    Port(
        "DacDecoderBlock",
        dac,
        Decoder,
        drawn("dac", (2, 9, 12)),
        (
            Rule("snake1.alpha -> snake1.alpha", "1 c 1 -> c"),
            Rule("*.snake1.alpha -> *.snake1.alpha", "1 c 1 -> c"),
            Rule("*.snake2.alpha -> *.snake2.alpha", "1 c 1 -> c"),
        ),
        {"torch_call": channels_last},
    ),
]
