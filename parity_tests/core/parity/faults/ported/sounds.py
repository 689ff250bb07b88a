"""Blocks of sound models: Wav2Vec2's positions by a convolution, DAC's decoder."""

import jax
import jax.numpy as jnp
from flax import nnx

from flax_attn.parity import Rule

from .mistake import Block, Mistake, channels_last, normal


def wav2vec2():
    from transformers import Wav2Vec2Config
    from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2PositionalConvEmbedding

    sizes = {"num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 4}
    return Wav2Vec2PositionalConvEmbedding(Wav2Vec2Config(hidden_size=8, **sizes))


class NormedConv(nnx.Module):
    """A convolution whose kernel is `g v / |v|`, with one norm for each place in the kernel."""

    padding = ((3, 2),)
    axes = (1, 2)

    def __init__(self, *, rngs):
        self.g = nnx.Param(jnp.ones((6, 1, 1)))
        self.v = nnx.Param(jnp.ones((6, 2, 8)))
        self.bias = nnx.Param(jnp.zeros(8))

    def __call__(self, x):  # B T D
        v = self.v[...]
        kernel = self.g[...] * v / jnp.linalg.norm(v, axis=self.axes, keepdims=True)
        layout = ("NWC", "WIO", "NWC")
        y = jax.lax.conv_general_dilated(
            x, kernel, (1,), self.padding, dimension_numbers=layout, feature_group_count=4
        )
        return y + self.bias[...]


class Positions(nnx.Module):
    Conv = NormedConv

    def __init__(self, *, rngs):
        self.conv = self.Conv(rngs=rngs)

    def __call__(self, x):
        return nnx.gelu(self.conv(x), approximate=False)


class NormOverInputs(NormedConv):
    axes = (1,)


class SamePadding(NormedConv):
    padding = "SAME"


class NormOverInputsPositions(Positions):
    Conv = NormOverInputs


class SamePositions(Positions):
    Conv = SamePadding


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

    Snake: type[nnx.Module] = Snake

    def __init__(self, width, dilation, *, rngs):
        self.snake1 = self.Snake(width, rngs=rngs)
        self.conv1 = nnx.Conv(width, width, (7,), kernel_dilation=dilation, rngs=rngs)
        self.snake2 = self.Snake(width, rngs=rngs)
        self.conv2 = nnx.Conv(width, width, (1,), rngs=rngs)

    def __call__(self, x):
        return x + self.conv2(self.snake2(self.conv1(self.snake1(x))))


class Decoder(nnx.Module):
    Unit, transposed, dilations = Unit, True, (1, 3, 9)

    def __init__(self, *, rngs):
        self.snake1 = self.Unit.Snake(12, rngs=rngs)
        self.conv_t1 = nnx.ConvTranspose(
            12,
            6,
            (4,),
            strides=(2,),
            padding=((2, 2),),
            transpose_kernel=self.transposed,
            rngs=rngs,
        )
        one, two, three = self.dilations
        self.res_unit1 = self.Unit(6, one, rngs=rngs)
        self.res_unit2 = self.Unit(6, two, rngs=rngs)
        self.res_unit3 = self.Unit(6, three, rngs=rngs)

    def __call__(self, x):  # B T C
        x = self.conv_t1(self.snake1(x))
        return self.res_unit3(self.res_unit2(self.res_unit1(x)))


class BareSnake(Snake):
    def __call__(self, x):
        alpha = self.alpha[...]
        return x + jnp.sin(alpha * x) ** 2 / alpha


class BareSnakeUnit(Unit):
    Snake = BareSnake


class BareSnakeDecoder(Decoder):
    Unit = BareSnakeUnit


class UndilatedDecoder(Decoder):
    dilations = (1, 1, 1)


class PlainDecoder(Decoder):
    """With nnx's own layout of the kernel, which is mirrored."""

    transposed = False


NORMED = "conv.parametrizations.weight"
WAV2VEC2 = Block(
    "Wav2Vec2PositionalConvEmbedding",
    wav2vec2,
    Positions,
    (normal("wav2vec2", 3, 9, 8),),
    (
        Rule(f"{NORMED}.original0 -> conv.g", "1 1 k -> k 1 1"),
        Rule(f"{NORMED}.original1 -> conv.v", "o i k -> k i o"),
    ),
)
SNAKES = (
    Rule("snake1.alpha -> snake1.alpha", "1 c 1 -> c"),
    Rule("*.snake1.alpha -> *.snake1.alpha", "1 c 1 -> c"),
    Rule("*.snake2.alpha -> *.snake2.alpha", "1 c 1 -> c"),
)
DAC = Block(
    "DacDecoderBlock",
    dac,
    Decoder,
    (normal("dac", 2, 9, 12),),
    SNAKES,
    {"torch_call": channels_last},
)
UNITS = ("res_unit1", "res_unit2", "res_unit3")
MISTAKES = [
    Mistake(
        "the weight norm over the input axis only",
        WAV2VEC2,
        f"conv|{NORMED}|{NORMED}.0|output",
        "norm|axis|axes",
        port=NormOverInputsPositions,
    ),
    Mistake(
        "SAME padding of an even kernel, one place to the left of torch's",
        WAV2VEC2,
        "conv|padding|between conv and padding|output",
        "pad|SAME|shift|place|position|off by",
        port=SamePositions,
    ),
    Mistake(
        "the transposed convolution's kernel not mirrored",
        DAC,
        "conv_t1",
        "mirror|flip|revers|~",
        port=PlainDecoder,
        rules=(*SNAKES, Rule("conv_t1.weight -> conv_t1.kernel", "i o k -> k i o")),
    ),
    Mistake(
        "dilation forgotten",
        DAC,
        "res_unit2.conv1",
        "dilat|apart|spac",
        port=UndilatedDecoder,
        also="res_unit3.conv1",
    ),
    Mistake(
        "snake without its epsilon",
        DAC,
        "snake1",
        "epsilon|1e-09|1e-9",
        port=BareSnakeDecoder,
        also="|".join(f"{unit}.snake{i}" for unit in UNITS for i in (1, 2)),
    ),
]
