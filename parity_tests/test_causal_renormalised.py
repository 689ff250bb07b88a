import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn import taps
from flax_attn.layers import CausalAttention, CausalRenormalisedAttention
from flax_attn.parity import Case, judge

NOTEBOOK = {"d_in": 3, "d_out": 2, "context_length": 6}
ODD = {"d_in": 11, "d_out": 6, "context_length": 9}
BIASED = {**ODD, "qkv_bias": True}
SQUARE = {"d_in": 7, "d_out": 7, "context_length": 7}

CASES = [
    Case(CausalRenormalisedAttention, NOTEBOOK, x=(6, 3)),
    Case(CausalRenormalisedAttention, NOTEBOOK, x=(2, 6, 3)),
    Case(CausalRenormalisedAttention, ODD, x=(2, 5, 11)),  # shorter than the context
    Case(CausalRenormalisedAttention, BIASED, x=(2, 9, 11)),
    Case(CausalRenormalisedAttention, BIASED, x=(2, 1, 11)),
    Case(CausalRenormalisedAttention, {**BIASED, "context_length": 40}, x=(2, 33, 11)),
    Case(CausalRenormalisedAttention, BIASED, x=(4, 2, 5, 11)),
    Case(CausalRenormalisedAttention, SQUARE, x=(7, 7, 7)),
    Case(CausalRenormalisedAttention, {**SQUARE, "qkv_bias": True}, x=(7, 7, 7)),
    *(
        Case(CausalRenormalisedAttention, {**config, "dropout": rate}, train=True, x=shape)
        for rate, config, shape in [
            (0.1, ODD, (2, 5, 11)),
            (0.2, BIASED, (4, 2, 5, 11)),
            (0.5, SQUARE, (7, 7, 7)),
        ]
    ),
]


def test_parity(case):
    case.check()


def test_future_tokens_reach_neither_outputs_nor_gradients():
    """Rows up to t are those of the first t tokens alone, and so are their gradients."""
    with jax.enable_x64(True):
        layer = CausalRenormalisedAttention(**BIASED, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
        random = np.random.RandomState(0)
        x = jnp.asarray(random.standard_normal((2, 8, 11)))
        cotangent = jnp.asarray(random.standard_normal((2, 5, 6)))

        def gradients(tokens):
            return jax.grad(lambda x: (layer(x)[:, :5] * cotangent).sum())(tokens)

        whole, alone = np.asarray(gradients(x)), np.asarray(gradients(x[:, :5]))
        assert judge.same_function(np.asarray(layer(x)[:, :5]), np.asarray(layer(x[:, :5]))).ok
        assert judge.same_function(whole[:, :5], alone).ok
        future = whole[:, 5:]
        assert judge.same_function(future, np.zeros_like(future), np.linalg.norm(alone)).ok


def test_equals_the_mask_before_the_softmax():
    """Weights, context vectors and the gradients of x and of every parameter."""
    with jax.enable_x64(True):
        random = np.random.RandomState(0)
        x, cotangent = (jnp.asarray(random.standard_normal((2, 8, n))) for n in (11, 6))

        def run(kind):
            layer = kind(**BIASED, dropout=0.0, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
            graph, params, rest = nnx.split(layer, nnx.Param, ...)

            def forward(params, x):
                with taps.listen() as heard:
                    context = nnx.merge(graph, params, rest, copy=True)(x)
                return context, [value for name, value in heard if "weights" in name][-1]

            context, back, weights = jax.vjp(forward, params, x, has_aux=True)
            return [context, weights, *jax.tree.leaves(back(cotangent))]

        late, early = (
            [np.asarray(value) for value in run(kind)]
            for kind in (CausalRenormalisedAttention, CausalAttention)
        )
        scales = [None, None, *(judge.gradient_scale(early[2:], want) for want in early[2:])]
        for got, want, scale in zip(late, early, scales, strict=True):
            assert judge.same_function(got, want, scale).ok


def test_a_past_that_underflows_is_zero_over_zero():
    """Where the -inf mask still gives the token itself, this way has nothing left to share."""
    x = jnp.asarray([[1.0], [500.0]])
    kernel = jnp.ones((1, 1))
    outputs = []
    for kind in (CausalRenormalisedAttention, CausalAttention):
        layer = kind(1, 1, 2, 0.0, rngs=nnx.Rngs(0))
        for part in (layer.W_query, layer.W_key, layer.W_value):
            part.kernel[...] = kernel
        outputs.append(np.asarray(layer(x)))
    assert np.isnan(outputs[0][0]).all() and np.isfinite(outputs[0][1]).all()
    assert (outputs[1] == np.asarray(x)).all()
