"""A model from tokens or images to hidden states."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ..._internal.arrays import aligned, reshaped
from ..._internal.checks import check_image
from ..._internal.types import wide
from ...layers import CrossAttention
from ...layers._common import dot_general_sharded
from ...masks import FULL, Mask
from ...token_layouts import positions_of
from .blocks import (
    Build,
    Mlp,
    applied,
    dropped,
    learned_positions,
    real_tokens,
    state_at,
    token_numbers,
    zero_padding,
)
from .facts import ACTIVATIONS, activation_of, count, flag, grid_of, pair, read
from .transformer import Transformer

SHARPNESS = -0.75  # of torch's bicubic interpolation


class Encoded(NamedTuple):
    """What an encoder returns.

    Attributes:
      hidden: the last hidden states, `*B T D`.
      pooled: the state of the whole row, `*B P`; None if the model type has no pooler.
    """

    hidden: Float[Array, "*B T D"]
    pooled: Float[Array, "*B P"] | None


class Encoder(Transformer):
    """An encoder of tokens or of images, as `families.model` builds it.

    Shapes: tokens `*B T`, or images `*B Y X channels` -> hidden `*B T D`, pooled `*B P`. The tokens
    of an image are its patches, row by row, behind the class token if there is one.

    Attributes:
      embed_tokens: the table of the tokens; None for images.
      embed_patches: the projection of the patches; None for tokens.
      embed_positions, embed_types: tables of positions and of types of tokens, or None.
      class_token, mask_token: trained tokens of an encoder of images, or None.
      stack, layers: the layers, see `Transformer`.
      norm: that of the last hidden states, or None.
      pooler: makes the pooled state, or None.
      config: the published config as JSON.
    """

    def __init__(self, build: Build, config: str, *, scan: bool, remat: bool):
        fields, body, width = build.config, build.body, build.width
        is_of_images = body.patch_bias is not None
        has_types = body.token_types is not None
        words = 0 if is_of_images else fields.count("vocab_size")
        types = count(fields, body.token_types) if has_types else 0
        self.embed_tokens = build.embedding(words, width) if words else None
        self.embed_types = build.embedding(types, width) if types else None
        self.embed_patches: Any = Patches(build) if is_of_images else None
        self.grid = grid_of(fields) if is_of_images else (0, 0)
        self.class_token = build.param((width,)) if body.class_token else None
        self.mask_token = build.param((width,)) if flag(fields, body.mask_token) else None
        self.position_offset = read(fields, body.position_offset)
        self.embed_positions: Any = build.positions()
        self.norm_of_embeddings = build.norm_if(body.embedding_norm)
        self.set_layers(build, scan, remat)
        self.norm = build.norm_if(flag(fields, body.final_norm))
        self.pooler = pooler_of(build)
        self.dropout = build.dropout(body.embedding_dropout)
        self.config = config

    def __call__(
        self,
        x: Int[Array, "*B T"] | Float[Array, "*B Y X C"],
        *,
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        positions: Int[Array, "... T"] | None = None,
        token_types: Int[Array, "*#B T"] | None = None,
        masked: Bool[Array, "*#B P"] | None = None,
        deterministic: bool | None = None,
    ) -> Encoded:
        """The last hidden states, and the pooled state.

        Args:
          x: the tokens, or the images, of any size in whole patches: where it differs from the
            config's, the table of positions is interpolated as torch's bicubic mode does.
          valid: which tokens are real: an array, `Lengths(n)` for the first n of a row, or
            `~Lengths(n)` for those after n tokens of padding. Padding reaches no other token.
          positions: of tokens; None counts the real tokens of a row.
          token_types: of tokens; None for 0.
          masked: patches that the mask token replaces.
          deterministic: overrides `train()` and `eval()`.

        Raises:
          ValueError: for an image that is not of whole patches, and arguments of another kind
            of encoder.
        """
        real, call = None, dict[str, Any](deterministic=deterministic)
        if self.embed_tokens is not None:
            _refuse("tokens", masked=masked)
            x = token_numbers(x)
            real = real_tokens(x, valid)
            h = self.embed_tokens(zero_padding(x, real))  # *B T D
            at = positions
            if positions is None and self.embed_positions is not None:
                at = learned_positions(h, real, valid, None)
            h = self._with_positions_and_types(h, at, token_types)
            call |= {"valid": valid, "positions": positions}
        else:
            _refuse("images", valid=valid, positions=positions, token_types=token_types)
            h = self._with_grid(self.embed_patches(x), masked)  # *B T D
        h = applied(self.norm_of_embeddings, h)
        h = zero_padding(dropped(h, self.dropout, deterministic), real)  # *B T D
        h, _ = self.run_layers(h, None, call)
        h = applied(self.norm, h)
        return Encoded(h, None if self.pooler is None else self.pooler(h, x))

    def _with_positions_and_types(
        self, h: Float[Array, "*B T D"], positions: Any, token_types: Any
    ) -> Float[Array, "*B T D"]:
        """The embedded tokens with those of their types and positions."""
        if self.embed_types is None:
            _refuse("this model_type", token_types=token_types)
        else:
            types = jnp.zeros(h.shape[-2], jnp.int32) if token_types is None else token_types
            h = h + aligned(self.embed_types(types), h)
        if self.embed_positions is not None:
            h = h + aligned(self.embed_positions(positions + self.position_offset), h)
        return h

    def _with_grid(self, h: Float[Array, "*B y x D"], masked: Any) -> Float[Array, "*B T D"]:
        """The patches row by row with their positions, behind the class token if there is one."""
        *batch, rows, columns, _ = h.shape
        h = reshaped(h, (*batch, rows * columns, h.shape[-1]))  # *B T D
        if masked is not None:
            if self.mask_token is None:
                _refuse("a model without a mask token", masked=masked)
            else:
                h = jnp.where(masked[..., None], token_like(h, self.mask_token), h)
        table, first = self.embed_positions(jnp.arange(self.embed_positions.num_embeddings)), 0
        if self.class_token is not None:
            h, first = jnp.concatenate([token_like(h, self.class_token), h], axis=-2), 1
        if (rows, columns) != self.grid:
            grid = table[first:].astype(wide(table.dtype)).reshape(*self.grid, -1)
            grid = resized(resized(grid, rows, 0), columns, 1).reshape(rows * columns, -1)
            table = jnp.concatenate([table[:first], grid.astype(table.dtype)])
        return h + aligned(table, h)


class Patches(nnx.Conv):
    """The projection of patches that do not overlap, with the Params of a convolution.

    Shapes: image `*B Y X C` -> `*B y x D`.
    """

    def __init__(self, build: Build):
        config, init = build.config, build.init
        patch, channels = pair(config, "patch_size"), config.count("num_channels")
        use_bias = flag(config, build.body.patch_bias)
        more = init.torch_initializers(patch[0] * patch[1] * channels)
        super().__init__(channels, build.width, patch, use_bias=use_bias, **more)
        self.patch = patch

    def __call__(self, inputs: Float[Array, "*B Y X C"]) -> Float[Array, "*B y x D"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The embedded patches; ValueError for an image that is not of whole patches."""
        image, (high, wide) = check_image("x", inputs, self.in_features), self.patch
        *batch, y, x, channels = image.shape
        if y % high or x % wide:
            raise ValueError(f"An image is cut into patches of {high} x {wide}; got {y} x {x}.")
        image = reshaped(image, (*batch, y // high, high, x // wide, wide, channels))
        patches = reshaped(
            jnp.moveaxis(image, -3, -4), (*batch, y // high, x // wide, high * wide * channels)
        )
        dtype = self.dtype or jnp.promote_types(patches.dtype, self.param_dtype)
        kernel = self.kernel[...].reshape(high * wide * channels, -1).astype(dtype)
        axes = (((patches.ndim - 1,), (0,)), ((), ()))
        h = dot_general_sharded(patches.astype(dtype), kernel, axes)
        return h if self.bias is None else h + aligned(self.bias[...], h)


def token_like(h: Float[Array, "*B T D"], token: nnx.Param) -> Float[Array, "*B 1 D"]:
    """A trained token in each row of h, which may be sharded."""
    first = h[..., :1, :]
    return jnp.zeros_like(first) + aligned(token[...], first)


class Pooler(nnx.Module):
    """The state of one token of a row, normalised, projected or activated as the model type does.

    Shapes: hidden `*B T D` -> `*B P`.
    """

    def __init__(self, build: Build):
        body, config = build.body, build.config
        self.which = body.pooler
        self.norm = build.norm_if(body.pooler_norm)
        width = read(config, body.pooler_width) or build.width
        has_dense = body.pooler in ("first", "last")
        self.dense = build.init.linear(build.width, width) if has_dense else None
        name = body.pooler_activation
        self.activation = None if name is None else activation_of(config, name)
        self.end = config["eos_token_id"] if body.pooler == "end" else None

    def __call__(self, hidden: Float[Array, "*B T D"], tokens: Array) -> Float[Array, "*B P"]:
        """The pooled state; the tokens say where a text ends."""
        slots = positions_of(hidden, -2)  # of a permuted layout
        place = jnp.arange(hidden.shape[-2]) if slots is None else jnp.asarray(slots)
        place = place.reshape((1,) * (hidden.ndim - 2) + place.shape)
        if self.which == "end":
            # Old files of CLIP say 2, and their last token has the largest number.
            ends = tokens if self.end == 2 else tokens == self.end
            place = jnp.where(ends == ends.max(-1, keepdims=True), place, place.size)
        h = state_at(hidden, place.argmax(-1) if self.which == "last" else place.argmin(-1))
        h = applied(self.dense, applied(self.norm, h))
        return h if self.activation is None else ACTIVATIONS[self.activation](h)


class AttentionPooler(nnx.Module):
    """Attention of one trained query over all tokens, and a feed-forward part (SigLIP).

    Shapes: hidden `*B T D` -> `*B D`.
    """

    def __init__(self, build: Build):
        width, heads = build.width, build.config.count("num_attention_heads")
        self.probe = build.param((width,))
        self.attention = CrossAttention(width, heads, mask=FULL, **build.keywords)
        self.norm = build.norm()
        self.mlp = Mlp(build)

    def __call__(self, hidden: Float[Array, "*B T D"], _: Array) -> Float[Array, "*B D"]:
        """The pooled state."""
        y = self.attention(token_like(hidden, self.probe), hidden)
        return (y + self.mlp(self.norm(y)))[..., 0, :]


def pooler_of(build: Build) -> Pooler | AttentionPooler | None:
    """The pooler of a model type, or None."""
    if build.body.pooler == "attention":
        return AttentionPooler(build) if build.config.flag("vision_use_head") else None
    return Pooler(build) if build.body.pooler else None


def resized(x: Float[Array, "Y X D"], size: int, axis: int) -> Float[Array, "y x D"]:
    """Interpolates an axis as torch's bicubic mode with `align_corners=False` does."""
    before = x.shape[axis]
    at = (np.arange(size) + 0.5) * before / size - 0.5
    low = np.floor(at).astype(int)
    weights = np.zeros((size, before))
    for tap in range(-1, 3):
        distance = np.abs(at - (low + tap))
        inner = ((SHARPNESS + 2) * distance - (SHARPNESS + 3)) * distance**2 + 1
        outer = SHARPNESS * (((distance - 5) * distance + 8) * distance - 4)
        np.add.at(
            weights,
            (np.arange(size), np.clip(low + tap, 0, before - 1)),
            np.where(distance <= 1, inner, outer),
        )
    moved = jnp.moveaxis(x, axis, 0)
    return jnp.moveaxis(jnp.tensordot(jnp.asarray(weights, x.dtype), moved, 1), 0, axis)


def _refuse(kind: str, **arguments: Any) -> None:
    """Raises ValueError for arguments that an encoder of this kind does not take."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"An encoder of {kind} takes no {name}=.")
