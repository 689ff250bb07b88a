"""Cross attention against its twin and the layers of Whisper and Bart: self, causal and cross."""

import numpy as np

from flax_attn import CAUSAL
from flax_attn.layers.cross import CrossAttention
from flax_attn.norms import RMSNorm
from flax_attn.parity import Case, Decode

SIZES = {"in_features": 12, "num_heads": 3}
WHISPER = {**SIZES, "key_bias": False}
ONE = {"dtypes": ("float64",)}
PADDING = (np.arange(13) < np.asarray([[13], [5]]))[:, None, None]
VALID = np.asarray([[True] * 9, [False] * 2 + [True] * 5 + [False] * 2])
RAGGED = np.random.RandomState(0).rand(2, 3, 9, 13) < 0.6
RAGGED[1, 2, 3] = False


def additive(x, mask):
    """The additive mask of a boolean one, or None."""
    import torch

    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, -torch.inf)


def call(layer, x, memory=None, mask=None):
    return layer(x, key_value_states=memory, attention_mask=additive(x, mask))[0]


def causal_call(layer, x):
    import torch

    mask = torch.ones(1, 1, x.shape[1], x.shape[1]).tril().bool()
    return layer(x, attention_mask=additive(x, mask))[0]


def of(model, **more):
    """transformers' attention of a model, `Whisper` or `Bart`."""

    def config():
        import transformers

        given = getattr(transformers, f"{model}Config")(d_model=12, attn_implementation="eager")
        return {"embed_dim": 12, "num_heads": 3, "config": given, "layer_idx": 0}

    name = model.lower()
    return {
        "reference": f"transformers.models.{name}.modeling_{name}.{model}Attention",
        "reference_config": config,
        "torch_call": call,
        **ONE,
        **more,
    }


def causal(sizes):
    """A decoder's self attention."""
    name = ",".join(f"{key}={value}" for key, value in sizes.items())
    return {"config": lambda: {**sizes, "mask": CAUSAL}, "name": f"{name},mask=CAUSAL"}


def grouped():
    """Fewer heads of keys than of queries, both normed, and no biases, as Llama 3.2 Vision has."""

    def both(norm):
        sizes = {"in_features": 24, "num_heads": 6, "num_kv_heads": 2, "use_bias": False}
        return {**sizes, "norms": (norm(), norm())}

    def flax():
        return both(lambda: RMSNorm(4, eps=1e-5))

    def torch():
        from torch import nn

        return both(lambda: nn.RMSNorm(4, eps=1e-5))

    return {
        "config": flax,
        "reference_config": torch,
        "name": "num_kv_heads=2,norms,use_bias=False",
    }


def cache_memory(layer, x, memory, cache):
    """A step whose cache holds the memory's keys and values."""
    return layer(x, cache=layer.remember(memory) if cache is None else cache)


CASES = [
    Case(
        CrossAttention,
        {**SIZES, "memory_features": 7},
        x=(2, 9, 12),
        memory=(2, 13, 7),
        decode=Decode(flax=cache_memory),
    ),
    Case(
        CrossAttention,
        **grouped(),
        x=(2, 9, 24),
        memory=(2, 13, 24),
        decode=Decode(flax=cache_memory),
    ),
    Case(
        CrossAttention,
        {**SIZES, "head_dim": 5, "use_bias": False, "out_bias": True},
        x=(2, 9, 12),
        memory=(2, 13, 12),
        **ONE,
    ),
    Case(CrossAttention, SIZES, x=(9, 12), **ONE),
    Case(CrossAttention, SIZES, x=(2, 9, 12), valid=VALID, **ONE),
    Case(CrossAttention, WHISPER, x=(2, 9, 12), memory=(2, 13, 12), mask=RAGGED, **ONE),
    Case(CrossAttention, {**SIZES, "dropout": 0.3}, x=(2, 9, 12), train=True, **ONE),
    Case(CrossAttention, {"in_features": 12, "num_heads": 12}, x=(12, 12, 12), **ONE),
    Case(CrossAttention, WHISPER, x=(2, 9, 12), **of("Whisper")),
    Case(
        CrossAttention,
        **causal(WHISPER),
        x=(2, 9, 12),
        **of("Whisper", torch_call=causal_call, decode=Decode()),
    ),
    Case(CrossAttention, WHISPER, x=(2, 9, 12), memory=(2, 13, 12), **of("Whisper")),
    Case(CrossAttention, SIZES, x=(2, 13, 12), mask=PADDING, **of("Bart")),
    Case(CrossAttention, **causal(SIZES), x=(2, 9, 12), **of("Bart", torch_call=causal_call)),
    Case(CrossAttention, SIZES, x=(2, 9, 12), memory=(2, 13, 12), mask=PADDING, **of("Bart")),
]


def test_parity(case):
    case.check()
