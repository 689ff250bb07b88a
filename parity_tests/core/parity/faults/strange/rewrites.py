"""Faithful ports that look otherwise, and functions that no two ways compute alike: all equal."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn.parity import Rule
from flax_attn.taps import tap

from .attention import (
    F,
    attend,
    f_attend,
    f_merge,
    f_qkv,
    f_scaled,
    f_scores,
    f_split,
    merge,
    qkv,
    split,
)
from .fills import masked
from .pair import B, D, H, N, Pair, S, T, linear, normal, parameter, projections, tokens, torch
from .rotary import BASE, f_angles, f_turn, t_angles, t_turn

X, MEMORY = normal("x", B, T, D), normal("memory", B, S, D)
SEEN = np.tril(np.ones((T, T), bool))
ONCE = {"out": linear(D, 9)}


@dataclass(frozen=True)
class Rewrite:
    """One pair that is equal, or as equal as its input can tell."""

    name: str
    pair: Pair

    def __str__(self) -> str:
        return self.name


def attended(ours, theirs=None, parts=None, rules=(), **options):
    """Plain attention: `theirs(q, k, v)` of torch, `ours(q, k, v)` of Flax."""

    def original(m, x):
        return m.o(merge((theirs or attend)(*qkv(m, x, N))))

    def port(m, share, x):
        return m.o(f_merge(ours(*f_qkv(m, x, N))))

    parts = {**projections(), **(parts or {})}
    return Pair(parts, original, port, (X,), options=options, rules=lambda share: rules)


def plain(theirs, ours, parts=ONCE, x=X, **options):
    """`theirs(y)` and `ours(y)` of what `out` gives."""
    return Pair(
        parts,
        lambda m, x: theirs(m.out(x)),
        lambda m, share, x: ours(m.out(x)),
        (x,),
        options=options,
    )


def _row_constant(q, k, v):
    shift = jnp.arange(T, dtype=q.dtype)[:, None] - 2.5
    return f_attend(q, k, v, modify_logits=lambda s: s + shift)


def _less_most(q, k, v):
    return f_attend(q, k, v, modify_logits=lambda s: s - s.max(-1, keepdims=True))


def _sigmoid(q, k, v):
    return torch.sigmoid(q @ k.mT / H**0.5 - math.log(T)) @ v


def _by_tanh(q, k, v):
    weights = 0.5 * (1 + jnp.tanh((f_scaled(q, k) - math.log(T)) / 2))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def _by_exponential(q, k, v):
    weights = 1 / (1 + T * jnp.exp(-f_scaled(q, k)))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def _fused_causal():
    """Torch's fused call over a memory, causal from the first key, against a plain softmax."""

    def original(m, x, memory):
        q, k, v = qkv(m, x, N, memory)
        return m.o(merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    def port(m, share, x, memory):
        q, k, v = f_qkv(m, x, N, memory)
        seen = jnp.arange(S) <= jnp.arange(T)[:, None]
        return m.o(f_merge(f_attend(q, k, v, modify_logits=lambda s: jnp.where(seen, s, -jnp.inf))))

    return Pair(projections(), original, port, (X, MEMORY))


def _fused_by_blocks():
    """The same call without a mask, against two blocks of keys put together."""

    def ours(q, k, v):
        s = f_scaled(q, k)
        parts = [(s[..., :3], v[:, :3]), (s[..., 3:], v[:, 3:])]
        logs = [jax.nn.logsumexp(block, -1) for block, _ in parts]
        outs = [jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(block), w) for block, w in parts]
        share = jax.nn.sigmoid(logs[0] - logs[1]).swapaxes(1, 2)[..., None]
        return share * outs[0] + (1 - share) * outs[1]

    return attended(ours, F.scaled_dot_product_attention)


def hidden(theirs, ours):
    """Scores hidden by two numbers, of which nothing shows behind the softmax."""
    return attended(
        lambda q, k, v: f_attend(
            q, k, v, modify_logits=lambda s: jnp.where(jnp.asarray(SEEN), s, ours)
        ),
        lambda q, k, v: attend(
            q, k, v, modify_logits=lambda s: s.masked_fill(~torch.from_numpy(SEEN), theirs)
        ),
    )


def _rows_before_heads(q, k, v):
    """Scores, weights and context as B T N S and B T N H."""
    s = tap("scores", jnp.einsum("btnh,bsnh->btns", q, k) / H**0.5)
    weights = tap("weights", jax.nn.softmax(s))
    return tap("context", jnp.einsum("btns,bsnh->btnh", weights, v))


def _heads_first(q, k, v):
    """Every tap as torch has it, B N T H."""
    q, k, v = (y.swapaxes(1, 2) for y in (q, k, v))
    q, k, v = tap("query", q), tap("key", k), tap("value", v)
    weights = tap("weights", jax.nn.softmax(tap("scores", q @ k.mT / H**0.5)))
    return tap("context", weights @ v).swapaxes(1, 2)


def _other_names(q, k, v):
    weights = tap("probabilities", jax.nn.softmax(tap("logits", f_scaled(q, k))))
    return tap("mixed", jnp.einsum("bnts,bsnh->btnh", weights, v))


def _names_of_others(q, k, v):
    """Taps that stand for something else than torch's of the same name: the raw product, and the
    weights before they are divided."""
    s = tap("scores", f_scores(q, k)) / H**0.5
    raised = tap("weights", jnp.exp(s - s.max(-1, keepdims=True)))
    out = jnp.einsum("bnts,bsnh->btnh", raised, v)
    return out / raised.sum(-1).swapaxes(1, 2)[..., None]


def _fused_in_another_order():
    """[3, N, H] in torch, [N, 3, H] in Flax, the weights carried so."""

    def original(m, x):
        q, k, v = m.qkv(x).unflatten(-1, (3, N, H)).permute(2, 0, 3, 1, 4)
        return m.o(merge(attend(q, k, v)))

    def port(m, share, x):
        q, k, v = jnp.moveaxis(m.qkv(x).reshape(B, T, N, 3, H), 3, 0)
        return m.o(f_merge(f_attend(q, k, v)))

    rules = (
        Rule("qkv.weight -> qkv.kernel", "(c n h) i -> i (n c h)", c=3, n=N),
        Rule("qkv.bias -> qkv.bias", "(c n h) -> (n c h)", c=3, n=N),
    )
    parts = {"qkv": linear(D, 3 * N * H), "o": linear(N * H, D)}
    return Pair(parts, original, port, (X,), rules=lambda share: rules)


def _best():
    """Indices, which are narrower where x64 is off, and ids of 32 bits that come in."""

    def original(m, x, shift):
        y = m.out(x)
        return {"y": y, "best": y.argmax(-1), "moved": y.argmax(-1) + shift}

    def port(m, share, x, shift):
        y = m.out(x)
        return {"y": y, "best": y.argmax(-1), "moved": y.argmax(-1) + shift}

    shift = tokens(B, T, below=5, name="shift")
    options = {"dtypes": ("float64", "float32"), "jit": True, "eager": False}
    return Pair(ONCE, original, port, (X, shift), options=options)


def _saturated(q, k, v):
    return attend(q, k, v, modify_logits=lambda s: s * 3000)


def _f_saturated(q, k, v):
    return f_attend(q, k, v, product=lambda q, k: f_scores(q * 3000, k) / H**0.5)


def _turned(first):
    """Rotary positions from `first` on, which only differences of them show."""

    def theirs(q, k, v):
        q, k = (t_turn(y, t_angles(width=H)(None, y)[:T]) for y in (q, k))
        return attend(q, k, v)

    def ours(q, k, v):
        angle = f_angles(q, BASE, H)[:T]
        angle = angle + first * f_angles(q, BASE, H)[1]
        return f_attend(f_turn(q, angle), f_turn(k, angle), v)

    return attended(ours, theirs)


def _variance(theirs, ours, far):
    """Deviations of numbers that lie `far` from zero."""

    def original(m, x):
        return theirs(m.gain * x + far)

    def port(m, share, x):
        return ours(m.gain[...] * x + far)

    return Pair({"gain": parameter(D)}, original, port, (X,))


def t_two_pass(y):
    return y.var(-1, correction=0)


def t_moments(y):
    return (y**2).mean(-1) - y.mean(-1) ** 2


def f_two_pass(y):
    return ((y - y.mean(-1, keepdims=True)) ** 2).mean(-1)


def f_moments(y):
    return (y**2).mean(-1) - y.mean(-1) ** 2


def f_shifted(y):
    gap = y - y[..., :1]
    return (gap**2).mean(-1) - gap.mean(-1) ** 2


def _tiny():
    """RMS of vectors of 1e-90, whose squares are no numbers of float32."""

    def port(m, share, x):
        y = m.out(x) * 1e-90
        return y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True))

    def original(m, x):
        y = m.out(x) * 1e-90
        return y / y.pow(2).mean(-1, keepdim=True).sqrt()

    return Pair(ONCE, original, port, (X,))


def _sums(theirs, ours):
    """Long sums of numbers that cancel, each step of them an output."""
    signs = normal("signs", 2, 700) * 10 ** (4 * np.sin(np.arange(700)))

    def original(m, x):
        return theirs(m.gain * x)

    def port(m, share, x):
        return ours(m.gain[...] * x)

    return Pair({"gain": parameter(1)}, original, port, (signs,))


def _step_by_step(y):
    _, out = jax.lax.scan(lambda total, row: (total + row,) * 2, jnp.zeros_like(y[:, 0]), y.T)
    return out.T


def _by_triangle(y):
    return y @ jnp.triu(jnp.ones((y.shape[1],) * 2, y.dtype))


def _spectrum(y):
    """The Fourier transform by its matrix."""
    n = y.shape[-1]
    turn = jnp.exp(-2j * jnp.pi * jnp.outer(jnp.arange(n), jnp.arange(n)) / n)
    return {"y": y, "spectrum": y @ turn}


def _one_token():
    """A softmax over one key: weights of one, and no gradient for queries and keys."""

    def original(m, x):
        return m.o(merge(attend(*qkv(m, x, N))))

    def port(m, share, x):
        return m.o(f_merge(f_attend(*f_qkv(m, x, N))))

    return Pair(projections(), original, port, (X[:, :1],))


def _cached():
    """A cache, a tuple of two arrays, as torch modules take it."""

    def original(m, x, cache):
        return m.o(merge(attend(split(m.q(x), N), *cache)))

    def port(m, share, x, cache):
        k, v = (y.swapaxes(1, 2) for y in cache)
        return m.o(f_merge(f_attend(f_split(m.q(x), N), k, v)))

    parts = {name: part for name, part in projections().items() if name in "qo"}
    cache = normal("keys", B, N, S, H), normal("values", B, N, S, H)
    return Pair(parts, original, port, kwargs={"x": X, "cache": cache})


REWRITES = [
    Rewrite("a constant added to each row of scores", attended(_row_constant)),
    Rewrite("each row of scores less its largest", attended(_less_most)),
    Rewrite("sigmoid attention by tanh", attended(_by_tanh, _sigmoid)),
    Rewrite("sigmoid attention by an exponential", attended(_by_exponential, _sigmoid)),
    Rewrite("the fused call, causal, by a plain softmax", _fused_causal()),
    Rewrite("the fused call in blocks, no tap inside", _fused_by_blocks()),
    Rewrite("hidden by -1e9 for finfo.min", hidden(torch.finfo(torch.float64).min, -1e9)),
    Rewrite("hidden by -1e30 for -inf", hidden(-torch.inf, -1e30)),
    Rewrite("rows before heads in every tap", attended(_rows_before_heads)),
    Rewrite("heads before rows in every tap", attended(_heads_first)),
    Rewrite("taps by other names", attended(_other_names)),
    Rewrite("taps by torch's names of other values", attended(_names_of_others)),
    Rewrite("fused weights in another order, carried so", _fused_in_another_order()),
    Rewrite("indices where x64 is off", _best()),
    Rewrite(
        "zeros beside an output that shows something",
        plain(
            lambda y: {"y": y, "loss": y.new_zeros(())},
            lambda y: {"y": y, "loss": jnp.zeros((), y.dtype)},
        ),
    ),
    Rewrite(
        "a row of -inf beside an output that shows something",
        plain(
            lambda y: (y, torch.full_like(y, -torch.inf)),
            lambda y: (y, jnp.full_like(y, -jnp.inf)),
        ),
    ),
    Rewrite("a softmax saturated by scores of ten thousand", attended(_f_saturated, _saturated)),
    Rewrite("rotary positions from three on, queries and keys alike", _turned(3)),
    Rewrite("the variance by moments far from zero", _variance(t_two_pass, f_moments, 0.0)),
    Rewrite("torch's variance by moments, cancelled", _variance(t_moments, f_two_pass, 2000.0)),
    Rewrite("both variances by moments, cancelled", _variance(t_moments, f_shifted, 300.0)),
    Rewrite("a norm of tiny vectors", _tiny()),
    Rewrite("a long sum step by step", _sums(lambda y: y.cumsum(1), _step_by_step)),
    Rewrite("a long sum by a triangle of ones", _sums(lambda y: y.cumsum(1), _by_triangle)),
    Rewrite(
        "a spectrum by its matrix",
        plain(lambda y: {"y": y, "spectrum": torch.fft.fft(y)}, _spectrum),
    ),
    Rewrite("one token alone", _one_token()),
    Rewrite("a float mask times finfo.min, given", masked(None, ours=lambda share, *x: x)),
    Rewrite(
        "the same, a constant",
        masked(None, ours=lambda share, *x: x, constants=("mask",)),
    ),
    Rewrite("a cache given as a tuple", _cached()),
]
