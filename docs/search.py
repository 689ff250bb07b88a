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
    "docs/benchmarks/": "speed, latency, throughput, memory, faster",
    "docs/course/": "course, lecture, exercises, solutions, notebooks, teaching, students, hours",
    "docs/faq/": "BERT, ViT, Whisper, T5, encoder, decoder, FAQ, equinox, haiku",
    "docs/kernels/": "GPU, TPU, CUDA, flash attention, FlexAttention, flex_attention, Pallas, "
    "out of memory, OOM",
    "docs/mistakes/": "BatchNorm, batch norm, GroupNorm, padding SAME, SwiGLU",
    "docs/models/": "Hugging Face, huggingface, transformers, Llama, Llama 2, Llama 3, Qwen, "
    "Gemma, Mistral, checkpoint, convert weights, pretrained",
    "docs/moving/": "torchax, MaxText, equinox, Linen, migrate",
    "docs/moving/#from-flaxnnxmultiheadattention": "flax nnx MultiHeadAttention",
    "docs/porting/": "PyTorch, torch, port a module, convert a module, convolution, images, NCHW, "
    "NHWC, channels first, channels last",
    "docs/recipes/#dropout-then-evaluation": "dropout, train, eval, deterministic",
    "docs/recipes/#generate": "decode, decoding",
    "docs/recipes/#orbax": "orbax checkpoint",
    "docs/recipes/#remat": "gradient checkpointing, activation checkpointing, rematerialization",
    "docs/scale/": "ring attention, sharding, tensor parallelism, context parallelism, FSDP, mesh",
    "docs/silent/": "NaN, bug, pitfalls",
    "reference/attend/#flax_attn.attend.attend": "logsumexp, LSE, scaled_dot_product_attention",
    "reference/caches/#flax_attn.quantized.Quantized": "quantization",
    "reference/layers/": "self-attention, causal attention, layers, modules",
    "reference/layers/cross/#flax_attn.layers.CrossAttention": "cross attention",
}
# Layers for learning, what is below a heading of its own, and pages of record: behind what people
# use. The search takes "attention" for the beginning of AttentionPool, which it counts as rare.
LATER = re.compile(
    r"reference/layers/one-head/|layers\.(MultiHeadAttention|AttentionPool)"
    r"|\.(__call__|init_cache|remember|kv_shared_layer_index)$|ALIASES$"
    r"|^(CHANGELOG|CONTRIBUTING)/|^docs/(way|night|trial|certificate|contracts|benchmarks/\w+)/"
)
GUIDES = re.compile(r"^(docs/(?!mistakes)|reference/)")
# Names of one word, which have no other word to be typed, and the layers that README says to take.
FIRST = re.compile(
    r"^reference/(?!families).*#[\w.]+\.([A-Z]*[a-z]+|[A-Z]+)$"
    r"|layers\.(GroupedQuery|TransformerMultiHead|Cross)Attention$"
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
    return 3.0 if FIRST.search(location) else 2.0 if GUIDES.match(location) else 1.0


def tags(section: dict[str, str]) -> list[str]:
    """Other names of what a section is about, its own name and the words in it."""
    also = ALSO.search(section["text"])
    names = re.split(r"[,;] ", re.sub(r"<[^>]+>", "", also[1])) if also else []
    names += filter(None, WORDS.get(section["location"], "").split(", "))
    name = NAME.match(section["title"])
    words = WORD.findall(name[1]) if name else []
    return [*names, *([name[1]] if name else []), *([" ".join(words)] if len(words) > 1 else [])]
