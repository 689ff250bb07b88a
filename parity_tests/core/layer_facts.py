"""What tests know of layers: the one place to edit after adding a layer.

Each table says above it which layers belong there. `core/test_house.py` and the tests of each table
name a layer that is missing.
"""

from functools import partial

import jax
import jax.numpy as jnp

import flax_attn as fa
from flax_attn import CAUSAL, RMSNorm, Rotary, Sections

# Constructors with more than eight arguments that shape the equation, and how many they have.
MANY_ARGUMENTS = {
    "CrossAttention": 9,
    "GroupedQueryAttention": 11,
    "IndexedSparseAttention": 10,
    "LatentAttention": 11,
    "Mamba": 9,
    "Mamba2": 12,  # four of them for hybrids
}
# Layers whose torch reference computes in another order, such as components of a head.
REORDERED = {
    "DifferentialAttention",
    "DisentangledAttention",
    "GatedDeltaAttention",
    "IndexedSparseAttention",
    "KimiDeltaAttention",
    "LatentAttention",
    "LongformerAttention",
    "WindowAttention",
}
# Objects of this library among a constructor's arguments, and what the torch twin takes for each.
TORCH_ARGUMENTS = {
    ("mask", "keyword, = CAUSAL"): {"mask": "keyword, = None"},
    ("mask", "keyword, = FULL"): {"mask": "keyword, = None"},
    ("rules", "keyword, = Rules()"): {
        name: "keyword, = None" for name in ("scale", "softcap", "slopes")
    },
}
# Layers whose inputs are not tokens `*B T D`: shapes of empty inputs, and of the output.
EMPTY_SHAPES = {
    "attention_pool": {(0, 3): (0, 2)},
    "axial": {(0, 4, 6): (0, 4, 6)},
    "class_attention": {(0, 3): (0, 1)},
    "decomposed_relative": {(0, 4, 6): (0, 4, 6)},
    "window": {(0, 4, 6): (0, 4, 6)},
    "spatial_reduction": {(0, 4, 6): (0, 4, 6), (2, 0, 5, 4): (2, 0, 5, 4)},
}
# Inputs that are heads and not tokens.
HEADS_GIVEN = ("k", "v")
# Layers that take `valid` or `positions`.
D = 12
_HEADS, _LATENT = (D, 4, 2, 8), (D, 3, 5, 6, 8, 7)
NUMBERED = {
    "grouped": partial(fa.GroupedQueryAttention, *_HEADS),
    "gated": partial(fa.GatedQueryAttention, *_HEADS),
    "exclusive": partial(fa.ExclusiveAttention, *_HEADS),
    "shared": partial(fa.SharedKeyValueAttention, *_HEADS),
    "residual": partial(fa.ValueResidualAttention, *_HEADS),
    "latent": partial(fa.LatentAttention, *_LATENT),
    "indexed": partial(fa.IndexedSparseAttention, *_LATENT, index_heads=2, index_dim=8, top_k=3),
    "later": partial(fa.CrossLayerAttention, *_HEADS),
    "differential": partial(fa.DifferentialAttention, *_HEADS, depth=1),
    "entmax": partial(fa.EntmaxAttention, *_HEADS),
    "selective": partial(fa.SelectiveAttention, *_HEADS),
    "sigmoid": partial(fa.SigmoidAttention, *_HEADS),
    "cross": partial(fa.CrossAttention, D, 3),
    "t5": partial(fa.T5Attention, D, 3, 5, bidirectional=False),
    "talking": partial(fa.TalkingHeadsAttention, D, 3),
    "shift": partial(fa.RelativeShiftAttention, D, 3, 4),
    "disentangled": partial(fa.DisentangledAttention, D, 3, buckets=4, max_positions=8),
    "buckets of one": partial(fa.DisentangledAttention, D, 3, buckets=None, max_positions=3),
    "longformer": partial(fa.LongformerAttention, D, 3, 4),
    "perceiver": partial(fa.PerceiverAttention, D, 3),
    "class": partial(fa.ClassAttention, D, 3),
    "gated delta": partial(fa.GatedDeltaAttention, D, 6, 4, 5, num_key_heads=3),
    "kimi delta": partial(fa.KimiDeltaAttention, D, 3, 4, 5),
    "lightning": partial(fa.LightningAttention, D, 3, 4, 5, slope_factor=0.5),
    "mamba": partial(fa.Mamba, D, width=9, state_dim=4),
    "mamba2": partial(fa.Mamba2, D, 6, 4, 5, groups=3),
    "rg_lru": partial(fa.RGLRU, D, 3, width=12),
    "convolution": partial(fa.GatedShortConvolution, D),
}
# Layers that take `valid` but have no token positions, or whose tokens are pixels, and why.
NOT_NUMBERED = {
    "LinearAttention": "it reads no positions, and padding from its mask of tokens",
    "AttentionPool": "a probe without a place looks at all tokens",
    "AxialAttention": "lines of an image, without positions",
    "CrossCovarianceAttention": "channels look at channels",
    "DecomposedRelativeAttention": "tokens stand at rows and columns of an image",
    "WindowAttention": "tokens stand at rows and columns of an image",
}
# Layers with `init_cache`: class, arguments, keywords, and keywords of the cache.
_GROUPED, _TEACHING = (D, 6, 3, 4), (D, 10, 20, 0.0)
_WINDOW = CAUSAL & (fa.Window(3, 0) | fa.Prefix(2))
DIFFERENCE = {"depth": 1, "rotary": Rotary(), "qkv_bias": True}
_INDEXER = {"index_heads": 16, "index_dim": 8, "top_k": 3, "index_rotary": Rotary()}
_LATENT_OPTIONS = {"q_rank": 8, "rotary": Rotary(layout="interleaved")}
CACHED = {
    "grouped": (fa.GroupedQueryAttention, _GROUPED, {"rotary": Rotary(), "sinks": True}, {}),
    "grouped ring": (
        fa.GroupedQueryAttention,
        _GROUPED,
        {"rotary": Rotary(), "sinks": True, "mask": _WINDOW},
        {"window": "mask", "keep_first": 2},
    ),
    "grouped norms": (
        fa.GroupedQueryAttention,
        _GROUPED,
        {
            "rotary": Rotary(),
            "q_norm": RMSNorm(4, eps=1e-6),
            "k_norm": RMSNorm(4, eps=1e-6),
            "qkv_bias": True,
        },
        {},
    ),
    "gated": (fa.GatedQueryAttention, _GROUPED, {"rotary": Rotary()}, {}),
    "three positions": (
        fa.GatedQueryAttention,
        _GROUPED,
        {"rotary": Rotary(axes=Sections((1, 0, 1)))},
        {},
    ),
    "exclusive": (fa.ExclusiveAttention, _GROUPED, {"rotary": Rotary()}, {}),
    "shared": (fa.SharedKeyValueAttention, _GROUPED, {"rotary": Rotary()}, {}),
    "residual": (
        fa.ValueResidualAttention,
        _GROUPED,
        {"rotary": Rotary(), "learned_mix": True},
        {},
    ),
    "latent": (fa.LatentAttention, (D, 3, 5, 6, 4, 7), _LATENT_OPTIONS, {}),
    "latent absorbed": (
        fa.LatentAttention,
        (D, 3, 5, 6, 4, 7),
        {**_LATENT_OPTIONS, "absorbed": True},
        {},
    ),
    "differential": (fa.DifferentialAttention, (D, 6, 2, 4), DIFFERENCE, {}),
    "differential ring": (
        fa.DifferentialAttention,
        (D, 12, 6, 4),
        {**DIFFERENCE, "mask": _WINDOW},
        {"window": "mask", "keep_first": 2},
    ),
    "indexed": (fa.IndexedSparseAttention, (D, 3, 5, 6, 4, 7), {**_LATENT_OPTIONS, **_INDEXER}, {}),
    "t5": (fa.T5Attention, (D, 3, 5), {"bidirectional": False, "mask": CAUSAL}, {}),
    "cross as self": (fa.CrossAttention, (D, 3), {"mask": CAUSAL}, {}),
    "multi-head": (fa.MultiHeadAttention, (*_TEACHING, 5), {}, {}),
    "causal": (fa.CausalAttention, _TEACHING, {"qkv_bias": True}, {}),
}
# Recurrent layers.
RECURRENT = {
    "gated_delta": lambda **more: fa.GatedDeltaAttention(11, 6, 4, 5, num_key_heads=3, **more),
    "kimi_delta": lambda **more: fa.KimiDeltaAttention(11, 3, 4, 5, **more),
    "lightning": lambda **more: fa.LightningAttention(11, 3, 4, 5, slope_factor=0.5, **more),
    "mamba": lambda **more: fa.Mamba(11, width=9, state_dim=4, norms="gains", **more),
    "mamba2": lambda **more: fa.Mamba2(11, 6, 4, 5, groups=3, **more),
    "rg_lru": lambda **more: fa.RGLRU(11, 3, width=12, **more),
    "short_convolution": lambda **more: fa.GatedShortConvolution(11, use_bias=True, **more),
}
# Layers for images or patches: class, keywords, shape of the input without its batch.
VISION = {
    "talking heads": (fa.TalkingHeadsAttention, {}, (7, 12)),
    "class": (fa.ClassAttention, {}, (7, 12)),
    "cross-covariance": (fa.CrossCovarianceAttention, {"qkv_bias": True}, (7, 12)),
    "spatial reduction": (fa.SpatialReductionAttention, {"ratio": 2}, (4, 5, 12)),
}
# Layers whose projections sum over a mesh axis: class, arguments, output projection.
PARALLEL_SIZES = {"in_features": 24, "num_heads": 8, "num_kv_heads": 4, "head_dim": 6}
_BIASES = {"rotary": Rotary(), "qkv_bias": True, "out_bias": True}
TENSOR_PARALLEL = {
    "grouped": (fa.GroupedQueryAttention, {**PARALLEL_SIZES, **_BIASES, "sinks": True}, "o_proj"),
    "gated": (fa.GatedQueryAttention, {**PARALLEL_SIZES, "rotary": Rotary()}, "o_proj"),
    "cross": (fa.CrossAttention, {"in_features": 24, "num_heads": 4}, "out_proj"),
}

# Options of constructors by what may be handed in. A flag is turned over, and of words each is
# tried; of the others here is a value beside the default, which changes what a layer computes. A
# function gets the layer's arguments. What an option needs beside it stands in the second table.
OPTIONS = {
    "alpha": 2,
    "buckets": 6,
    "clip_qkv": 0.5,
    "context_dropout": 0.25,
    "dropout": 0.25,
    "eps": 0.1,
    "index_rotary": Rotary(),
    "k_norm": lambda of: RMSNorm(of["head_dim"], eps=0.1),
    "logit_bias": -1.0,
    "mask": CAUSAL & fa.Window(1, 0),
    "multipliers": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
    "normalise": "sum",
    "norms": lambda of: (RMSNorm(of["in_features"] // of["num_heads"], eps=0.1),) * 2,
    "o_norm": lambda of: RMSNorm(of["num_heads"] * of["head_dim"], eps=0.1, over_heads=True),
    "pretrained": (4, 6),
    "q_norm": lambda of: RMSNorm(of["head_dim"], eps=0.1),
    "rotary": Rotary(),
    "rules": fa.Rules(score=fa.Softcap(2.0), scale=0.3),
    "shift": (1, 1),
    "size": (6, 5),
    "slope_factor": 0.5,
    "step_limits": (0.1, 0.2),
    "terms": ("p2c",),
    "v_norm": lambda of: RMSNorm(of["head_dim"], eps=0.1),
    "window": (2, 1),
}
_NORMED = {"rotary": Rotary(), "q_norm": OPTIONS["q_norm"]}
BESIDE = {
    "activation": {"gate": "head"},
    "eps": {"norms": "gains"},
    "key_bias": {"qkv_bias": True, "use_bias": True},
    "norm_after_rotary": _NORMED,
    "pretrained": {"version": 2},
}
# Two ways to write one layer: its variant, and arguments beside those of its first case. What is
# left out is at its default, so a row with {} says what a default stands for.
_HALF = 4**-0.5
SPELLINGS = [
    ("grouped_query", {"qkv_bias": True}, {"qkv_bias": "qkv"}),
    ("grouped_query", {"qkv_bias": "qv"}, {"qkv_bias": True, "key_bias": False}),
    ("grouped_query", {}, {"rules": fa.Rules(score=fa.IDENTITY, scale=_HALF)}),
    ("grouped_query", {}, {"mask": fa.FULL & CAUSAL}),
    ("grouped_query", {}, {"mask": fa.Causal(offset=0)}),
    ("grouped_query", {"rotary": Rotary()}, {"rotary": Rotary(1e4, "half", 4)}),
    ("latent", {}, {"rules": fa.Rules(scale=10**-0.5)}),
    ("cross", {}, {"num_kv_heads": 3, "head_dim": 4, "out_bias": True}),
    ("talking_heads", {}, {"head_dim": 4}),
    ("axial", {}, {"head_dim": 4}),
    ("gated_delta", {"num_key_heads": None}, {"num_key_heads": 6}),
    ("mamba", {}, {"width": 22, "step_rank": 1}),
    ("mamba2", {"use_bias": True}, {"use_bias": True, "out_bias": True}),
    ("perceiver", {}, {"qk_features": 12, "v_features": 12}),
    ("transformer_multi_head", {}, {"kdim": 12, "vdim": 12}),
    ("lightning", {}, {"slope_factor": 1}),
    ("entmax", {"alpha": 2}, {"alpha": 2.0}),
    ("window", {}, {"shift": (0, 0), "version": 1}),
]
# Values that an option refuses wherever a layer has it, and words of the error. Counts, shares that
# are dropped, and words are not here: test_laws_options.py knows them by their annotation.
_OF_RULES = "rules of a layer carry score and scale only; got Rules with "
_ROTARY = "such as rotary=Rotary(); got "
REFUSED = {
    "alpha": [(1.7, ValueError, "alpha must be one of 1.5, 2; got 1.7.")],
    "clip_qkv": [
        (bound, ValueError, f"clip_qkv must be a finite number above zero, or None; got {bound}")
        for bound in (0, -1.0, float("inf"), float("nan"))
    ],
    "mask": [(None, TypeError, "A mask must be a flax_attn mask or a boolean array")],
    "multipliers": [((1.0,) * 5, ValueError, "multipliers must be six numbers")],
    "norm_after_rotary": [(True, ValueError, "pass rotary= and one of q_norm= and k_norm=")],
    "normalise": [("max", ValueError, "normalise must be one of 'softmax', 'sum'; got 'max'.")],
    "num_kv_heads": [(5, ValueError, "num_kv_heads must divide num_heads; got num_heads=")],
    "q_rank": [(0, ValueError, "q_rank must be a whole number of at least 1; got 0.")],
    "qkv_bias": [("x", ValueError, "such as 'qv'; got 'x'."), ("", ValueError, "got ''.")],
    "rotary": [
        (True, TypeError, f"{_ROTARY}True."),
        (Rotary, TypeError, f"{_ROTARY}Rotary."),
        (3, TypeError, f"{_ROTARY}3."),
    ],
    "rules": [
        (fa.Softcap(3.0), TypeError, "rules must be a flax_attn.Rules; got Softcap."),
        (fa.Rules(mask=CAUSAL), ValueError, f"{_OF_RULES}mask."),
        (fa.Rules(sinks=jnp.zeros(6)), ValueError, f"{_OF_RULES}sinks."),
        (fa.Rules(dropout=fa.Dropout(0.5, jax.random.key(0))), ValueError, f"{_OF_RULES}dropout."),
    ],
    "shift": [((9, 9), ValueError, "shift must be counts below the window's sides")],
    "slope_factor": [(-1, ValueError, "slope_factor must be a number of at least 0; got -1.")],
    "step_limits": [((2.0, 1.0), ValueError, "the least and the greatest step, in order")],
    "terms": [(("c2c",), ValueError, "terms must be some of 'c2p', 'p2c', each once")],
}
# Arguments that a layer refuses beside each other.
REFUSED_TOGETHER = [
    ("cross_layer", {"k_norm": RMSNorm(4, eps=1e-6)}, "leave k_norm out"),
    ("differential", {"num_kv_heads": 3}, "num_kv_heads must be even"),
    ("entmax", {"sinks": True}, "EntmaxAttention has no sinks"),
    ("gated_query", {"gate": "head", "fused": True}, "got gate='head'"),
    ("gated_query", {"gate_bias": True, "fused": True}, "say qkv_bias=True"),
    ("grouped_query", {"norm_after_rotary": True, "rotary": Rotary()}, "q_norm= and k_norm="),
    ("indexed_sparse", {"index_dim": 2, "index_rotary": Rotary()}, "index_dim=2, rotary_dim=4"),
    ("grouped_query", {"num_kv_heads": 12}, "got num_heads=6, num_kv_heads=12."),
    ("luong", {"d_encoder": 11}, 'score="dot" needs states of one width; got d_encoder=11'),
    ("luong", {"score": "concat"}, 'units goes with score="concat"'),
    ("luong", {"score": "general", "units": 5}, "got score='general', units=5"),
    *(
        (variant, {width: 12, "num_heads": 5}, f"num_heads must divide {width}; got {width}=12, nu")
        for variant, width in (
            ("multi_head", "d_out"),
            ("multi_head_combined", "d_out"),
            ("multi_head_einsum", "d_out"),
            ("transformer_multi_head", "embed_dim"),
            ("cross_covariance", "dim"),
        )
    ),
    ("perceiver", {"memory_features": None, "v_features": 9}, "say residual=False"),
    ("window", {"pretrained": (4, 6)}, "or say version=2; got pretrained=(4, 6)"),
]
