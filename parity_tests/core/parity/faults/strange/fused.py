"""Originals that call `scaled_dot_product_attention`, whose softmax no hook sees."""

import jax
import jax.numpy as jnp
import numpy as np

from .attention import F, f_attend, f_merge, f_qkv, f_scaled, f_scores, merge, qkv, same
from .fault import Strange
from .pair import B, D, H, N, Pair, S, T, linear, normal, parameter, projections, torch

G = "SDPA originals"
X, MEMORY = normal("x", B, T, D), normal("memory", B, S, D)
BIAS = normal("bias", N, T, S)
ROWS, COLUMNS = np.arange(T)[:, None], np.arange(S)
THERE = np.ones((B, 1, 1, S), bool)
THERE[0, ..., -2:], THERE[1, ..., 1] = False, False
EMPTY = (COLUMNS <= ROWS + 2) & (ROWS != 1)  # the second row sees nothing
HEADS, KEYS = 6, 3


def crossed(call, modify_logits=None, product=f_scaled, softmax=None, parts=None, **options):
    """Attention to a memory: `call(m, q, k, v)` of torch, a change of the scores in Flax."""

    def original(m, x, memory):
        return m.o(merge(call(m, *qkv(m, x, N, memory))))

    def port(m, share, x, memory):
        change = {
            "modify_logits": (lambda s: modify_logits(m, share, s)) if modify_logits else same,
            "product": lambda q, k: (
                product(share, q, k) if product is not f_scaled else f_scaled(q, k)
            ),
            "softmax": (lambda s: softmax(share, s)) if softmax else jax.nn.softmax,
        }
        return m.o(f_merge(f_attend(*f_qkv(m, x, N, memory), **change)))

    return Pair({**projections(), **(parts or {})}, original, port, (X, MEMORY), options=options)


def sdpa(**given):
    """Torch's call with these arguments, arrays as tensors; floating ones in the query's dtype."""

    def call(m, q, k, v):
        named = {}
        for name, x in given.items():
            x = x(m) if callable(x) else x
            x = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
            named[name] = x.to(q.dtype) if torch.is_tensor(x) and x.is_floating_point() else x
        return F.scaled_dot_product_attention(q, k, v, **named)

    return call


def scaled(right, wrong):
    return lambda share, q, k: f_scores(q, k) * share.of(right, wrong)


def one_row(right, wrong):
    """The same, at low amplitude in the last row alone."""
    few = np.broadcast_to(right, np.broadcast_shapes(right.shape, wrong.shape)).copy()
    few[..., -1, :] = np.broadcast_to(wrong, few.shape)[..., -1, :]

    def modify_logits(m, share, s):
        seen = {0.0: right, 1.0: wrong}.get(share.size, few)
        return jnp.where(jnp.asarray(seen), s, -jnp.inf)

    return modify_logits


def _biased(m, share, s):
    bias = jnp.asarray(BIAS, s.dtype)
    return share(s + bias, s)


def _bias_scaled(m, share, s):
    bias = jnp.asarray(BIAS, s.dtype)
    return share(s + bias, s + bias / H**0.5)


def _capped(m, share, s):
    seen = jnp.asarray(COLUMNS <= ROWS)
    return jnp.where(seen, share(s, 5 * jnp.tanh(s / 5)), -jnp.inf)


def _bias_capped(m, share, s):
    bias = m.bias[...]
    return s + share(2 * jnp.tanh(bias / 2), bias)


def _zeros(s):
    """Rows without a visible key give zeros."""
    most = jnp.max(s, axis=-1, keepdims=True)
    raised = jnp.exp(s - jnp.where(jnp.isfinite(most), most, 0.0))
    total = raised.sum(-1, keepdims=True)
    return raised / jnp.where(total == 0, 1.0, total)


def average(s):
    """Rows without a visible key give the average."""
    return jax.nn.softmax(jnp.where(jnp.isfinite(s), s, float(jnp.finfo(s.dtype).min)))


def _added(m, share, s):
    return s + jnp.asarray(ADDED, s.dtype)


def _zeros_of_least(s):
    """Rows of which all is hidden by the lowest number give zeros."""
    return jnp.where(s.max(-1, keepdims=True) < -1e300, 0.0, jax.nn.softmax(s))


def _sinks():
    """A sink for each head: one more key, whose score is learnt and whose value is zero."""

    def original(m, x, memory):
        q, k, v = qkv(m, x, N, memory)
        k, v = (F.pad(y, (0, 0, 0, 1)) for y in (k, v))
        bias = F.pad(q.new_zeros(B, N, T, S), (0, 1)) + F.pad(m.sinks[:, None, None], (S, 0))
        return m.o(merge(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))

    def port(m, share, x, memory):
        def softmax(s):
            sinks = jnp.broadcast_to(m.sinks[...][:, None, None], (*s.shape[:-1], 1))
            with_sinks = jax.nn.softmax(jnp.concatenate([s, sinks], -1))[..., :-1]
            return share(with_sinks, jax.nn.softmax(s))

        return m.o(f_merge(f_attend(*f_qkv(m, x, N, memory), softmax=softmax)))

    return Pair({**projections(), "sinks": parameter(N)}, original, port, (X, MEMORY))


def _grouped():
    """Torch repeats each key head for its neighbours (`enable_gqa`); the port tiles them."""

    def original(m, x, memory):
        q, k, v = qkv(m, x, HEADS, memory, KEYS)
        return m.o(merge(F.scaled_dot_product_attention(q, k, v, enable_gqa=True)))

    def port(m, share, x, memory):
        q, k, v = f_qkv(m, x, HEADS, memory, KEYS)
        order = jnp.arange(HEADS)
        k, v = (share(y[:, :, order // 2], y[:, :, order % KEYS]) for y in (k, v))
        return m.o(f_merge(f_attend(q, k, v)))

    return Pair(projections(n=HEADS, k=KEYS, h=2), original, port, (X, MEMORY))


def _wide_values():
    """Values wider than keys: the port scales by the root of the values' width."""
    wide = 9

    def original(m, x):
        q, k, v = qkv(m, x, N)
        return m.o(merge(F.scaled_dot_product_attention(q, k, v)))

    def port(m, share, x):
        scale = share.of(H**-0.5, wide**-0.5)
        return m.o(f_merge(f_attend(*f_qkv(m, x, N), product=lambda q, k: f_scores(q, k) * scale)))

    parts = {**projections(), "v": linear(D, N * wide), "o": linear(N * wide, D)}
    return Pair(parts, original, port, (X,))


def window(width):
    return (COLUMNS <= ROWS + 2) & (COLUMNS > ROWS + 2 - width)


CAUSAL = COLUMNS <= ROWS
ADDED = np.where(EMPTY, 0.0, float(np.finfo(np.float64).min))
FAULTS = [
    Strange(
        "not scaled",
        G,
        crossed(sdpa(), product=scaled(H**-0.5, 1.0)),
        "scores",
        "scale",
    ),
    Strange(
        "a scale of its own taken for the usual one",
        G,
        crossed(sdpa(scale=0.3), product=scaled(0.3, H**-0.5)),
        "scores",
        "scale",
    ),
    Strange("scaled by the values' width", G, _wide_values(), "scores", "scale"),
    Strange(
        "causal to the last key, where torch counts from the first",
        G,
        crossed(sdpa(is_causal=True), one_row(CAUSAL, COLUMNS <= ROWS + S - T)),
        "scores",
        "mask|causal|align",
    ),
    Strange(
        "an added mask of -inf ignored",
        G,
        crossed(sdpa(attn_mask=np.where(THERE, 0.0, -np.inf)), one_row(THERE, np.ones_like(THERE))),
        "scores",
        "mask",
        low=False,
    ),
    Strange("an added bias ignored", G, crossed(sdpa(attn_mask=BIAS), _biased), "scores", "bias"),
    Strange(
        "an added bias scaled too",
        G,
        crossed(sdpa(attn_mask=BIAS), _bias_scaled),
        "scores",
        "bias|scale",
    ),
    Strange(
        "the mask inverted",
        G,
        crossed(sdpa(attn_mask=THERE), one_row(THERE, ~THERE)),
        "scores",
        "inverted",
        low=False,
    ),
    Strange(
        "a softcap that the fused call does not have",
        G,
        crossed(sdpa(is_causal=True), _capped),
        "scores",
        "softcap|tanh",
    ),
    Strange(
        "the softcap of the bias left out",
        G,
        crossed(
            sdpa(attn_mask=lambda m: 2 * torch.tanh(m.bias / 2)),
            _bias_capped,
            parts={"bias": parameter(N, T, S)},
        ),
        "scores",
    ),
    Strange(
        "a window one wider",
        G,
        crossed(sdpa(attn_mask=window(3)), one_row(window(3), window(4))),
        "scores",
        "window|shown and 0 hidden",
    ),
    Strange(
        "zeros where torch averages over nothing",
        G,
        crossed(
            sdpa(attn_mask=ADDED),
            _added,
            softmax=lambda share, s: share(jax.nn.softmax(s), _zeros_of_least(s)),
            grads=False,  # torch's own are wrong by the number of keys in such a row
        ),
        "weights|scores",
        "average|nothing|no key|see",
    ),
    Strange(
        "an average where torch gives zeros",
        G,
        crossed(
            sdpa(attn_mask=EMPTY),
            one_row(EMPTY, EMPTY),
            softmax=lambda share, s: share(_zeros(s), average(s)),
        ),
        "weights|scores",
        "average|nothing|no key|see",
    ),
    Strange("sinks left out", G, _sinks(), "weights|scores", "sink|denominator"),
    Strange("key heads tiled, where torch repeats", G, _grouped(), "key|scores", "tiled|n % "),
]
