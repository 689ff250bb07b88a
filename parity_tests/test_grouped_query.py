"""Grouped queries against their twin and torch's SDPA, with all that can be handed in."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn import (
    CAUSAL,
    Alibi,
    Chunked,
    Prefix,
    Rotary,
    Rules,
    ScoreFn,
    Softcap,
    Window,
    alibi_slopes,
)
from flax_attn.layers.grouped_query import GroupedQueryAttention
from flax_attn.norms import RMSNorm as FlaxRMSNorm
from flax_attn.parity import Case, Decode

RAGGED = np.random.RandomState(0).rand(2, 6, 7, 7) < 0.6
RAGGED[1, 2, 3] = False
LOWER = np.tri(7, dtype=bool)
VALID = np.asarray([[True] * 7, [False, False, True, True, True, False, False]])
PACKED = np.asarray([[0, 0, 0, 1, 1, 2, 2]] * 2)[:, None, :, None]
DOCUMENTS = PACKED == PACKED.mT
INT32_MAX = np.asarray([3, 1021, 1024, 2048, 7, 7, 0])


def sizes(kv_heads):
    return {"in_features": 11, "num_heads": 6, "num_kv_heads": kv_heads, "head_dim": 4}


def flax_norm():
    return nnx.RMSNorm(4, epsilon=1e-6, use_fast_variance=False, rngs=nnx.Rngs(0))


def built(name, flax=None, torch=None, **both):
    """Configurations of both sides: `both` for both, `flax()` and `torch()` for one each."""

    def of(own):
        return lambda: {**sizes(3), **both, **(own() if own else {})}

    return {"config": of(flax), "reference_config": of(torch), "name": name}


def normed(**both):
    """A rotary and norms, which `norm_after_rotary` puts into order."""

    def flax():
        return {"rotary": Rotary(), "q_norm": flax_norm(), "k_norm": flax_norm()}

    def torch():
        from torch.nn import RMSNorm

        from torch_ref.grouped_query import Rotary

        norms = {name: RMSNorm(4, eps=1e-6) for name in ("q_norm", "k_norm")}
        return {"rotary": Rotary(), **norms}

    return built("rotary,norm_after_rotary", flax, torch, **both)


def clipped(bound):
    """Heads of both sides, of which the bound cuts some; queries and keys are normed before."""

    def flax():
        return {"q_norm": flax_norm(), "k_norm": flax_norm(), "rotary": Rotary()}

    def torch():
        from torch.nn import RMSNorm

        from torch_ref.grouped_query import Rotary

        return {"rotary": Rotary(), **{f"{x}_norm": RMSNorm(4, eps=1e-6) for x in "qk"}}

    return built(f"clip_qkv={bound}", flax, torch, clip_qkv=bound)


def normed_output():
    """A norm over all heads of a token before the output projection."""

    def flax():
        return {"o_norm": FlaxRMSNorm(24, eps=1e-5, over_heads=True)}

    def torch():
        from torch.nn import RMSNorm

        return {"o_norm": RMSNorm(24, eps=1e-5)}

    return built("o_norm", flax, torch)


def masked(name, flax, dense):
    """Of both sides a mask: a flax_attn mask, and the same as an array, `T T` of booleans."""

    def torch():
        from torch import from_numpy

        return {"mask": from_numpy(dense)}

    return built(f"mask={name}", lambda: {"mask": flax}, torch)


def window():
    """Each token sees itself and the two before it."""
    return masked("Window(2)", CAUSAL & Window(2, 0), LOWER & ~np.tri(7, k=-3, dtype=bool))


def chunked():
    """Each token sees those before it in its chunk of three."""
    chunk = np.arange(7) // 3
    return masked("Chunked(3)", CAUSAL & Chunked(3), LOWER & (chunk[:, None] == chunk))


def prefixed():
    """The first three tokens are seen by all."""
    return masked("Prefix(3)", CAUSAL | Prefix(3), LOWER | (np.arange(7) < 3))


def tempered():
    """Logits grow with the query's place, as in Llama 4's layers without a rotary."""

    def temperature(logits, b, n, q, k):
        return logits * (1 + 0.4 * jnp.log1p((q // 3).astype(logits.dtype)))

    return {"config": lambda: {**sizes(3), "rules": Rules(score=ScoreFn(temperature))}}


def scored(name, plain, **rules):
    return built(name, lambda: {"rules": Rules(**rules)}, lambda: plain)


def turned(norms=False, **rotary):
    """Configurations of both sides: a rotary, and norms of queries and keys."""

    def flax():
        extra = {"q_norm": flax_norm(), "k_norm": flax_norm()} if norms else {}
        return {**sizes(3), "rotary": Rotary(**rotary), **extra}

    def torch():
        from torch.nn import RMSNorm

        from torch_ref.grouped_query import Rotary

        extra = {name: RMSNorm(4, eps=1e-6) for name in ("q_norm", "k_norm")} if norms else {}
        return {**sizes(3), "rotary": Rotary(**rotary), **extra}

    name = "norms," if norms else ""
    name += ",".join(f"{key}={value}" for key, value in rotary.items())
    return {"config": flax, "reference_config": torch, "name": f"rotary,{name}"}


def by_sdpa(layer, x):
    """torch_ref's projections around torch's own attention."""
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (
        project(x).unflatten(-1, (-1, 4)).transpose(-3, -2)
        for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return layer.o_proj(o.transpose(-3, -2).flatten(-2))


def by_temperature(layer, x):
    """The twin's projections, and logits times one plus 0.4 log(1 + t // 3)."""
    import torch

    q, k, v = (
        project(x).unflatten(-1, (-1, 4)).transpose(-3, -2)
        for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    k, v = (x.repeat_interleave(2, dim=-3) for x in (k, v))
    factor = 1 + 0.4 * torch.log1p((torch.arange(7) // 3).to(x))[:, None]
    scores = q @ k.transpose(-2, -1) / 2 * factor
    scores = scores.masked_fill(~torch.from_numpy(LOWER), -torch.inf)
    return layer.o_proj((torch.softmax(scores, dim=-1) @ v).transpose(-3, -2).flatten(-2))


CASES = [
    Case(GroupedQueryAttention, sizes(1), x=(2, 7, 11), decode=Decode()),
    *(Case(GroupedQueryAttention, sizes(K), x=(2, 7, 11)) for K in (3, 6)),
    *(
        Case(
            GroupedQueryAttention,
            sizes(K),
            torch_call=by_sdpa,
            name=f"by F.scaled_dot_product_attention,num_kv_heads={K}",
            x=(2, 7, 11),
        )
        for K in (1, 3)
    ),
    Case(GroupedQueryAttention, sizes(3), x=(7, 11)),
    Case(GroupedQueryAttention, sizes(3), x=(2, 5, 1, 11)),
    Case(GroupedQueryAttention, sizes(3), x=(2, 7, 11), mask=RAGGED),
    Case(
        GroupedQueryAttention,
        {"in_features": 12, "num_heads": 3, "num_kv_heads": 3, "head_dim": 4},
        x=(3, 12, 12),
    ),
    Case(GroupedQueryAttention, **turned(layout="half"), x=(2, 34, 11)),
    Case(GroupedQueryAttention, **turned(layout="interleaved", base=500.0), x=(2, 34, 11)),
    Case(GroupedQueryAttention, **turned(layout="half", width=2), x=(2, 34, 11)),
    Case(GroupedQueryAttention, **turned(), x=(2, 7, 11), positions=INT32_MAX),
    Case(GroupedQueryAttention, **turned(norms=True), x=(2, 7, 11), mask=RAGGED),
    Case(GroupedQueryAttention, **normed(norm_after_rotary=True), x=(2, 7, 11)),
    Case(GroupedQueryAttention, {**sizes(3), "qkv_bias": True}, x=(2, 7, 11)),
    Case(GroupedQueryAttention, {**sizes(3), "out_bias": True}, x=(2, 7, 11)),
    Case(GroupedQueryAttention, {**sizes(3), "sinks": True}, x=(2, 7, 11), mask=RAGGED),
    Case(GroupedQueryAttention, **clipped(0.4), x=(2, 7, 11)),
    Case(GroupedQueryAttention, {**sizes(3), "qkv_bias": True, "key_bias": False}, x=(2, 7, 11)),
    Case(GroupedQueryAttention, {**sizes(3), "qkv_bias": "q"}, x=(2, 7, 11), dtypes=("float64",)),
    Case(GroupedQueryAttention, **normed_output(), x=(2, 7, 11)),
    Case(GroupedQueryAttention, **window(), x=(2, 7, 11)),
    Case(GroupedQueryAttention, **window(), x=(2, 7, 11), mask=DOCUMENTS),
    Case(GroupedQueryAttention, **chunked(), dtypes=("float64",), x=(2, 7, 11)),
    Case(GroupedQueryAttention, **prefixed(), dtypes=("float64",), x=(2, 7, 11)),
    Case(
        GroupedQueryAttention,
        **tempered(),
        reference_config=sizes(3),
        torch_call=by_temperature,
        name="score=temperature",
        dtypes=("float64",),
        x=(2, 7, 11),
    ),
    Case(GroupedQueryAttention, **scored("scale=0.3", {"scale": 0.3}, scale=0.3), x=(2, 7, 11)),
    Case(
        GroupedQueryAttention,
        **scored("softcap=2.5", {"softcap": 2.5}, score=Softcap(2.5)),
        x=(2, 7, 11),
    ),
    Case(
        GroupedQueryAttention,
        **scored(
            "softcap=2.5,alibi",
            {"softcap": 2.5, "slopes": alibi_slopes(6)},
            score=Softcap(2.5) >> Alibi(alibi_slopes(6)),
        ),
        x=(2, 7, 11),
    ),
    Case(
        GroupedQueryAttention,
        {**sizes(3), "qkv_bias": True, "out_bias": True},
        x=(2, 7, 11),
        valid=VALID,
    ),
    Case(GroupedQueryAttention, {**sizes(3), "sinks": True}, x=(2, 7, 11), valid=VALID),
    *(
        Case(GroupedQueryAttention, {**sizes(3), "dropout": rate}, x=(2, 7, 11), train=True)
        for rate in (0.1, 0.5)
    ),
]


def test_parity(case):
    case.check()
