"""Layers used from Linen through `nnx.bridge`: init, apply, gradients and dropout equal nnx."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from flax_attn.layers.grouped_query import GroupedQueryAttention
from flax_attn.layers.multi_head import MultiHeadAttention
from flax_attn.parity import judge

pytestmark = pytest.mark.nightly

MULTI = {"d_in": 11, "d_out": 12, "context_length": 9, "dropout": 0.5, "num_heads": 3}
GROUPED = {"in_features": 11, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
EVAL = {MultiHeadAttention: {"deterministic": True}}
drawn = np.random.RandomState(0)
X = drawn.standard_normal((2, 5, 11)).astype(np.float32)
COTANGENT = drawn.standard_normal((2, 5, 12)).astype(np.float32)

both = pytest.mark.parametrize(
    ("kind", "config"), [(MultiHeadAttention, MULTI), (GroupedQueryAttention, GROUPED)]
)


class Block(linen.Module):
    """A Linen model with an attention layer of ours inside."""

    @linen.compact
    def __call__(self, x, *, deterministic):
        attention = nnx.bridge.to_linen(MultiHeadAttention, **MULTI, name="attention")
        return linen.Dense(7)(attention(x, deterministic=deterministic))


def exactly(got, want):
    verdicts = jax.tree.map(lambda a, b: judge.exact(np.asarray(a), np.asarray(b)), got, want)
    leaves = jax.tree.leaves(verdicts, is_leaf=lambda x: isinstance(x, judge.Verdict))
    return len(leaves) > 0 and all(verdict.ok for verdict in leaves)


def in_nnx(kind, config, params):
    """The same layer in nnx, with these weights."""
    layer = kind(**config, rngs=nnx.Rngs(5))
    layer.eval()
    held = nnx.state(layer, nnx.Param)
    nnx.update(layer, nnx.State(jax.tree.map(lambda _, x: x, nnx.to_pure_dict(held), params)))
    return layer


@cache
def in_linen(kind):
    """The layer as a Linen module, and its variables."""
    module = nnx.bridge.to_linen(kind, **(MULTI if kind is MultiHeadAttention else GROUPED))
    return module, module.init(KEYS, X)


@both
def test_linen_apply_equals_the_nnx_call(kind, config):
    module, variables = in_linen(kind)
    assert variables.keys() == {"params"}
    layer = in_nnx(kind, config, variables["params"])
    assert exactly(module.apply(variables, X, **EVAL.get(kind, {})), layer(X))


@both
def test_linen_gradients_equal_nnx_gradients(kind, config):
    module, variables = in_linen(kind)
    params = variables["params"]

    def by_linen(params, x):
        out = module.apply({"params": params}, x, **EVAL.get(kind, {}))
        return (out * COTANGENT[..., : out.shape[-1]]).sum()

    def by_nnx(layer, x):
        out = layer(x)
        return (out * COTANGENT[..., : out.shape[-1]]).sum()

    got = jax.jit(jax.grad(by_linen, (0, 1)))(params, X)
    want = nnx.jit(nnx.grad(by_nnx, argnums=(0, 1)))(in_nnx(kind, config, params), X)
    assert exactly(got[0], nnx.to_pure_dict(want[0])) and exactly(got[1], want[1])
    assert all(np.any(x) for x in jax.tree.leaves(got))


def test_dropout_uses_the_keys_given_to_linen_apply():
    module, variables = in_linen(MultiHeadAttention)
    one, same, other = (
        module.apply(variables, X, rngs={"dropout": jax.random.key(n)}) for n in (2, 2, 3)
    )
    plain = module.apply(variables, X, deterministic=True)
    assert exactly(one, same)
    assert not exactly(one, other) and not exactly(one, plain)


def test_a_layer_runs_inside_a_linen_module():
    model = Block()
    variables = model.init(KEYS, X, deterministic=True)
    dense, attention = variables["params"]["Dense_0"], variables["params"]["attention"]
    context = in_nnx(MultiHeadAttention, MULTI, attention)(X)
    want = linen.Dense(7).apply({"params": dense}, context)
    assert exactly(model.apply(variables, X, deterministic=True), want)
    jitted = jax.jit(lambda variables, x: model.apply(variables, x, deterministic=True))
    assert jitted(variables, jnp.asarray(X)).shape == want.shape
