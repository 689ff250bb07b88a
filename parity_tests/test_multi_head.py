import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn import taps
from flax_attn.layers import CausalAttention, MultiHeadAttention
from flax_attn.parity import Case, Decode, Rule, judge

NOTEBOOK = {"d_in": 3, "d_out": 2, "context_length": 6, "dropout": 0.0, "num_heads": 2}
ODD = {"d_in": 11, "d_out": 12, "context_length": 9, "dropout": 0.0, "num_heads": 3}
BIASED = {**ODD, "qkv_bias": True}
BARE = {**ODD, "out_proj": False}
# Four heads of width 4 over 4 tokens in 4 sentences: no wrong axis shows in a shape.
SQUARE = {"d_in": 16, "d_out": 16, "context_length": 4, "dropout": 0.0, "num_heads": 4}
LARGE = {"d_in": 512, "d_out": 512, "context_length": 50, "dropout": 0.0, "num_heads": 8}
GPT2 = {"context_length": 1024, "dropout": 0.0, "qkv_bias": True}
SMALLEST = {**GPT2, "d_in": 768, "d_out": 768, "num_heads": 12}
LARGEST = {**GPT2, "d_in": 1600, "d_out": 1600, "num_heads": 25}

# torch's own packs [q; k; v] above one another.
PACKED = [
    Rule("in_proj_weight -> {W_query,W_key,W_value}.kernel", "(n o) i -> n i o", n=3),
    Rule("in_proj_bias -> {W_query,W_key,W_value}.bias", "(n o) -> n o", n=3),
]
# The wrapper's heads, laid side by side: first the weights, then the biases.
SIDE_BY_SIDE = [
    Rule(f"heads.{{0,1,2}}.{name}.{torchs} -> {name}.{flaxs}", layout)
    for torchs, flaxs, layout in [
        ("weight", "kernel", "n o i -> i (n o)"),
        ("bias", "bias", "n o -> (n o)"),
    ]
    for name in ("W_query", "W_key", "W_value")
]


def causal(module, x):
    """torch.nn.MultiheadAttention over x; its True means blocked."""
    import torch

    future = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
    return module(x, x, x, attn_mask=future, need_weights=False)[0]


def of_torch(width, heads, context_length, **given):
    """MultiHeadAttention against torch.nn.MultiheadAttention."""
    return Case(
        MultiHeadAttention,
        {
            "d_in": width,
            "d_out": width,
            "context_length": context_length,
            "dropout": 0.0,
            "num_heads": heads,
            "qkv_bias": True,
        },
        reference="torch.nn.MultiheadAttention",
        reference_config={"embed_dim": width, "num_heads": heads, "batch_first": True},
        torch_call=causal,
        rules=PACKED,
        **given,
    )


CASES = [
    Case(MultiHeadAttention, NOTEBOOK, x=(6, 3), decode=Decode()),
    Case(MultiHeadAttention, NOTEBOOK, x=(2, 6, 3)),
    Case(MultiHeadAttention, ODD, x=(2, 5, 11)),  # shorter than the context
    Case(MultiHeadAttention, BIASED, x=(2, 9, 11)),
    Case(MultiHeadAttention, BIASED, x=(2, 1, 11)),
    Case(MultiHeadAttention, {**BIASED, "context_length": 40}, x=(2, 33, 11)),
    Case(MultiHeadAttention, BIASED, x=(3, 3, 5, 11)),  # as many sentences as heads
    Case(MultiHeadAttention, BARE, x=(2, 5, 11)),
    Case(MultiHeadAttention, {**BARE, "qkv_bias": True}, x=(2, 5, 11)),
    Case(MultiHeadAttention, SQUARE, x=(4, 4, 16)),
    Case(MultiHeadAttention, {**SQUARE, "qkv_bias": True}, x=(4, 4, 16)),
    Case(MultiHeadAttention, LARGE, dtypes=("float64", "float32"), x=(30, 50, 512)),
    Case(MultiHeadAttention, SMALLEST, dtypes=("float64",), x=(2, 7, 768)),
    Case(MultiHeadAttention, LARGEST, dtypes=("float64",), x=(2, 7, 1600)),
    *(
        Case(MultiHeadAttention, {**config, "dropout": rate}, train=True, x=shape)
        for rate, config, shape in [
            (0.1, ODD, (2, 5, 11)),
            (0.1, BARE, (2, 5, 11)),
            (0.2, BIASED, (3, 3, 5, 11)),
            (0.5, SQUARE, (4, 4, 16)),
        ]
    ),
    of_torch(12, 3, 9, x=(2, 5, 12)),
    of_torch(12, 3, 9, x=(5, 12)),
    of_torch(12, 3, 40, x=(2, 33, 12)),
    of_torch(16, 4, 4, x=(4, 4, 16)),
    *(
        Case(
            MultiHeadAttention,
            {**config, "out_proj": False},
            reference="torch_ref.multi_head_wrapper.MultiHeadAttentionWrapper",
            reference_config={**config, "d_out": 4},  # the width of one head
            rules=rules,
            x=(2, 5, 11),
        )
        for config, rules in [(ODD, SIDE_BY_SIDE[:3]), (BIASED, SIDE_BY_SIDE)]
    ),
]


def test_parity(case):
    case.check()


def test_shapes_on_the_way():
    layer = MultiHeadAttention(**LARGE, rngs=nnx.Rngs(0))
    shapes = []
    with taps.listen(lambda name, value: shapes.append((name, value.shape))):
        out = jax.eval_shape(layer, jnp.zeros((30, 50, 512)))
    assert shapes == [
        ("scores", (30, 8, 50, 50)),
        ("weights", (30, 8, 50, 50)),
        ("context", (30, 50, 8, 64)),
    ]
    assert out.shape == (30, 50, 512)


def test_one_head_is_causal_attention():
    with jax.enable_x64(True):
        one = MultiHeadAttention(
            11, 6, 9, 0.0, 1, True, out_proj=False, rngs=nnx.Rngs(0), param_dtype=jnp.float64
        )
        causal = CausalAttention(11, 6, 9, 0.0, True, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
        x = jnp.asarray(np.random.RandomState(0).standard_normal((2, 5, 11)))
        assert judge.same_function(np.asarray(one(x)), np.asarray(causal(x))).ok
