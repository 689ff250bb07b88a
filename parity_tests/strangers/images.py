"""Attention over the pixels of an image: windows, convolutions on the way to keys, statistics."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from flax_attn import Additive as bias_of
from flax_attn import attend, merge_heads, split_heads
from flax_attn.parity import Rule

from .stranger import linear, normal, normalised, stranger, zeros


class Swin(nnx.Module):
    """Swin v2: cosines times a learned scale, and a bias that a small network makes."""

    sides, head_dim = (2, 3), 6

    def __init__(self, *, rngs: nnx.Rngs):
        self.logit_scale = zeros(3, 1, 1)
        self.continuous_position_bias_mlp = nnx.Sequential(
            linear(2, 512, rngs), jax.nn.relu, linear(512, 3, rngs, False)
        )
        self.query, self.value = linear(18, 18, rngs), linear(18, 18, rngs)
        self.key = linear(18, 18, rngs, False)

    def bias(self, dtype: Any) -> jax.Array:
        """`N T T`, between 0 and 16."""
        height, width = self.sides
        grid = np.stack(
            np.meshgrid(range(1 - height, height), range(1 - width, width), indexing="ij"), -1
        )
        far = 8 * grid / np.array([height - 1, width - 1])
        table = np.sign(far) * np.log2(np.abs(far) + 1) / math.log2(8)
        y, x = (side.ravel() for side in np.indices(self.sides))
        at = (y[:, None] - y + height - 1, x[:, None] - x + width - 1)
        made = self.continuous_position_bias_mlp(jnp.asarray(table, dtype))  # 2h-1 2w-1 N
        return 16 * jax.nn.sigmoid(jnp.moveaxis(made[at], -1, 0))

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        parts = self.query(x), self.key(x), self.value(x)
        q, k, v = (split_heads(part, self.head_dim) for part in parts)  # B*W T N H
        scale = jnp.exp(jnp.minimum(self.logit_scale[...], math.log(100)))[None, None, :, 0]
        score = bias_of(self.bias(x.dtype)[None])
        hidden = 2 * jnp.tile(mask, (len(x) // len(mask), 1, 1))  # theirs adds it twice
        score = score >> bias_of(hidden[:, None])
        return merge_heads(attend(normalised(q) * scale, normalised(k), v, score=score, scale=1.0))


def swin() -> torch.nn.Module:
    from transformers.models.swinv2.modeling_swinv2 import Swinv2Config, Swinv2SelfAttention

    return Swinv2SelfAttention(Swinv2Config(attention_probs_dropout_prob=0.0), 18, 3, (2, 3))


def call_swin(module: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The table of distances is made again, in the run's dtype."""
    module.relative_coords_table, _ = module.create_coords_table_and_index()
    return module(x, mask)[0]


def swin_inputs() -> dict[str, Any]:
    """Two images of four windows, of which two are sewn together from strips."""
    strips = np.zeros((4, 6), int)
    strips[2, 3:], strips[3, ::2] = 1, 1
    apart = strips[:, :, None] != strips[:, None]
    return {"x": normal(8, 6, 18), "mask": np.where(apart, -100.0, 0.0)}


class Sam(nnx.Module):
    """SAM: a bias of the query with tables of rows and of columns, over a whole square."""

    side, head_dim = 3, 5

    def __init__(self, *, rngs: nnx.Rngs):
        self.q, self.k, self.v, self.proj = (linear(20, 20, rngs) for _ in range(4))
        self.rel_pos_h, self.rel_pos_w = (zeros(2 * self.side - 1, self.head_dim) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        flat = x.reshape(x.shape[0], -1, x.shape[-1])  # B T D
        q, k, v = (split_heads(part(flat), self.head_dim) for part in (self.q, self.k, self.v))
        y, z = (side.ravel() for side in np.indices((self.side, self.side)))
        rows = self.rel_pos_h[...][y[:, None] - y + self.side - 1]  # T S H
        columns = self.rel_pos_w[...][z[:, None] - z + self.side - 1]
        score = bias_of(jnp.einsum("btnh,tsh->bnts", q, rows + columns))
        return self.proj(merge_heads(attend(q, k, v, score=score))).reshape(x.shape)


def sam() -> torch.nn.Module:
    from transformers.models.sam.modeling_sam import SamVisionAttention, SamVisionConfig

    config = SamVisionConfig(hidden_size=20, num_attention_heads=4, attn_implementation="eager")
    return SamVisionAttention(config, window_size=3)


def call_images(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)[0]


class Normed(nnx.Module):
    """A Linear without bias and a norm by the batch's statistics."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs):
        self.linear = linear(inputs, outputs, rngs, False)
        self.batch_norm = nnx.BatchNorm(outputs, use_fast_variance=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.batch_norm(self.linear(x))


class Levit(nnx.Module):
    """LeViT: one norm over queries, keys and wider values of each head; a bias by distance."""

    head_dim, heads, side = 3, 4, 3

    def __init__(self, *, rngs: nnx.Rngs):
        self.queries_keys_values = Normed(10, 48, rngs)
        self.projection = Normed(24, 10, rngs)
        self.attention_biases = zeros(self.heads, self.side**2)

    def __call__(self, x: jax.Array) -> jax.Array:
        parts = split_heads(self.queries_keys_values(x), 4 * self.head_dim)  # B T N 4H
        q, k, v = jnp.split(parts, (self.head_dim, 2 * self.head_dim), axis=-1)
        y, z = (side.ravel() for side in np.indices((self.side, self.side)))
        at = self.side * np.abs(y[:, None] - y) + np.abs(z[:, None] - z)  # T S
        out = attend(q, k, v, score=bias_of(self.attention_biases[...][None, :, at]))
        return self.projection(jax.nn.hard_swish(merge_heads(out)))


def levit() -> torch.nn.Module:
    from transformers.models.levit.modeling_levit import LevitAttention

    return LevitAttention(10, key_dim=3, num_attention_heads=4, attention_ratio=2, resolution=3)


class ConvProjection(nnx.Module):
    """A depthwise convolution and a norm, image in, image out."""

    def __init__(self, stride: int, rngs: nnx.Rngs):
        self.convolution = nnx.Conv(
            18, 18, (3, 3), stride, padding=1, feature_group_count=18, use_bias=False, rngs=rngs
        )
        self.normalization = nnx.BatchNorm(18, use_fast_variance=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.normalization(self.convolution(x))


class Cvt(nnx.Module):
    """CvT: convolutions before the projections, on all but the class token; scale D ** -0.5."""

    head_dim = 6

    def __init__(self, *, rngs: nnx.Rngs):
        for name, stride in (("query", 1), ("key", 2), ("value", 2)):
            setattr(self, f"convolution_projection_{name}", ConvProjection(stride, rngs))
            setattr(self, f"projection_{name}", linear(18, 18, rngs))

    def part(self, name: str, x: jax.Array, image: jax.Array) -> jax.Array:
        """One of query, key and value, `B T N H`."""
        image = getattr(self, f"convolution_projection_{name}")(image)
        x = jnp.concatenate([x[:, :1], image.reshape(len(x), -1, 18)], axis=1)
        return split_heads(getattr(self, f"projection_{name}")(x), self.head_dim)

    def __call__(self, hidden_state: jax.Array, height: int, width: int) -> jax.Array:
        image = hidden_state[:, 1:].reshape(-1, height, width, 18)
        q, k, v = (self.part(name, hidden_state, image) for name in ("query", "key", "value"))
        return merge_heads(attend(q, k, v, scale=18**-0.5))


def cvt() -> torch.nn.Module:
    from transformers.models.cvt.modeling_cvt import CvtSelfAttention

    return CvtSelfAttention(
        num_heads=3,
        embed_dim=18,
        kernel_size=3,
        padding_q=1,
        padding_kv=1,
        stride_q=1,
        stride_kv=2,
        qkv_projection_method="dw_bn",
        qkv_bias=True,
        attention_drop_rate=0.0,
    )


CVT_RULES = tuple(
    Rule(
        f"convolution_projection_*.convolution_projection.{name} -> convolution_projection_*.{name}"
    )
    for name in ("convolution", "normalization")
)


class Pvt(nnx.Module):
    """PVT: keys and values from a strided convolution of the image and a norm."""

    head_dim = 6

    def __init__(self, *, rngs: nnx.Rngs):
        self.query, self.key, self.value = (linear(18, 18, rngs) for _ in range(3))
        self.sequence_reduction = nnx.Conv(18, 18, (2, 2), 2, padding="VALID", rngs=rngs)
        self.layer_norm = nnx.LayerNorm(18, epsilon=1e-6, rngs=rngs)

    def __call__(self, hidden_states: jax.Array, height: int, width: int) -> jax.Array:
        batch = len(hidden_states)
        fewer = self.sequence_reduction(hidden_states.reshape(batch, height, width, 18))
        fewer = self.layer_norm(fewer.reshape(batch, -1, 18))  # B S D
        parts = self.query(hidden_states), self.key(fewer), self.value(fewer)
        return merge_heads(attend(*(split_heads(part, self.head_dim) for part in parts)))


def pvt() -> torch.nn.Module:
    from transformers.models.pvt.modeling_pvt import PvtConfig, PvtEfficientSelfAttention

    return PvtEfficientSelfAttention(PvtConfig(attention_probs_dropout_prob=0.0), 18, 3, 2)


STRANGERS = {
    "swin_v2": stranger(swin, Swin, swin_inputs, torch_call=call_swin),
    "sam": stranger(
        sam,
        Sam,
        lambda: {"x": normal(2, 3, 3, 20)},
        lambda: (
            Rule("qkv.weight -> {q,k,v}.kernel", "(n o) i -> n i o"),
            Rule("qkv.bias -> {q,k,v}.bias", "(n o) -> n o"),
        ),
        call_images,
    ),
    "levit": stranger(
        levit,
        Levit,
        lambda: {"x": normal(2, 9, 10)},
        torch_call=lambda module, x: module(x),
    ),
    "cvt": stranger(
        cvt,
        Cvt,
        lambda: {"hidden_state": normal(4, 11, 18), "height": 2, "width": 5},
        lambda: CVT_RULES,
    ),
    "pvt": stranger(
        pvt,
        Pvt,
        lambda: {"hidden_states": normal(4, 12, 18), "height": 2, "width": 6},
        torch_call=lambda module, **inputs: module(**inputs)[0],
    ),
}
