"""Attention of vit-pytorch, without the norm in front of it, which is no part of attention.

Its package imports torchvision, so its files are loaded alone:
`pip install --no-deps vit-pytorch==1.26.11`.
"""

from . import by_path

NAME = "vit-pytorch"


def cait_attention(**config):
    """`vit_pytorch.cait.Attention`, which mixes heads without a bias."""
    from torch import nn

    layer = by_path(NAME, "vit_pytorch/cait.py").Attention(**config)
    layer.norm = nn.Identity()
    return layer


def cait_class_attention(dim, heads, dim_head):
    """The same, whose heads are not mixed, as those of CaiT's class attention are not."""
    import torch

    layer = cait_attention(dim=dim, heads=heads, dim_head=dim_head)
    for name in ("mix_heads_pre_attn", "mix_heads_post_attn"):
        delattr(layer, name)
        layer.register_buffer(name, torch.eye(heads))
    return layer


def xcit_attention(**config):
    """`vit_pytorch.xcit.XCAttention`, which takes its temperature to be a logarithm.

    Here it is `temperature.weight`, the temperature itself.
    """
    from torch import nn

    class Itself(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def exp(self):
            return self.weight

    layer = by_path(NAME, "vit_pytorch/xcit.py").XCAttention(**config)
    layer.norm, temperature = nn.Identity(), layer.temperature
    del layer.temperature
    layer.temperature = Itself(temperature)
    return layer


def twins_attention(dim, heads, dim_head, ratio):
    """`vit_pytorch.twins_svt.GlobalAttention`, which has keys and values of one convolution.

    With a ratio above 1 they are made in PVT's three steps instead, by the file's own norm.
    """
    from torch import nn

    file = by_path(NAME, "vit_pytorch/twins_svt.py")
    layer = file.GlobalAttention(dim, heads, dim_head, k=1)
    layer.norm = nn.Identity()
    if ratio > 1:
        shrink = nn.Conv2d(dim, dim, ratio, stride=ratio)
        layer.to_kv = nn.Sequential(shrink, file.LayerNorm(dim), layer.to_kv)
    return layer
