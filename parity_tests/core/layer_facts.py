"""What tests know of layers: the one place to edit after adding a layer.

Each table says above it which layers belong there. `core/test_house.py` and the tests of each table
name a layer that is missing.
"""

from functools import partial

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
