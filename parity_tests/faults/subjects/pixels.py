"""Blocks of image models: ResNet, ConvNeXt, Swin, PoolFormer."""

import jax.numpy as jnp
from flax import nnx

from flax_attn.parity import Rule

from ...port import Port
from .draws import channels_last, drawn, normal


def resnet():
    from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

    return ResNetBottleNeckLayer(6, 12, stride=2)


class ConvLayer(nnx.Module):
    """A convolution without a bias, and a batch norm."""

    def __init__(self, inward, outward, width, stride=1, *, rngs):
        self.convolution = nnx.Conv(
            inward,
            outward,
            (width, width),
            strides=stride,
            padding=width // 2,
            use_bias=False,
            rngs=rngs,
        )
        self.normalization = nnx.BatchNorm(outward, momentum=0.9, epsilon=1e-5, rngs=rngs)

    def __call__(self, x):
        return self.normalization(self.convolution(x))


class BottleNeck(nnx.Module):
    """Three convolutions and a shortcut."""

    def __init__(self, *, rngs):
        self.shortcut = ConvLayer(6, 12, 1, 2, rngs=rngs)
        self.layer = nnx.List(
            [
                ConvLayer(6, 3, 1, rngs=rngs),
                ConvLayer(3, 3, 3, 2, rngs=rngs),
                ConvLayer(3, 12, 1, rngs=rngs),
            ]
        )

    def __call__(self, x):  # B H W C
        one, two, three = self.layer
        y = three(nnx.relu(two(nnx.relu(one(x)))))
        return nnx.relu(y + self.shortcut(x))


def convnext():
    from transformers import ConvNextConfig
    from transformers.models.convnext.modeling_convnext import ConvNextLayer

    return ConvNextLayer(ConvNextConfig(), dim=5)


class ConvNext(nnx.Module):
    """Depthwise convolution, norm, MLP, a scale for each channel, residual."""

    def __init__(self, *, rngs):
        self.dwconv = nnx.Conv(5, 5, (7, 7), feature_group_count=5, rngs=rngs)
        self.layernorm = nnx.LayerNorm(5, epsilon=1e-6, rngs=rngs)
        self.pwconv1 = nnx.Linear(5, 20, rngs=rngs)
        self.pwconv2 = nnx.Linear(20, 5, rngs=rngs)
        self.layer_scale_parameter = nnx.Param(jnp.ones(5))

    def __call__(self, x):  # B H W C
        y = self.dwconv(x)
        y = self.pwconv1(self.layernorm(y))
        y = self.pwconv2(nnx.gelu(y, approximate=False))
        return x + self.layer_scale_parameter[...] * y


SIZE = 7, 12


def swin():
    from transformers.models.swin.modeling_swin import SwinPatchMerging

    return SwinPatchMerging(5)


class PatchMerging(nnx.Module):
    """Four patches to one; an odd height gets a row of zeros."""

    def __init__(self, *, rngs):
        self.norm = nnx.LayerNorm(20, epsilon=1e-5, rngs=rngs)
        self.reduction = nnx.Linear(20, 10, use_bias=False, rngs=rngs)

    def __call__(self, x, size):  # B (H W) C
        height, width = size
        x = x.reshape(x.shape[0], height, width, x.shape[-1])
        x = jnp.pad(x, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)))
        four = [x[:, row::2, col::2] for col in range(2) for row in range(2)]
        x = jnp.concatenate(four, -1)
        return self.reduction(self.norm(x.reshape(x.shape[0], -1, x.shape[-1])))


def poolformer():
    from transformers import PoolFormerConfig
    from transformers.models.poolformer.modeling_poolformer import PoolFormerLayer

    sizes = {"num_channels": 5, "hidden_size": 5, "intermediate_size": 11}
    return PoolFormerLayer(PoolFormerConfig(), pool_size=3, drop_path=0.0, **sizes)


class Pooling(nnx.Module):
    """The mean of the neighbours, less the pixel itself."""

    def __call__(self, x):  # B H W C
        mean = nnx.avg_pool(x, (3, 3), padding="SAME", count_include_pad=False)
        return mean - x


class MLP(nnx.Module):
    def __init__(self, *, rngs):
        self.conv1 = nnx.Conv(5, 11, (1, 1), rngs=rngs)
        self.conv2 = nnx.Conv(11, 5, (1, 1), rngs=rngs)

    def __call__(self, x):
        return self.conv2(nnx.gelu(self.conv1(x), approximate=False))


def norm(rngs):
    return nnx.GroupNorm(5, num_groups=1, epsilon=1e-5, rngs=rngs)


class PoolFormer(nnx.Module):
    """Pooling in the place of attention."""

    def __init__(self, *, rngs):
        self.pooling, self.output = Pooling(), MLP(rngs=rngs)
        self.before_norm, self.after_norm = norm(rngs), norm(rngs)
        self.layer_scale_1, self.layer_scale_2 = nnx.Param(jnp.ones(5)), nnx.Param(jnp.ones(5))

    def __call__(self, x):  # B H W C
        x = x + self.layer_scale_1[...] * self.pooling(self.before_norm(x))
        return x + self.layer_scale_2[...] * self.output(self.after_norm(x))


def _first_channels_last(module, x):
    return module(x.movedim(-1, 1))[0].movedim(1, -1)


# For rows whose wrong ports have other parameters.
NORMS = tuple(Rule(f"{norm}.weight -> {norm}.scale") for norm in ("before_norm", "after_norm"))
PORTS = [
    Port(
        "ResNetBottleNeckLayer",
        resnet,
        BottleNeck,
        drawn("resnet", (2, 10, 14, 6)),
        options={"train": True, "torch_call": channels_last},
    ),
    Port(
        "ConvNextLayer",
        convnext,
        ConvNext,
        drawn("convnext", (2, 8, 9, 5)),
        options={"torch_call": channels_last},
    ),
    Port(
        "SwinPatchMerging",
        swin,
        PatchMerging,
        lambda seed: (normal(seed, "swin", 2, 84, 5), SIZE),
    ),
    Port(
        "PoolFormerLayer",
        poolformer,
        PoolFormer,
        drawn("poolformer", (2, 6, 7, 5)),
        options={"torch_call": _first_channels_last},
    ),
]
