"""Axes in another order: fused projections, heads, groups, merges."""

import jax.numpy as jnp

from flax_attn.parity import Rule

from .attention import attend, f_attend, f_merge, f_qkv, f_split, merge, qkv, split
from .fault import Strange
from .pair import B, D, H, N, Pair, T, linear, normal, projections, torch

G = "axis orders"
X = normal("x", B, T, D)
K, BIG = 3, 6  # key heads and query heads where they are grouped
FUSED = "fused|order|interleav|, 3, |, 2, "


def fused(theirs, ours, parts=3, width=N * H, out=N * H, name="qkv"):
    """One projection for several: `theirs(y)` B N T H each, `ours(share, y)` B T N H each."""

    def original(m, x):
        return m.o(merge(theirs(getattr(m, name)(x))))

    def port(m, share, x):
        return m.o(f_merge(ours(share, getattr(m, name)(x))))

    return Pair({name: linear(D, parts * width), "o": linear(out, D)}, original, port, (X,))


def _three(y):
    """Torch's [3, N, H]."""
    return [part.transpose(1, 2) for part in y.unflatten(-1, (3, N, H)).unbind(2)]


def _f_three(share, y):
    right = [part for part in jnp.moveaxis(y.reshape(B, T, 3, N, H), 2, 0)]
    wrong = [part for part in jnp.moveaxis(y.reshape(B, T, N, 3, H), 3, 0)]
    return f_attend(*map(share, right, wrong))


def _f_width_last(share, y):
    right = jnp.moveaxis(y.reshape(B, T, 3, N, H), 2, 0)
    wrong = jnp.moveaxis(y.reshape(B, T, N, H, 3), 4, 0)
    return f_attend(*map(share, right, wrong))


def _f_keys_first(share, y):
    q, k, v = jnp.moveaxis(y.reshape(B, T, 3, N, H), 2, 0)
    return f_attend(share(q, k), share(k, q), v)


def gated():
    """Queries and their gates in one projection, [N, 2 H]."""

    def original(m, x):
        q, gate = m.q(x).unflatten(-1, (N, 2 * H)).chunk(2, dim=-1)
        out = attend(q.transpose(1, 2), split(m.k(x), N), split(m.v(x), N))
        return m.o(merge(out) * torch.sigmoid(gate.flatten(-2)))

    def port(m, share, x):
        y = m.q(x)
        q, gate = jnp.split(y.reshape(B, T, N, 2 * H), 2, axis=-1)
        wrong_q, wrong_gate = (f_split(z, N) for z in jnp.split(y, 2, axis=-1))
        q, gate = share(q, wrong_q), share(gate, wrong_gate)
        out = f_attend(q, f_split(m.k(x), N), f_split(m.v(x), N))
        return m.o(f_merge(out * (1 / (1 + jnp.exp(-gate)))))

    return Pair({**projections(), "q": linear(D, 2 * N * H)}, original, port, (X,))


def keys_and_values():
    """Keys and values in one projection, [2, K, H]; the port reads [K, 2, H]."""

    def original(m, x):
        k, v = (part.transpose(1, 2) for part in m.kv(x).unflatten(-1, (2, N, H)).unbind(2))
        return m.o(merge(attend(split(m.q(x), N), k, v)))

    def port(m, share, x):
        y = m.kv(x)
        right = jnp.moveaxis(y.reshape(B, T, 2, N, H), 2, 0)
        wrong = jnp.moveaxis(y.reshape(B, T, N, 2, H), 3, 0)
        k, v = map(share, right, wrong)
        return m.o(f_merge(f_attend(f_split(m.q(x), N), k, v)))

    parts = {"q": linear(D, N * H), "kv": linear(D, 2 * N * H), "o": linear(N * H, D)}
    return Pair(parts, original, port, (X,))


def attended(wrong=None, merged=None, rules=None, heads=N, kv_heads=None):
    """Plain attention; `wrong(share, q, k, v)` of what goes in, `merged(share, context)` behind."""
    group = heads // (kv_heads or heads)

    def original(m, x):
        q, k, v = qkv(m, x, heads, kv_heads=kv_heads)
        k, v = (y.repeat_interleave(group, 1) for y in (k, v))
        return m.o(merge(attend(q, k, v)))

    def port(m, share, x):
        q, k, v = f_qkv(m, x, heads, kv_heads=kv_heads)
        q, k, v = wrong(share, q, k, v) if wrong else (q, k, v)
        out = f_attend(q, k, v)
        return m.o(merged(share, out) if merged else f_merge(out))

    parts = projections(n=heads, k=kv_heads, h=H if heads == N else 2)
    rule = (lambda share: rules if share else ()) if rules else lambda share: ()
    return Pair(parts, original, port, (X,), rules=rule)


def _width_first(share, *parts):
    wrong = [y.reshape(B, T, H, N).swapaxes(2, 3) for y in parts]
    return map(share, parts, wrong)


def _not_moved_back(share, out):
    return share(f_merge(out), out.swapaxes(1, 2).reshape(B, T, N * H))


def _reversed(share, out):
    return share(f_merge(out), f_merge(out[:, :, ::-1]))


def _width_merged(share, out):
    return share(f_merge(out), f_merge(out.swapaxes(2, 3)))


def _tiled(share, q, k, v):
    order = jnp.arange(BIG)
    right, wrong = order // (BIG // K), order % K
    return q, share(k[:, :, right], k[:, :, wrong]), share(v[:, :, right], v[:, :, wrong])


def _queries_tiled(share, q, k, v):
    """Keys as they are, queries regrouped as if heads had been tiled."""
    k, v = (jnp.repeat(y, BIG // K, axis=2) for y in (k, v))
    order = jnp.arange(BIG).reshape(K, -1).T.ravel()
    return share(q, q[:, :, order]), k, v


def transposed():
    """Scores of keys over queries."""

    def original(m, x):
        return m.o(merge(attend(*qkv(m, x, N))))

    def port(m, share, x):
        def product(q, k):
            right = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
            return share(right, right.mT)

        return m.o(f_merge(f_attend(*f_qkv(m, x, N), product=product)))

    return Pair(projections(), original, port, (X,))


TURNED = (Rule("o.weight -> o.kernel", "d (n h) -> (h n) d", n=N),)
FAULTS = [
    Strange(
        "[N, 3, H] for [3, N, H]",
        G,
        fused(lambda y: attend(*_three(y)), _f_three),
        "query|between qkv and query",
        FUSED,
    ),
    Strange(
        "[N, H, 3] for [3, N, H]",
        G,
        fused(lambda y: attend(*_three(y)), _f_width_last),
        "query|between qkv and query",
        FUSED,
    ),
    Strange(
        "keys, queries, values for queries, keys, values",
        G,
        fused(lambda y: attend(*_three(y)), _f_keys_first),
        "query|between qkv and query",
        "key in its place|exchanged|swapped|order",
    ),
    Strange(
        "heads split with their width first",
        G,
        attended(_width_first),
        "query|between q and query",
        "interleaved|width before|order",
    ),
    Strange(
        "heads not moved back before they are merged",
        G,
        attended(merged=_not_moved_back),
        "between context and o",
        "heads merged|moving them back|transpose|order",
    ),
    Strange(
        "heads merged with their width first",
        G,
        attended(merged=_width_merged),
        "between context and o",
        "interleaved|width|order",
    ),
    Strange(
        "heads in reversed order before the output",
        G,
        attended(merged=_reversed),
        "between context and o",
        "reversed",
    ),
    Strange("attention transposed", G, transposed(), "scores", "exchanged|transposed|swapped"),
    Strange(
        "queries and gates halved as a whole, not each head",
        G,
        gated(),
        "query|between q and query",
        "gate|fused|order|, 2, ",
    ),
    Strange(
        "[K, 2, H] for [2, K, H]",
        G,
        keys_and_values(),
        "key|between kv and key",
        FUSED,
    ),
    Strange(
        "key heads n % K for n // G",
        G,
        attended(_tiled, heads=BIG, kv_heads=K),
        "key|between k and key",
        "tiled|n % ",
    ),
    Strange(
        "queries grouped as for tiled keys",
        G,
        attended(_queries_tiled, heads=BIG, kv_heads=K),
        "query|between q and query",
        "order|tiled|turned",
    ),
    Strange(
        "the output's kernel with its heads' width first",
        G,
        attended(rules=TURNED),
        "o",
        "interleaved|order|width",
        low=False,
    ),
]
