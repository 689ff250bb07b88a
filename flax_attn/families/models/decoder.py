"""A model from tokens to logits."""

from typing import Any, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..._internal.arrays import aligned
from ...masks import Mask
from .blocks import (
    Build,
    applied,
    dropped,
    learned_positions,
    real_tokens,
    token_numbers,
    zero_padding,
)
from .facts import flag, read
from .transformer import Caches, Transformer


class ModelCall(TypedDict, total=False):
    """Keywords of a decoder's call, for its overloads."""

    valid: Bool[Array, "*#B T"] | Mask | None
    positions: Int[Array, "... T"] | None
    deterministic: bool | None


class Decoder(Transformer):
    """A causal language model, as `families.model` builds it.

    Shapes: tokens `*B T` -> logits `*B T V`.

    Attributes:
      embed_tokens: the table of the tokens, which a tied head shares.
      embed_positions: the table of learned positions, or None.
      stack, layers: the layers, see `Transformer`.
      norm: that of the last hidden states, or None.
      lm_head: the projection to the logits; None if it is tied.
      config: the published config as JSON.
    """

    def __init__(self, build: Build, config: str, *, scan: bool, remat: bool):
        fields, body, init, width = build.config, build.body, build.init, build.width
        narrow = read(fields, body.embedding_width) or width
        words, is_narrow = fields.count("vocab_size"), narrow != width
        self.embed_tokens = build.embedding(words, narrow)
        self.project_in = init.linear(narrow, width, use_bias=False) if is_narrow else None
        self.project_out = init.linear(width, narrow, use_bias=False) if is_narrow else None
        self.position_offset = read(fields, body.position_offset)
        self.embed_positions = build.positions()
        self.set_layers(build, scan, remat)
        self.norm = build.norm_if(flag(fields, body.final_norm))
        is_tied = flag(fields, body.is_tied)
        self.lm_head = None if is_tied else init.linear(narrow, words, use_bias=False)
        self.dropout = build.dropout(body.embedding_dropout)
        self.embedding_factor = float(read(fields, body.embedding_factor))
        self.logit_factor = float(read(fields, body.logit_factor))
        self.softcap = read(fields, body.softcap)
        self.config = config

    @overload
    def __call__(
        self, tokens: Int[Array, "*B T"], *, cache: None = None, **call: Unpack[ModelCall]
    ) -> Float[Array, "*B T V"]: ...
    @overload
    def __call__(
        self, tokens: Int[Array, "*B T"], *, cache: Caches, **call: Unpack[ModelCall]
    ) -> tuple[Float[Array, "*B T V"], Caches]: ...
    def __call__(
        self,
        tokens: Int[Array, "*B T"],
        *,
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        positions: Int[Array, "... T"] | None = None,
        cache: Caches | None = None,
        deterministic: bool | None = None,
    ) -> Any:
        """The logits of the token after each, `*B T V`; with a cache also the new cache.

        Args:
          tokens: their numbers.
          valid: which tokens are real: an array, `Lengths(n)` for the first n of a row, or
            `~Lengths(n)` for those after n tokens of padding. Padding reaches no other token.
          positions: of the tokens; None counts the real tokens of a row, continuing from the cache.
          cache: from `init_cache` or an earlier call.
          deterministic: overrides `train()` and `eval()`.
        """
        x, cache = self.hidden(
            tokens, valid=valid, positions=positions, cache=cache, deterministic=deterministic
        )  # *B T D
        logits = self.logits(x)  # *B T V
        return logits if cache is None else (logits, cache)

    def hidden(
        self,
        tokens: Int[Array, "*B T"],
        *,
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        positions: Int[Array, "... T"] | None = None,
        cache: Caches | None = None,
        deterministic: bool | None = None,
    ) -> tuple[Float[Array, "*B T D"], Caches | None]:
        """The last hidden states after the norm, and the new cache or None; see `__call__`."""
        tokens = token_numbers(tokens)
        real = real_tokens(tokens, valid)
        x = self.embed_tokens(zero_padding(tokens, real))  # *B T E
        x = applied(self.project_in, x)  # *B T D
        x = times(x, self.embedding_factor)
        if self.embed_positions is not None:
            first = None if cache is None else self._first_cache(cache)
            at = learned_positions(x, real, valid, first) if positions is None else positions
            x = x + aligned(self.embed_positions(at + self.position_offset), x)
        x = zero_padding(dropped(x, self.dropout, deterministic), real)
        call = {"valid": valid, "positions": positions, "deterministic": deterministic}
        x, cache = self.run_layers(x, cache, call)
        return applied(self.norm, x), cache

    def logits(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T V"]:
        """The logits of hidden states."""
        x = applied(self.project_out, x)
        x = self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)
        x = times(x, self.logit_factor)
        if self.softcap is None:
            return x
        cap = jnp.asarray(self.softcap, x.dtype)
        return jnp.tanh(x / cap) * cap

    def init_cache(self, batch: int | tuple[int, ...], length: int, **options: Any) -> Caches:
        """Empty caches of all layers, used as `logits, cache = model(tokens, cache=cache)`.

        Args:
          batch: the batch axes `*B`; an int is one axis, () none.
          length: capacity of a row in tokens.
          options: as in `GroupedQueryAttention.init_cache`.

        Raises:
          ValueError: for sizes and options that do not fit, and more tokens than learned positions.
        """
        if self.embed_positions is not None:
            most = self.embed_positions.num_embeddings - self.position_offset
            if length > most:
                raise ValueError(f"The model has {most} learned positions; got length={length}.")
        made = [
            block.self_attn.init_cache(batch, length, layers=self.periods, **options)
            for block in self.stack
        ]
        return [*made, *(x.self_attn.init_cache(batch, length, **options) for x in self.layers)]

    def _first_cache(self, caches: Caches) -> Any:
        """The cache of the first layer."""
        return jax.tree.map(lambda x: x[0], caches[0]) if self.stack else caches[0]


def times(x: Array, factor: float) -> Array:
    """`x * factor`, with the factor rounded to the dtype of x."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)
