"""`generate`: greedy and sampled continuations, in one compiled loop over a cache."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int

from ..._internal.checks import check_positive, checked_arguments, is_known, valid_tokens
from ...cache.meshes import explicit_mesh, resharded
from ...masks import Mask
from ...sharding.specs import spec_of
from .blocks import state_at, token_numbers
from .decoder import Decoder


@checked_arguments
def generate(
    model: Any,
    prompt: Int[Array, "B T"],
    new: int,
    *,
    valid: Bool[Array, "B T"] | Mask | None = None,
    keys: Array | None = None,
    temperature: float = 1.0,
    end: int | None = None,
) -> Int[Array, "B new"]:
    """Returns the tokens that follow each prompt.

    Each row depends on its own prompt and key alone, whatever the other rows are, and however its
    prompt is padded. Dropout is off.

    Args:
      model: a decoder of `families.model`.
      prompt: tokens.
      new: the number of tokens to add.
      valid: which tokens of the prompts are real, as a decoder takes it; padding may stand left or
        right.
      keys: a random key for each row, `B`, to sample by; None takes the likeliest token.
      temperature: divides the logits before sampling.
      end: the token that ends a row, and fills what is left of it; None for no end. The loop stops
        when all rows have ended.

    Raises:
      ValueError: for more tokens than the model has learned positions, prompts or keys of another
        shape, no new token, and a temperature without keys.
      TypeError: for another model than a decoder, and tokens that are no whole numbers.

    >>> from flax_attn import families
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 5}
    >>> model = families.model(config, rngs=nnx.Rngs(0))
    >>> generate(model, jnp.ones((2, 3), jnp.int32), 4).shape
    (2, 4)
    """
    if not isinstance(model, Decoder):
        raise TypeError(f"generate takes a decoder of families.model; got {type(model).__name__}.")
    prompt = token_numbers(prompt)
    if prompt.ndim != 2:
        raise ValueError(f"The prompts must have shape (rows, length); got {prompt.shape}.")
    check_positive(new=new)
    real = valid_tokens("valid", valid, prompt.shape)
    model.embed_tokens.check(jnp.where(real, prompt, 0))
    if keys is None and is_known(temperature) and temperature != 1:
        raise ValueError(
            f"temperature={temperature} is of sampling, which needs keys: pass keys="
            f"jax.random.split(jax.random.key(0), {len(prompt)}), or leave temperature out."
        )
    if keys is not None and jnp.shape(keys)[:1] != prompt.shape[:1]:
        raise ValueError(
            f"keys are one for each of the {len(prompt)} rows, as jax.random.split(key, "
            f"{len(prompt)}) gives; got shape {jnp.shape(keys)}."
        )
    return _generated(model, prompt, new, valid, keys, temperature, end)


@nnx.jit(static_argnums=2)
def _generated(
    model: Decoder,
    prompt: Int[Array, "B T"],
    new: int,
    valid: Any,
    keys: Array | None,
    temperature: float,
    end: int | None,
) -> Int[Array, "B new"]:
    """The loop of `generate`."""
    rows, length = prompt.shape
    real = valid_tokens("valid", valid, prompt.shape)
    mesh = explicit_mesh(prompt)

    def with_rows(x: Any, axis: int = 0) -> Any:
        """x with its rows sharded as those of the prompt, over Explicit axes."""
        return x if mesh is None else resharded(x, mesh, *[None] * axis, spec_of(prompt)[0])

    def choose(hidden: Array, step: Any) -> Array:
        logits = with_rows(model.logits(hidden)[:, 0])  # B V
        if keys is None:
            return logits.argmax(-1).astype(prompt.dtype)
        each = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
        scaled = logits / jnp.asarray(temperature, logits.dtype)
        return jax.vmap(jax.random.categorical)(each, scaled).astype(prompt.dtype)

    def step(state: Any) -> Any:
        at, word, words, ended, cache = state
        words = jnp.where(jnp.arange(new, dtype=at.dtype)[None] == at, word[:, None], words)
        ended = ended if end is None else ended | (word == end)
        hidden, cache = model.hidden(word[:, None], cache=cache, deterministic=True)
        following = choose(hidden, at + 1)
        if end is not None:
            following = jnp.where(ended, end, following)
        return at + 1, following, words, ended, cache

    stacked, caches = len(model.stack), model.init_cache(rows, length + new)
    caches = [with_rows(x, axis=int(i < stacked)) for i, x in enumerate(caches)]
    hidden, caches = model.hidden(prompt, valid=valid, cache=caches, deterministic=True)
    last = length - 1 - real[:, ::-1].argmax(-1)  # slot of the last real token
    first = choose(state_at(hidden, last)[:, None], 0)
    words = with_rows(jnp.full((rows, new), 0 if end is None else end, prompt.dtype))
    state = (jnp.int32(0), first, words, with_rows(jnp.zeros(rows, bool)), caches)
    return jax.lax.while_loop(lambda x: (x[0] < new) & ~x[3].all(), step, state)[2]
