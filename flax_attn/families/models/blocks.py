"""The layer of a model, its feed-forward part, its norms, and its embeddings."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ..._internal.arrays import aligned
from ..._internal.checks import is_known
from ...layers._common import check_tokens, dot_general_sharded
from ...layers._dropout import LayerDropout
from ...layers._init import LayerInit
from ...layers._token_indices import indices_of
from ...norms import LayerNorm, RMSNorm
from ...token_layouts import positions_of
from .._config import Config
from .facts import ACTIVATIONS, Body, activation_of, count, flag, number, rate, read

Module = Callable[..., Any]
Attention = Callable[[int, Mapping[str, Any]], nnx.Module]  # builds that of a layer


class Build(NamedTuple):
    """What the parts of a model are built from.

    Attributes:
      config, body: the config, and the facts of its model type.
      attention: builds the attention of a layer from its index and the keywords of `init`.
      init: random keys, dtypes and initializers.
    """

    config: Config
    body: Body
    attention: Attention
    init: LayerInit

    @property
    def width(self) -> int:
        """D, the width of the model."""
        return self.config.count("hidden_size")

    @property
    def keywords(self) -> dict[str, Any]:
        """`init` as keywords of a layer."""
        names = ("rngs", "dtype", "param_dtype", "kernel_init", "bias_init")
        return {name: getattr(self.init, name) for name in names}

    def with_keys(self, rngs: nnx.Rngs) -> "Build":
        """The same with other random keys."""
        return self._replace(init=LayerInit(**{**self.keywords, "rngs": rngs}))

    def attention_of(self, index: int) -> nnx.Module:
        """The attention of a layer."""
        return self.attention(index, self.keywords)

    def norm(self) -> nnx.Module:
        """A norm of hidden states."""
        facts, config = self.body.norm, self.config
        eps, dtype = number(config, facts.eps), self.init.param_dtype
        if facts.kind == "rms":
            kinds: dict[str, Any] = {"plus_one": facts.plus_one, "cast": facts.cast}
            return RMSNorm(self.width, eps=eps, param_dtype=dtype, **kinds)
        if not flag(config, facts.has_gain):
            return LayerNorm(None, eps=eps)
        return LayerNorm(self.width, eps=eps, use_bias=flag(config, facts.bias), param_dtype=dtype)

    def norm_if(self, has_norm: bool) -> nnx.Module | None:
        """A norm, or None."""
        return self.norm() if has_norm else None

    def has_norm_in_front(self, index: int) -> bool:
        """Whether a layer may have a norm before its attention; ModernBERT's first has none."""
        return index > 0 or self.body.first_norm

    def dropout(self, fact: Any) -> LayerDropout | None:
        """Dropout at this rate, or None at rate zero, so that the state holds no random key."""
        share = rate(self.config, fact)
        return LayerDropout(share, rngs=self.init.rngs) if share else None

    def embedding(self, rows: int, width: int) -> "Embedding":
        """A table with a row for each token or position."""
        std = read(self.config, "initializer_range") or 0.02
        dtypes: dict[str, Any] = {"dtype": self.init.dtype, "param_dtype": self.init.param_dtype}
        start = nnx.initializers.normal(std)
        return Embedding(rows, width, embedding_init=start, rngs=self.init.rngs, **dtypes)

    def positions(self) -> "Embedding | None":
        """The table of learned positions, or None."""
        body, config = self.body, self.config
        if body.positions is None:
            return None
        rows = count(config, body.positions) + read(config, body.position_offset)
        return self.embedding(rows, self.width)

    def param(self, shape: tuple[int, ...]) -> nnx.Param:
        """A trained array that starts from zeros."""
        return nnx.Param(jnp.zeros(shape, self.init.param_dtype))


class Embedding(nnx.Embed):
    """`table[tokens]`; the tokens and the table may be sharded.

    Shapes: tokens `*B T` -> `*B T D`. A token that the table lacks is an error, under jit NaN.
    """

    def __call__(
        self, inputs: Int[Array, "... T"], out_sharding: Any = None
    ) -> Float[Array, "... T D"]:
        """The rows of the table."""
        self.check(inputs)
        inputs = jnp.where(inputs < 0, self.num_embeddings, inputs)  # else they count from the end
        table = self._table()
        mesh = jax.typeof(table).sharding.mesh
        if mesh.explicit_axes and out_sharding is None:
            rows = jax.typeof(inputs).sharding.spec
            out_sharding = jax.NamedSharding(mesh, jax.P(*rows, None))
        return table.at[inputs].get(mode="fill", fill_value=jnp.nan, out_sharding=out_sharding)

    def attend(
        self, query: Float[Array, "... D"], out_sharding: Any = None
    ) -> Float[Array, "... V"]:
        """The product with each row of the table."""
        axes = (((query.ndim - 1,), (0,)), ((), ()))
        return dot_general_sharded(query, self._table().T, axes, out_sharding=out_sharding)

    def check(self, inputs: Any) -> None:
        """Raises ValueError for numbers that are known to have no row."""
        if not is_known(inputs) or not inputs.size:
            return
        most, x = self.num_embeddings - 1, np.asarray(inputs)
        if x.min() < 0 or x.max() > most:
            which = f"has rows 0 to {most}; got {x.min()} to {x.max()}"
            raise ValueError(f"The table of tokens or positions {which}.")

    def _table(self) -> jax.Array:
        table = jnp.asarray(self.embedding[...])  # perhaps of numpy
        return table if self.dtype is None else table.astype(self.dtype)


class BranchScale(nnx.Module):
    """`x * scale`, with a trained factor for each component (DINOv2's LayerScale)."""

    def __init__(self, build: Build):
        start = number(build.config, "layerscale_value")
        self.scale = nnx.Param(jnp.full(build.width, start, build.init.param_dtype))

    def __call__(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        """The scaled components."""
        return x * aligned(self.scale[...], x)


class Mlp(nnx.Module):
    """`down(act(up(x)))`, or `down(act(gate(x)) * up(x))`."""

    def __init__(self, build: Build):
        config, facts, init = build.config, build.body.mlp, build.init
        width, hidden = build.width, count(config, facts.width)
        bias = flag(config, facts.bias)
        gated = flag(config, facts.is_gated)
        self.gate_proj = init.linear(width, hidden, use_bias=bias) if gated else None
        self.up_proj = init.linear(width, hidden, use_bias=bias)
        self.down_proj = init.linear(hidden, width, use_bias=bias)
        self.activation = activation_of(config, facts.activation)
        self.dropout = build.dropout(facts.dropout)

    def __call__(
        self, x: Float[Array, "*B T D"], deterministic: bool | None = None
    ) -> Float[Array, "*B T D"]:
        """The feed-forward part, token by token."""
        act, up = ACTIVATIONS[self.activation], self.up_proj(x)
        hidden = act(up) if self.gate_proj is None else act(self.gate_proj(x)) * up
        return self.down_proj(dropped(hidden, self.dropout, deterministic))


class Block(nnx.Module):
    """A layer: attention and a feed-forward part, with norms and residual sums.

    Each norm is None where the model type has none there.
    """

    def __init__(self, build: Build, index: int):
        config, body = build.config, build.body
        order = body.order_of(config)
        before = order in ("before", "both", "parallel", "shared")
        after = order in ("after", "both", "sums")
        self.norm_before_attention = build.norm_if(before and build.has_norm_in_front(index))
        self.self_attn = build.attention_of(index)
        self.norm_before_mlp = build.norm_if(before and order != "shared")
        self.mlp = Mlp(build)
        self.norm_after_attention, self.norm_after_mlp = (
            BranchScale(build) if body.branch_scale else build.norm_if(after) for _ in range(2)
        )
        self.order, self.factor = order, float(read(config, body.residual_factor))
        self.dropout = build.dropout(body.dropout)

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        cache: Any = None,
        deterministic: bool | None = None,
        **call,
    ) -> tuple[Float[Array, "*B T D"], Any]:
        """The next hidden states, and the cache with these tokens, or None.

        Args:
          x: hidden states.
          cache: of the layer's attention.
          deterministic: overrides `train()` and `eval()`.
          call: further keywords of the attention, such as valid.
        """
        h = applied(self.norm_before_attention, x)
        call = {**call, "deterministic": deterministic}
        if cache is None:
            y = self.self_attn(h, **call)
        else:
            y, cache = self.self_attn(h, cache=cache, **call)
        y = dropped(y, self.dropout, deterministic)
        if self.order in ("parallel", "shared"):
            h = h if self.norm_before_mlp is None else self.norm_before_mlp(x)
            return x + y + dropped(self.mlp(h, deterministic), self.dropout, deterministic), cache
        x = self._sum(x, y, self.norm_after_attention)
        y = self.mlp(applied(self.norm_before_mlp, x), deterministic)
        y = dropped(y, self.dropout, deterministic)
        return self._sum(x, y, self.norm_after_mlp), cache

    def _sum(self, x: Array, y: Array, norm: Module | None) -> Array:
        """The residual sum, with the norm of the sum or of what is added."""
        if self.order == "sums":
            return applied(norm, x + y)
        y = applied(norm, y)
        return x + (y if self.factor == 1 else y * jnp.asarray(self.factor, y.dtype))


def applied(module: Module | None, x: Array) -> Array:
    """`module(x)`, or x without a module."""
    return x if module is None else module(x)


def dropped(x: Array, dropout: LayerDropout | None, deterministic: bool | None) -> Array:
    """x after dropout, if there is one."""
    return x if dropout is None else dropout(x, deterministic=deterministic)


def token_numbers(tokens: Any) -> Int[Array, "*B T"]:
    """The numbers of tokens as an array; TypeError or ValueError for anything else."""
    if isinstance(tokens, list | tuple) and len({np.size(row) for row in tokens}) > 1:
        raise ValueError(
            "Rows of tokens have one length: fill shorter ones with any token, and say which are "
            "real by valid=."
        )
    tokens = jnp.asarray(tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"Tokens are whole numbers, as a tokenizer gives; got {tokens.dtype}.")
    if tokens.ndim == 0:
        raise ValueError("Tokens have an axis of length, *B T; got one number.")
    return tokens


def real_tokens(tokens: Int[Array, "*B T"], valid: Any) -> Bool[Array, "*B T"] | None:
    """Which tokens are real, in a permuted layout too; None for all."""
    return None if valid is None else check_tokens("valid", valid, tokens[..., None])


def learned_positions(
    x: Float[Array, "*B T D"], real: Bool[Array, "*B T"] | None, valid: Any, cache: Any
) -> Int[Array, "*#B T"]:
    """The positions of tokens among the real ones of their rows, continuing from a cache.

    Padding gets a position that the table has.
    """
    if cache is not None:
        return jnp.maximum(cache.next_positions(x.shape[-2], real), 0)
    order = indices_of(x, real, valid=valid).order
    if order is not None:
        return order
    slots = positions_of(x, -2)  # of a permuted layout
    return jnp.arange(x.shape[-2], dtype=jnp.int32) if slots is None else jnp.asarray(slots)


def state_at(hidden: Float[Array, "*B T D"], slot: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    """The hidden state of one token of each row."""
    is_it = jax.nn.one_hot(slot, hidden.shape[-2], dtype=bool)
    return jnp.where(is_it[..., None], hidden, jnp.zeros((), hidden.dtype)).sum(-2)


def zero_padding(x: Array, real: Bool[Array, "*B T"] | None) -> Array:
    """x with zeros at padding, whatever is there; tokens `*B T` or states `*B T D`."""
    if real is None:
        return x
    shown = real if x.ndim == real.ndim else real[..., None]
    return jnp.where(shown, x, jnp.zeros((), x.dtype))
