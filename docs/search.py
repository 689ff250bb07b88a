"""What comes first in the site's search: other names as tags, and a rank for each section.

MkDocs calls `on_post_build` after the theme has written its index of sections, each with a
location, a title and a text. The theme's own search then ranks by title, tags and text.
"""

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

ALSO = re.compile(r"Also called: (.*?)\.?</p>", re.DOTALL)
NAME = re.compile(r"[\w.]+\.(\w+)")
WORD = re.compile(r"[A-Z]*[a-z0-9]+|[A-Z]+")
# What people look for by words that no heading has: the page or section, and the words.
WORDS = {
    "": "install, pip, CUDA, licence, license, version, start",
    "#use-a-layer-in-a-training-step": "train, training, training loop, optimizer, optax, Adam",
    "docs/benchmarks/": "speed, latency, throughput, memory, faster",
    "docs/contracts/": "guarantee, promise, determinism, deterministic results, reproducible",
    "docs/course/": "course, lecture, exercises, solutions, notebooks, teaching, students, hours",
    "docs/certificate/": "certificate, proof of each layer",
    "docs/faq/": "FAQ, encoder, vision transformer, equinox, haiku",
    "docs/faq/#which-layer-for-bert-vit-whisper-t5": "BERT, ViT, vision transformer, Whisper, T5",
    "docs/faq/#which-versions": "Python 3.11, Python 3.12, Python 3.13, jax version",
    "docs/kernels/": "GPU, TPU, CUDA, flash attention, FlexAttention, flex_attention, Pallas, "
    "Triton, cuDNN, splash attention, backend, out of memory, OOM",
    "docs/mistakes/": "BatchNorm, batch norm, GroupNorm, SwiGLU",
    "docs/models/": "Hugging Face, huggingface, transformers, Llama, Llama 2, Llama 3, Qwen, "
    "Gemma, Mistral, checkpoint, convert weights, pretrained, fine-tuning, finetune",
    "docs/models/#a-whole-model": "load model, from_pretrained",
    "docs/models/#the-attention_mask-of-a-tokenizer": "tokenizer, attention mask, attention_mask, "
    "attention mask of ones and zeros, input_ids",
    "docs/models/#there-and-back": "save model, save_pretrained",
    "docs/moving/": "torchax, MaxText, equinox, Linen, migrate",
    "docs/moving/#decoding-inside-flaxs-nnxmultiheadattention": "decode=True, is_causal",
    "docs/moving/#from-a-torch-state_dict-in-memory": "state_dict, torch weights, named_parameters",
    "docs/moving/#from-flaxnnxmultiheadattention": "flax nnx MultiHeadAttention",
    "docs/porting/": "PyTorch, torch, port a module, convert a module, convolution, images, NCHW, "
    "NHWC, channels first, channels last",
    "docs/recipes/#a-decoder-with-scan-remat-dropout-and-a-cache": "scan, nnx.scan, lax.scan, "
    "transformer, decoder, language model, GPT, small GPT",
    "docs/recipes/#attention-weights-drawn": "attention maps, visualize attention, plot attention, "
    "heatmap, output_attentions",
    "docs/recipes/#a-layer-with-alibi-or-a-softcap": "ALiBi slopes, logit cap",
    "docs/recipes/#derivatives-of-every-kind": "forward mode, jvp, jacfwd, Hessian, hvp, second "
    "derivatives",
    "docs/recipes/#dropout-then-evaluation": "dropout, dropout rate, train, eval, deterministic",
    "docs/recipes/#export-for-cpu-cuda-and-tpu": "export, ONNX, StableHLO, serve, deploy",
    "docs/recipes/#generate": "decode, decode with a cache, decode step, decoding, inference, "
    "incremental decoding, autoregressive",
    "docs/recipes/#mixed-precision-bfloat16-training-float32-weights": "bfloat16, bf16, float16, "
    "fp16, half precision, loss scaling",
    "docs/recipes/#orbax": "orbax checkpoint, resume training",
    "docs/recipes/#order-and-position": "position ids, position_ids, positions",
    "docs/recipes/#packed-documents": "packing, packed sequences, block diagonal, document mask, "
    "varlen, cu_seqlens",
    "docs/recipes/#padded-prompts": "left padded prompts, unequal prompts",
    "docs/recipes/#padding-masks": "padding, padding mask, left padding, right padding, "
    "attention mask, key_padding_mask, variable length",
    "docs/recipes/#remat": "gradient checkpointing, activation checkpointing, rematerialization",
    "docs/recipes/#speculative-rollback": "speculative decoding, draft model",
    "docs/scale/": "ring attention, sharding, shard_map, pjit, pmap, tensor parallelism, data "
    "parallel, context parallelism, mesh, multi host, several devices",
    "docs/scale/#fsdp-of-a-language-model": "FSDP, ZeRO, fully sharded",
    "docs/silent/": "NaN, bug, pitfalls, wrong output, wrong results",
    "notebooks/positions/": "positional encoding, positional embedding, sinusoidal, learned "
    "positions",
    "reference/attend/#flax_attn.attend.attend": "logsumexp, LSE, scaled_dot_product_attention, "
    "sink, attention sinks, attention weights",
    "reference/caches/#flax_attn.cache.Cache": "KV cache",
    "reference/caches/#flax_attn.quantized.Quantized": "quantization",
    "reference/families/#flax_attn.families.generate": "sampling, greedy, top-k, top-p, "
    "temperature",
    "reference/layers/": "self-attention, causal attention, layers, modules",
    "reference/layers/cross/#flax_attn.layers.CrossAttention": "cross attention",
    "reference/masks/#flax_attn.masks.Causal": "causal mask, autoregressive mask",
    "reference/masks/#flax_attn.masks.MaskFn": "custom mask, mask function",
    "reference/positions/#flax_attn.positions.Rotary": "RoPE, rotary embedding",
}
# Layers for learning, what is below a heading of its own, and pages of record: behind what people
# use. The search takes "attention" for the beginning of AttentionPool, which it counts as rare.
LATER = re.compile(
    r"reference/layers/one-head/|layers\.(MultiHeadAttention|AttentionPool)"
    r"|\.(DropoutMask|Llama3Scaling|CheckpointError|Decode)$"
    r"|\.(__call__|init_cache|remember|kv_shared_layer_index)$|ALIASES$"
    r"|^(CHANGELOG|CONTRIBUTING)/|^docs/(way|night|trial|certificate|contracts|benchmarks/\w+)/"
)
# Names made of common words, behind the sections that are about these words.
SECOND = re.compile(r"\.(MaskFn|LongRope|Cross(Covariance|Layer)Attention)$")
GUIDES = re.compile(r"^(#|docs/(?!mistakes)|reference/)")
# Names of one word, which have no other word to be typed, and the layers that README says to take.
FIRST = re.compile(
    r"^reference/(?!families|.*\.(Dropout|Additive)$).*#[\w.]+\.([A-Z]*[a-z]+|[A-Z]+)$"
    r"|layers\.(GroupedQuery|TransformerMultiHead)Attention$"
)


@event_priority(-100)  # after the theme has written its index
def on_post_build(config: MkDocsConfig) -> None:
    """Adds tags and ranks to the index that browsers search."""
    path = Path(config.site_dir) / "search/search_index.json"
    index = json.loads(path.read_text("utf-8"))
    sections = {section["location"]: section for section in index["docs"]}
    first = {name_of(x).lower() for x in sections if FIRST.search(x)}
    for location, section in sections.items():
        section["boost"] = rank(location, first)
        section["tags"] = tags(section)
    path.write_text(json.dumps(index, separators=(",", ":")), "utf-8")


def name_of(location: str) -> str:
    """The name that a section of the reference is about; "" elsewhere."""
    return location.rpartition("#")[2].rpartition(".")[2]


def rank(location: str, first: set[str]) -> float:
    """The factor by which all words of a section count.

    A function such as `alibi_slopes` comes behind the class whose name it begins with: the search
    takes the typed word for its beginning, and counts rare words more.
    """
    begins, *rest = name_of(location).split("_")
    if LATER.search(location) or (rest and begins in first):
        return 0.3
    if FIRST.search(location):
        return 3.0
    return 2.0 if GUIDES.match(location) and not SECOND.search(location) else 1.0


def tags(section: dict[str, str]) -> list[str]:
    """Other names of what a section is about, its own name and the words in it."""
    also = ALSO.search(section["text"])
    names = re.split(r"[,;] ", re.sub(r"<[^>]+>", "", also[1])) if also else []
    names += filter(None, WORDS.get(section["location"], "").split(", "))
    name = NAME.match(section["title"])
    words = WORD.findall(name[1]) if name else []
    return [*names, *([name[1]] if name else []), *([" ".join(words)] if len(words) > 1 else [])]
