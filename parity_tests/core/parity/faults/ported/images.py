"""Blocks of image models: ResNet, ConvNeXt, Swin, PoolFormer."""

import jax.numpy as jnp
from flax import nnx

from flax_attn.parity import Rule

from .mistake import Block, Mistake, channels_last, normal


def resnet():
    from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

    return ResNetBottleNeckLayer(6, 12, stride=2)


class ConvLayer(nnx.Module):
    """A convolution without a bias, and a batch norm."""

    momentum, always_running = 0.9, False

    def __init__(self, inward, outward, width, stride=1, padding=None, *, rngs):
        self.convolution = nnx.Conv(
            inward,
            outward,
            (width, width),
            strides=stride,
            padding=width // 2 if padding is None else padding,
            use_bias=False,
            rngs=rngs,
        )
        self.normalization = nnx.BatchNorm(outward, momentum=self.momentum, epsilon=1e-5, rngs=rngs)

    def __call__(self, x):
        running = True if self.always_running else None
        return self.normalization(self.convolution(x), use_running_average=running)


class BottleNeck(nnx.Module):
    """Three convolutions and a shortcut."""

    Layer, padding = ConvLayer, None

    def __init__(self, *, rngs):
        self.shortcut = self.Layer(6, 12, 1, 2, rngs=rngs)
        self.layer = nnx.List(
            [
                self.Layer(6, 3, 1, rngs=rngs),
                self.Layer(3, 3, 3, 2, self.padding, rngs=rngs),
                self.Layer(3, 12, 1, rngs=rngs),
            ]
        )

    def __call__(self, x):  # B H W C
        one, two, three = self.layer
        y = three(nnx.relu(two(nnx.relu(one(x)))))
        return nnx.relu(y + self.shortcut(x))


class TorchsMomentum(ConvLayer):
    momentum = 0.1


class AlwaysRunning(ConvLayer):
    always_running = True


class TorchsMomentumBottleNeck(BottleNeck):
    Layer = TorchsMomentum


class AlwaysRunningBottleNeck(BottleNeck):
    Layer = AlwaysRunning


class SameBottleNeck(BottleNeck):
    padding = "SAME"


def convnext():
    from transformers import ConvNextConfig
    from transformers.models.convnext.modeling_convnext import ConvNextLayer

    return ConvNextLayer(ConvNextConfig(), dim=5)


class ConvNext(nnx.Module):
    """Depthwise convolution, norm, MLP, a scale for each channel, residual."""

    scaled = True

    def __init__(self, *, rngs):
        self.dwconv = nnx.Conv(5, 5, (7, 7), feature_group_count=5, rngs=rngs)
        self.layernorm = nnx.LayerNorm(5, epsilon=1e-6, rngs=rngs)
        self.pwconv1 = nnx.Linear(5, 20, rngs=rngs)
        self.pwconv2 = nnx.Linear(20, 5, rngs=rngs)
        if self.scaled:
            self.layer_scale_parameter = nnx.Param(jnp.ones(5))

    def act(self, x):
        return nnx.gelu(x, approximate=False)

    def residual(self, x, y):
        return x

    def __call__(self, x):  # B H W C
        y = self.dwconv(x)
        residual = self.residual(x, y)
        y = self.pwconv2(self.act(self.pwconv1(self.layernorm(y))))
        return residual + (self.layer_scale_parameter[...] * y if self.scaled else y)


class TanhConvNext(ConvNext):
    def act(self, x):
        return nnx.gelu(x)


class LateResidualConvNext(ConvNext):
    def residual(self, x, y):
        return y


class UnscaledConvNext(ConvNext):
    scaled = False


SIZE = 7, 12


def swin():
    from transformers.models.swin.modeling_swin import SwinPatchMerging

    return SwinPatchMerging(5)


class PatchMerging(nnx.Module):
    """Four patches to one; an odd height gets a row of zeros."""

    epsilon = 1e-5

    def __init__(self, *, rngs):
        self.norm = nnx.LayerNorm(20, epsilon=self.epsilon, rngs=rngs)
        self.reduction = nnx.Linear(20, 10, use_bias=False, rngs=rngs)

    def four(self, x):
        return [x[:, row::2, col::2] for col in range(2) for row in range(2)]

    def __call__(self, x, size):  # B (H W) C
        height, width = size
        x = x.reshape(x.shape[0], height, width, x.shape[-1])
        x = jnp.pad(x, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)))
        x = jnp.concatenate(self.four(x), -1)
        return self.reduction(self.norm(x.reshape(x.shape[0], -1, x.shape[-1])))


class RowsFirstMerging(PatchMerging):
    def four(self, x):
        return [x[:, row::2, col::2] for row in range(2) for col in range(2)]


class FlaxEpsilonMerging(PatchMerging):
    epsilon = 1e-6


def poolformer():
    from transformers import PoolFormerConfig
    from transformers.models.poolformer.modeling_poolformer import PoolFormerLayer

    sizes = {"num_channels": 5, "hidden_size": 5, "intermediate_size": 11}
    return PoolFormerLayer(PoolFormerConfig(), pool_size=3, drop_path=0.0, **sizes)


class Pooling(nnx.Module):
    """The mean of the neighbours, less the pixel itself."""

    count_include_pad = False

    def __call__(self, x):  # B H W C
        mean = nnx.avg_pool(x, (3, 3), padding="SAME", count_include_pad=self.count_include_pad)
        return mean - x


class MLP(nnx.Module):
    def __init__(self, *, rngs):
        self.conv1 = nnx.Conv(5, 11, (1, 1), rngs=rngs)
        self.conv2 = nnx.Conv(11, 5, (1, 1), rngs=rngs)

    def __call__(self, x):
        return self.conv2(nnx.gelu(self.conv1(x), approximate=False))


class PoolFormer(nnx.Module):
    """Pooling in the place of attention."""

    Pooling = Pooling

    def __init__(self, *, rngs):
        self.pooling, self.output = self.Pooling(), MLP(rngs=rngs)
        self.before_norm, self.after_norm = self.norm(rngs), self.norm(rngs)
        self.layer_scale_1, self.layer_scale_2 = nnx.Param(jnp.ones(5)), nnx.Param(jnp.ones(5))

    def norm(self, rngs):
        return nnx.GroupNorm(5, num_groups=1, epsilon=1e-5, rngs=rngs)

    def __call__(self, x):  # B H W C
        x = x + self.layer_scale_1[...] * self.pooling(self.before_norm(x))
        return x + self.layer_scale_2[...] * self.output(self.after_norm(x))


class PadsCounted(Pooling):
    """As `nnx.avg_pool` without a word."""

    count_include_pad = True


class PixelKept(Pooling):
    def __call__(self, x):
        return super().__call__(x) + x


class PadsCountedPoolFormer(PoolFormer):
    Pooling = PadsCounted


class PixelKeptPoolFormer(PoolFormer):
    Pooling = PixelKept


class LayerNormPoolFormer(PoolFormer):
    def norm(self, rngs):
        return nnx.LayerNorm(5, epsilon=1e-5, rngs=rngs)


def _first_channels_last(module, x):
    return module(x.movedim(-1, 1))[0].movedim(1, -1)


RESNET = Block(
    "ResNetBottleNeckLayer",
    resnet,
    BottleNeck,
    (normal("resnet", 2, 10, 14, 6),),
    options={"train": True, "torch_call": channels_last},
)
CONVNEXT = Block(
    "ConvNextLayer",
    convnext,
    ConvNext,
    (normal("convnext", 2, 8, 9, 5),),
    options={"torch_call": channels_last},
)
SWIN = Block("SwinPatchMerging", swin, PatchMerging, (normal("swin", 2, 84, 5), SIZE))
POOLFORMER = Block(
    "PoolFormerLayer",
    poolformer,
    PoolFormer,
    (normal("poolformer", 2, 6, 7, 5),),
    options={"torch_call": _first_channels_last},
)
NORMS = [*(f"layer.{i}.normalization" for i in range(3)), "shortcut.normalization"]
STATISTICS = [f"{norm}.{name}" for norm in NORMS for name in ("mean", "var")]
MISTAKES = [
    Mistake(
        "torch's momentum taken for nnx's, which is 1 - torch's",
        RESNET,
        "|".join(STATISTICS),
        "momentum|share|moving|average",
        port=TorchsMomentumBottleNeck,
    ),
    Mistake(
        "running statistics used in train mode",
        RESNET,
        "layer.0.normalization",
        "running|statistic|batch's own|train",
        port=AlwaysRunningBottleNeck,
        also="|".join([*NORMS, *STATISTICS]),
    ),
    Mistake(
        "SAME for padding 1 beside a stride of 2",
        RESNET,
        "layer.1.convolution",
        "pad|SAME|shift|place|position|off by",
        port=SameBottleNeck,
    ),
    Mistake(
        "nnx.gelu by its default, the tanh approximation",
        CONVNEXT,
        "act|between pwconv1 and pwconv2|pwconv2",
        "tanh|approximat|gelu|GELU",
        port=TanhConvNext,
    ),
    Mistake(
        "the residual taken after the first convolution",
        CONVNEXT,
        "output",
        "residual|skip|input|dwconv",
        port=LateResidualConvNext,
    ),
    Mistake(
        "the layer scale left out",
        CONVNEXT,
        "output",
        "scale|factor|gain|layer_scale",
        port=UnscaledConvNext,
        rules=(Rule.skip("layer_scale_parameter"),),
    ),
    Mistake(
        "the four patches row by row",
        SWIN,
        "between the input and norm",
        "order|exchang|permut|swap|transpos|axes|part",
        port=RowsFirstMerging,
    ),
    Mistake("nnx's epsilon of a norm", SWIN, "norm", "epsilon", port=FlaxEpsilonMerging),
    Mistake(
        "padding counted in the mean",
        POOLFORMER,
        "pooling|pooling.pool",
        "pad|border|edge|count|margin|corner",
        port=PadsCountedPoolFormer,
    ),
    Mistake(
        "the pixel itself not subtracted from the mean",
        POOLFORMER,
        "pooling|between pooling.pool and pooling",
        "subtract|minus|itself|left out|missing|not taken|taken off|difference",
        port=PixelKeptPoolFormer,
    ),
    Mistake(
        "a norm over channels, where torch has one over the whole image",
        POOLFORMER,
        "before_norm",
        "axis|axes|group|Group|channel",
        port=LayerNormPoolFormer,
        rules=tuple(
            Rule(f"{norm}.weight -> {norm}.scale") for norm in ("before_norm", "after_norm")
        ),
        also="after_norm",
    ),
]
