"""A fused kernel, played in plain JAX: what stands in for those that need another machine.

It does what they do and no more: queries that see nothing give NaN, hidden NaN is multiplied by
zero, and the backward pass knows the cotangent of the log-sum-exp only through rowsum(do * o).
"""

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import reference
from flax_attn.backends import cudnn, protocol, splash, tokamax
from flax_attn.backends.protocol import of_lse
from flax_attn.parity import judge
from flax_attn.rules import sizes_of


def logits_of(q, k, scale, cap=None, bias=None):
    s = scale * jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2))
    s = s if bias is None else s + bias
    return s if cap is None else cap * jnp.tanh(s / cap)


def forward(q, k, v, seen, *logits):
    """Output and lse; `seen` broadcasts to B N T S, `logits` are scale, cap and bias."""
    s = jnp.where(seen, logits_of(q, k, *logits), -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.exp(s - lse[..., None])
    v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    return jnp.einsum("bnts,bsnh->btnh", p, v), jnp.where(jnp.isneginf(lse), jnp.nan, lse)


def backward(q, k, v, seen, o, lse, do, *logits):
    """The gradients of q, k, v and, if there is one, of the bias."""
    scale, cap, bias = (*logits, None, None)[:3]
    wide = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    s, pull = jax.vjp(lambda q, k, bias: logits_of(q, k, scale, cap, bias), q, k, bias)
    p = jnp.where(seen, jnp.exp(s - lse[..., None]), 0)
    delta = jnp.swapaxes(jnp.sum(do * o, axis=-1), 1, 2)[..., None]
    ds = p * (jnp.einsum("btnh,bsnh->bnts", do, wide) - delta)
    dv = jnp.einsum("bnts,btnh->bsnh", p, do)
    dq, dk, dbias = pull(ds)
    return dq, dk, dv.reshape(*v.shape[:3], -1, v.shape[3]).sum(3), dbias


def cudnn_call(self, phase, q, k, v, given, *more, **how):
    """What cuDNN makes of the same call."""
    t, s = np.ix_(*(np.arange(x.shape[1], dtype=np.int32) for x in (q, k)))
    seen = (s <= t) | (not self.causal)
    seen = seen & ((s > t - self.window) if self.window else True)
    seen = jnp.asarray(np.broadcast_to(seen, (1, 1, *seen.shape)))
    if self.padded:
        rows, kv = (x[:, None, None, None] for x in given)
        seen = seen & (t[None, None] < rows) & (s[None, None] < kv)
    if phase == "fwd":
        return forward(q, k, v, seen, self.scale)
    lse, o, do = more
    return backward(q, k, v, seen, o, lse, do, self.scale)[:3]


def tokamax_run(self, q, k, v, given):
    """What Tokamax makes of a forward call without a bias."""
    first, end = given["ends"]
    s = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None, None]
    seen = jnp.ones((1, 1, 1, 1), bool)
    seen = seen if first is None else seen & (s >= first[..., None])
    seen = seen if end is None else seen & (s < end[..., None])
    o, lse = forward(q, k, v, seen, self.scale, self.cap)
    return o, of_lse(lse)


def splash_run(self, q, k, v, given):
    """What splash attention makes of a forward call, whose queries are scaled."""
    t, s = np.ix_(*(np.arange(x.shape[1], dtype=np.int32) for x in (q, k)))
    seen = jnp.asarray(np.broadcast_to(self.mask(0, 0, t, s), (1, 1, t.size, s.size)))
    if given:
        rows, keys = given
        seen = seen & (rows[:, None, :, None] == keys[:, None, None, :])
    o, lse = forward(q, k, v, seen, 1.0, self.cap)
    return o, of_lse(lse)


def stand_ins(monkeypatch):
    """Kernels that this machine lacks are played, in float64 and forward, and taken at any size."""
    monkeypatch.setattr(cudnn.Cudnn, "_call", cudnn_call)
    monkeypatch.setattr(tokamax.Tokamax, "run", tokamax_run)
    monkeypatch.setattr(splash.Splash, "run", splash_run)
    for module in (cudnn, tokamax, splash):
        monkeypatch.setattr(module, "DTYPES", (jnp.float64,))
    for name in ("MAX_REFERENCE_PAIRS", "MAX_PAIRS_BEFORE_BLOCKS", "MAX_COPIED_BYTES"):
        monkeypatch.setattr(protocol, name, 0)


# How an adapter is held against the reference.


def normal(seed, *shape):
    return jnp.asarray(np.random.RandomState(seed).standard_normal(shape))


def outcome(forward, q, k, v, rules, wanted=(True, True), **how):
    """Output, lse and all gradients, by cotangents of the output, of the lse or of both."""
    return [np.asarray(x) for x in traced(forward, q, k, v, rules, wanted, **how)]


def traced(forward, q, k, v, rules, wanted=(True, True), **how):
    rules = rules.bind(sizes_of(q, k), q.shape[-1])

    def chosen(*given):
        found = zip(forward(*given, **how), wanted, strict=True)
        return [x for x, is_wanted in found if is_wanted]

    @jax.jit
    def run(*given):
        out, back = jax.vjp(chosen, *given)
        cotangents = [normal(8, *x.shape).astype(x.dtype) for x in out]
        seen = zip(out, cotangents, strict=True)
        grads = jax.tree.leaves(back([jnp.where(jnp.isneginf(x), 0, y) for x, y in seen]))
        return *out, *(x for x in grads if x.dtype != jax.dtypes.float0)

    return run(q, k, v, rules)


def check_same(got, want):
    """In float64: one function, dtypes included."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        scale = judge.gradient_scale(want[2:], b) if i > 1 else None
        verdict = judge.same_function(a, b, scale, zero=True)
        assert verdict.ok and a.dtype == b.dtype, (i, verdict)


def check_precision(forward, q, k, v, rules, wanted=(True, True)):
    """In a narrow dtype: as near to the truth as the reference is, or nearly so."""
    got, own = (outcome(f, q, k, v, rules, wanted) for f in (forward, reference.forward))
    dtype = q.dtype.name
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in (q, k, v)]
        truth = outcome(reference.forward, *wide, widened(rules), wanted)
    for i, (a, b, true) in enumerate(zip(got, own, truth, strict=True)):
        scale = judge.whole_gradient(truth[2:]) if i > 1 else None
        verdict = judge.same_precision(a, b, true, dtype, scale, zero=True)
        assert verdict.ok and a.dtype == b.dtype, (i, verdict)


def widened(tree):
    """All that is floating in float64."""

    def widen(x):
        return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(widen, tree)
