"""Wrong steps that do not fit into a row, and other texts of right ones: of pairs' faults alone."""

import jax
import jax.numpy as jnp
from flax import nnx

from flax_attn.parity import Rule
from flax_attn.taps import tap


def stopped(x, share=1.0):
    """`x`, so much of whose gradient is stopped."""
    return x + share * (jax.lax.stop_gradient(x) - x)


class Nothing(nnx.Module):
    """No dropout."""

    def __init__(self, rngs):
        pass

    def __call__(self, x):
        return x


def told(key, share, shape):
    """A mask that is drawn for one sequence and told as one for all."""
    one = jax.random.uniform(key, shape[1:]) < share
    return tap("keep", jnp.broadcast_to(one, shape))


WIDTH_FIRST = (Rule("o.weight -> o.kernel", "d (n h) -> (h n) d", n=3),)
CARRIED = (
    Rule("qkv.weight -> qkv.kernel", "(c n h) i -> i (n c h)", c=3, n=3),
    Rule("qkv.bias -> qkv.bias", "(c n h) -> (n c h)", c=3, n=3),
)


def heads_first(q, k, v):
    """Queries, keys and values as torch has them, B N T H."""
    q, k, v = (y.swapaxes(1, 2) for y in (q, k, v))
    return tap("query", q), tap("key", k), tap("value", v)


def in_blocks(q, k, v):
    """Attention over two blocks of keys put together, no tap inside."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    blocks = [(s[..., :3], v[:, :3]), (s[..., 3:], v[:, 3:])]
    logs = [jax.nn.logsumexp(block, -1) for block, _ in blocks]
    outs = [jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(block), w) for block, w in blocks]
    share = jax.nn.sigmoid(logs[0] - logs[1]).swapaxes(1, 2)[..., None]
    return share * outs[0] + (1 - share) * outs[1]
