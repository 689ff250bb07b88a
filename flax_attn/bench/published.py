"""Layers of published models at their own widths, against their classes in transformers.

This library's layers compute rotary angles in the call; a transformers model computes them once for
all layers, so they are computed before timing. Swin's attention takes tokens split into windows.

`flax_attn.parity.compare` verifies all on many tokens with few heads. This library's layer and the
class are also compared on few tokens at the published widths. torch's SDPA and flax.nnx's attention
use the same projections and are not, since that takes minutes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np
from flax import nnx

from .. import families
from ..layers import WindowAttention
from ..parity import compare
from ..weights.rule import Rule
from .competitor import OWN_FAMILY, Competitor
from .program import JaxProgram, TorchProgram, device
from .proof import Proof, proof_of
from .task import Task

WIDE = 160  # tokens at the published widths: from 128 on "auto" computes in blocks
LONG = 1088  # tokens with few heads: above 1,024 blocks run in loops
SIDE = 7  # side of a Swin window, in tokens
Call = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Published:
    """A layer of a published model.

    Attributes:
      config: the fields of its config.json that its attention reads, including model_type.
      classes: prefix of its class names in transformers.
      index: index of the layer in the model.
      sdpa, nnx: why torch's fused attention and flax.nnx's cannot run it, or "".
    """

    config: dict[str, Any]
    classes: str
    index: int = 0
    sdpa: str = ""
    nnx: str = ""

    @property
    def window(self) -> int | None:
        """Number of visible keys per query of this layer, including its own; None for all."""
        kinds = self.config.get("layer_types")
        local = kinds is not None and kinds[self.index] == "sliding_attention"
        return self.config["sliding_window"] if local else None

    @property
    def narrow(self) -> "Published":
        """The same layer with one key head, or with two heads if heads are not grouped."""
        heads, shared = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        few = {"num_attention_heads": heads // shared, "num_key_value_heads": 1}
        if heads == shared:
            few = {"num_attention_heads": 2, "num_key_value_heads": 2}
        return replace(self, config={**self.config, "hidden_size": 48, **few})


def _config(kind: str, width: int, heads: int, shared: int, each: int, **more: Any) -> dict:
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": shared}
    return {"model_type": kind, **sizes, "head_dim": each, **more}


BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
GEMMA2 = _config("gemma2", 3584, 16, 8, 256, query_pre_attn_scalar=256, sliding_window=4096)
GEMMA2 |= {"attn_logit_softcapping": 50.0, "rope_theta": 1e4, **BOTH_KINDS}
GPT_OSS = _config("gpt_oss", 2880, 64, 8, 64, sliding_window=128, **BOTH_KINDS)
GPT_OSS |= {"attention_bias": True, "rope_theta": 15e4, "max_position_embeddings": 4096}
GPT_OSS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 15e4}}
LATENT = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128}
LATENT |= {"qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 1e4, "num_hidden_layers": 1}
CAPPED_REFUSAL = ("it cannot cap the scores",) * 2
SINKS_REFUSAL = ("it has no sinks",) * 2
BIASED_REFUSAL = "it cannot add the bias of a window", "it has no windows"
NARROW_VALUES_REFUSAL = "", "it takes no values narrower than the keys"
MODELS = {
    "Llama 3 8B": Published(_config("llama", 4096, 32, 8, 128, rope_theta=5e5), "Llama"),
    "Gemma 2 9B, local": Published(GEMMA2, "Gemma2", 0, *CAPPED_REFUSAL),
    "Gemma 2 9B, global": Published(GEMMA2, "Gemma2", 1, *CAPPED_REFUSAL),
    "gpt-oss 20B, local": Published(GPT_OSS, "GptOss", 0, *SINKS_REFUSAL),
    "gpt-oss 20B, global": Published(GPT_OSS, "GptOss", 1, *SINKS_REFUSAL),
    "DeepSeek V2 Lite": Published(
        _config("deepseek_v2", 2048, 16, 16, 64, **LATENT), "DeepseekV2", 0, *NARROW_VALUES_REFUSAL
    ),
    "Swin T": Published(
        {"model_type": "swin", "hidden_size": 96, "heads": 3}, "Swin", 0, *BIASED_REFUSAL
    ),
}


@dataclass(frozen=True)
class PublishedLayer(Task):
    """A layer of `MODELS`, whose heads and widths are its own."""

    model: str = ""

    @property
    def of(self) -> Published:
        """The layer."""
        return MODELS[self.model]

    @property
    def table(self) -> str:
        return f"{self.model}, width {self.features}, {self.dtype}"

    @property
    def features(self) -> int:
        return self.of.config["hidden_size"]


def layer(model: str, length: int, which: str) -> PublishedLayer:
    """Returns the task of a model; for Swin at the nearest square of whole windows."""
    config = MODELS[model].config
    heads = config.get("num_attention_heads") or config["heads"]
    width = config.get("head_dim", config["hidden_size"] // heads)
    if config["model_type"] == "swin":
        length = (SIDE * max(1, round(length**0.5 / SIDE))) ** 2
    return PublishedLayer(length, width, heads, which=which, model=model)


def competitors() -> list[Competitor]:
    """Returns this library's layer, transformers' class, and the layer with flax.nnx attention."""

    def torch(name: str, family: str, implementation: str) -> Competitor:
        refusal = partial(_refusal, implementation)
        proof = partial(_prove, implementation)
        return Competitor(name, family, partial(_torch, implementation), refusal, prove=proof)

    return [
        Competitor(OWN_FAMILY, OWN_FAMILY, partial(_flax, _called), prove=partial(_prove, "eager")),
        torch("transformers, sdpa", "torch", "sdpa"),
        torch("transformers, eager", "torch.eager", "eager"),
        Competitor(
            "flax.nnx",
            "flax.nnx",
            partial(_flax, _nnx),
            lambda task: task.of.nnx or None,
            prove=partial(_prove, "flax.nnx"),
        ),
    ]


def _refusal(implementation: str, task: PublishedLayer) -> str | None:
    return (implementation == "sdpa" and task.of.sdpa) or None


def _is_window(of: Published) -> bool:
    return of.config["model_type"] == "swin"


def _layer(of: Published) -> nnx.Module:
    if _is_window(of):
        size, heads = of.config["hidden_size"], of.config["heads"]
        return WindowAttention(size, (SIDE, SIDE), heads, rngs=nnx.Rngs(0))
    return families.attention(of.config, of.index, rngs=nnx.Rngs(0))


def _rules(of: Published) -> Sequence[Rule]:
    if _is_window(of):
        table = "relative_position_bias_table"
        return (Rule(f"relative_position_bias.{table} -> {table}"),)
    return families.rules(of.config, of.index)


def _grid(x: Any) -> Any:
    """Reshapes tokens to an image, `B T D` to `B rows columns D`."""
    side = round(x.shape[1] ** 0.5)
    return x.reshape(x.shape[0], side, side, x.shape[2])


def _called(of: Published) -> Call:
    """Returns `call(layer, x)` for this library's layer."""
    if _is_window(of):
        return lambda layer, x: layer(_grid(x)).reshape(x.shape)
    return lambda layer, x: layer(x)


def _nnx(of: Published) -> Call:
    """Returns a call with the same projections and rotary angles but flax.nnx's attention."""

    def call(layer: Any, x: Any) -> Any:
        tokens = layer.tokens(x)
        q, k, v, _ = layer.project(tokens)
        return layer.output(nnx.dot_product_attention(q, k, v, is_causal=True), tokens)

    return call


def _flax(called: Callable[[Published], Call], task: PublishedLayer) -> JaxProgram:
    graph, params, rest = nnx.split(_layer(task.of), nnx.Param, ...)
    call = called(task.of)

    def run(inputs: Any) -> Any:
        return call(nnx.merge(graph, inputs["params"], rest), inputs["x"])

    return JaxProgram(run, task.which, {"params": params})


def _transformers_module(implementation: str, of: Published) -> tuple[Any, Call]:
    """Returns the transformers module and `call(module, x)`."""
    library: Any = import_module("transformers")
    kind = of.config["model_type"]
    file: Any = import_module(f"transformers.models.{kind}.modeling_{kind}")
    attention = getattr(file, f"{of.classes}Attention")
    if _is_window(of):
        config = library.SwinConfig(attn_implementation=implementation)
        sizes = of.config["hidden_size"], of.config["heads"]
        return attention(config, *sizes, SIDE).eval(), _windows
    fields = {name: x for name, x in of.config.items() if name != "model_type"}
    config = library.AutoConfig.for_model(kind, **fields)
    config._attn_implementation = implementation
    rotary = getattr(file, f"{of.classes}RotaryEmbedding")

    @lru_cache(maxsize=1)
    def handed(length: int, dtype: Any) -> Any:
        """Angles and mask, built in the call so that they are float64 where the inputs are."""
        torch: Any = import_module("torch")
        x, places = torch.zeros(1, length, 1, dtype=dtype), torch.arange(length)[None]
        mask = None if implementation == "sdpa" else _mask(of, length, dtype)
        return rotary(config)(x, places), mask

    def call(layer: Any, x: Any) -> Any:
        angles, mask = handed(x.shape[1], x.dtype)
        return layer(hidden_states=x, position_embeddings=angles, attention_mask=mask)[0]

    return attention(config, layer_idx=of.index).eval(), call


def _mask(of: Published, length: int, dtype: Any) -> Any:
    """The additive mask of eager attention."""
    torch: Any = import_module("torch")
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    if of.window is not None:
        hidden |= torch.ones(length, length, dtype=torch.bool).tril(-of.window)
    zeros = torch.zeros(length, length, dtype=dtype)
    return zeros.masked_fill(hidden, torch.finfo(dtype).min)[None, None]


def _windows(layer: Any, x: Any) -> Any:
    """Applies transformers' Swin attention to unshifted windows."""
    grid = _grid(x)
    B, rows, columns, D = grid.shape
    parts = grid.view(B, rows // SIDE, SIDE, columns // SIDE, SIDE, D).transpose(2, 3)
    out = layer(parts.reshape(-1, SIDE * SIDE, D))[0]
    return out.view(parts.shape).transpose(2, 3).reshape(x.shape)


def _torch(implementation: str, task: PublishedLayer) -> TorchProgram:
    torch: Any = import_module("torch")
    module, call = _transformers_module(implementation, task.of)
    module = module.to(device=device(), dtype=getattr(torch, task.dtype))
    with torch.no_grad():
        for param in module.parameters():  # some are not initialised
            param.normal_(std=0.02)
    params = dict(module.named_parameters())
    return TorchProgram(lambda inputs: call(module, inputs["x"]), task.which, params)


def _prove(implementation: str, task: PublishedLayer) -> Proof:
    """Compares outputs and gradients with the same weights, whatever the pass."""
    model, length = task.model, task.length
    if _is_window(task.of):
        return _proven(implementation, model, False, length)
    few = _proven(implementation, model, True, min(length, LONG))
    if implementation != "eager" or not few.ok:
        return few
    whole = _proven(implementation, model, False, min(length, WIDE))
    return few if whole.ok else whole


@lru_cache
def _proven(implementation: str, name: str, narrow: bool, length: int) -> Proof:
    """Compares in float64 and float32; flax.nnx in float32 only, since its softmax always is."""
    of = MODELS[name].narrow if narrow else MODELS[name]
    module, call = _transformers_module(
        "eager" if implementation == "flax.nnx" else implementation, of
    )
    x = np.random.default_rng(0).standard_normal((1, length, of.config["hidden_size"]))
    dtypes = ("float64",) if not narrow and not _is_window(of) else ("float64", "float32")
    report = compare(
        module,
        _layer(of),
        x,
        rules=_rules(of),
        torch_call=call,
        flax_call=(_nnx if implementation == "flax.nnx" else _called)(of),
        dtypes=dtypes[1:] if implementation == "flax.nnx" else dtypes,
        taps=False,
        eager=False,
    )
    return proof_of(report)
