"""Every recurrence lowers for CPU, GPU and TPU, forward and backward, without any at hand."""

import jax
import jax.export
import jax.numpy as jnp
import pytest

from flax_attn.recurrence import causal_convolution, elementwise_recurrence, linear_recurrence

PLATFORMS = ("cpu", "cuda", "tpu")
B, T, N, H, h = 2, 19, 3, 4, 5
DECAYS = {"none": (), "head": (B, T, N), "channel": (B, T, N, H)}
STATE = (B, N, H, h)


def lowered(call, *shapes):
    """Exports outputs, state and gradients on packed, padded tokens; returns output shapes."""
    ids, valid = jnp.zeros((B, T), jnp.int32), jnp.ones((B, T), bool)
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def both_ways(ids, valid, *x):
        out, back = jax.vjp(lambda *x: call(ids, valid, *x), *x)
        return out, back(jax.tree.map(jnp.sin, out))

    exported = jax.export.export(jax.jit(both_ways), platforms=PLATFORMS)(ids, valid, *given)
    assert exported.platforms == PLATFORMS
    out, gradients = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    assert [x.shape for x in gradients] == list(shapes)
    return [x.shape for x in out]


@pytest.mark.nightly(but=["channel-True-8"])
@pytest.mark.parametrize("chunk", [8, None])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_the_linear_recurrence_lowers_for_all_platforms(decay, delta, chunk):
    def call(ids, valid, q, k, v, beta, state, *log_decay):
        g = log_decay[0] if log_decay else None
        return linear_recurrence(
            q,
            k,
            v,
            log_decay=g,
            beta=beta,
            delta=delta,
            segments=ids,
            valid=valid,
            state=state,
            chunk=chunk,
        )

    more = [DECAYS[decay]] if DECAYS[decay] else []
    keys, values = (B, T, N, H), (B, T, N, h)
    assert lowered(call, keys, keys, values, (B, T, N), STATE, *more) == [values, STATE]


def test_the_elementwise_recurrence_lowers_for_all_platforms():
    def call(ids, valid, x, log_decay, state):
        return elementwise_recurrence(x, log_decay, segments=ids, valid=valid, state=state)

    assert lowered(call, (B, T, N), (B, T, N), (B, N)) == [(B, T, N), (B, N)]


def test_the_short_convolution_lowers_for_all_platforms():
    def call(ids, valid, x, weight, bias, state):
        return causal_convolution(x, weight, bias, segments=ids, valid=valid, state=state)

    assert lowered(call, (B, T, N), (N, H), (N,), (B, H - 1, N)) == [(B, T, N), (B, H - 1, N)]
