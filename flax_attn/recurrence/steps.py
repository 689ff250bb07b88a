"""The recurrence token by token, the reference for every faster form."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tokens(NamedTuple):
    """Inputs of a recurrence, all with the axes `*B T N` and one more.

    Attributes:
      q, k: `*B T N H`, read and write vectors of the state.
      v: `*B T N h`, values to write.
      log_decay: `*B T N H` or `*B T N 1`; None for none. -inf empties the state.
      beta: `*B T N 1`, the strength of a correction; None without the delta rule.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array | None
    beta: jax.Array | None


@jax.jit
def by_steps(tokens: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outputs `*B T N h` and the last state `*B N H h`, by a scan over the tokens.

    `S <- exp(log_decay) S + k u'` and `o = S' q`, where u is v, or `beta (v - S' k)` of the decayed
    state with the delta rule. All is computed in the state's dtype.
    """
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x.astype(state.dtype), -3, 0), tokens)

    def one(s: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
        s = s if token.log_decay is None else s * jnp.exp(token.log_decay)[..., None]
        u = token.v
        if token.beta is not None:
            u = token.beta * (u - jnp.einsum("...h,...hd->...d", token.k, s))
        s = s + token.k[..., None] * u[..., None, :]  # *B N H h
        return s, jnp.einsum("...h,...hd->...d", token.q, s)

    state, o = jax.lax.scan(one, state, tokens)
    return jnp.moveaxis(o, 0, -3), state
