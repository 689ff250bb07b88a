"""The softmax attentions of 40 model types that `families` serves, as transformers publishes them.

Each is the class of transformers with a small config, in eager attention, and with the inputs that
the layer of its whole model gives it: angles of the model's own rotary, and an additive causal mask
where the model is a decoder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn

from flax_attn.parity.sides.torch_float64 import lifted

from .subject import BATCH, Inputs, Rng, randomised, tokens

HIDDEN = float(np.finfo(np.float32).min)
# Sizes that no two roles share; the width is that of the heads together where a class asks for it.
GROUPED = dict(hidden_size=36, num_attention_heads=6, num_key_value_heads=3, head_dim=10)
SHARED = dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
PLAIN = dict(hidden_size=40, num_attention_heads=5)
SMALL = dict(num_hidden_layers=2, intermediate_size=9, vocab_size=5, max_position_embeddings=64)
NO_TOKENS = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)


@dataclass(frozen=True)
class Served:
    """The attention of a model type.

    Attributes:
      name: its model_type.
      make: builds the module in float64 and eval mode, with random parameters, always the same.
      inputs: `(module, rng, length)` to positional and keyword arguments: numpy arrays, numbers,
        None, and tuples of these.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[nn.Module, Rng, int], Inputs]


@dataclass(frozen=True)
class Source:
    """Where transformers has the attention of a model type.

    Attributes:
      model_type: of its config.
      path: module and class of the attention, "llama.LlamaAttention".
      fields: of the config.
      built: what the class takes from a config; it takes the config itself without.
    """

    model_type: str
    path: str
    fields: dict[str, Any]
    built: Callable[[Any], dict[str, Any]] | None = None

    @property
    def config(self) -> Any:
        auto = import_module("transformers.models.auto.configuration_auto")
        config = auto.CONFIG_MAPPING[self.model_type](**self.fields)
        config._attn_implementation = "eager"
        return config

    @property
    def module(self) -> Any:
        folder = self.path.split(".")[0]
        return import_module(f"transformers.models.{folder}.modeling_{folder}")

    def make(self) -> nn.Module:
        cls = getattr(self.module, self.path.split(".")[1])
        more = self.built(self.config) if self.built else {"config": self.config}
        if "layer_idx" in cls.__init__.__code__.co_varnames:
            more["layer_idx"] = 0
        with lifted():  # tables of positions, which some classes hold
            module = cls(**more)
        return randomised(module, Rng(sum(self.model_type.encode())))

    @property
    def width(self) -> int:
        return self.config.hidden_size

    @property
    def heads(self) -> int:
        return self.config.num_attention_heads


Read = Callable[[Source, nn.Module, Rng, int], Inputs]


def causal(length: int) -> np.ndarray:
    """An additive mask, `1 1 T T`."""
    return np.triu(np.full((1, 1, length, length), HIDDEN), 1)


def alone(source: Source, module: nn.Module, rng: Rng, length: int) -> Inputs:
    """Inputs of an encoder's attention: tokens alone."""
    return (tokens(rng, length, source.width),), {}


def masked(source: Source, module: nn.Module, rng: Rng, length: int) -> Inputs:
    """Tokens and a causal mask."""
    return (tokens(rng, length, source.width),), {"attention_mask": causal(length)}


def placed(source: Source, module: nn.Module, rng: Rng, length: int) -> Inputs:
    """The same, and the places of the tokens."""
    args, kwargs = masked(source, module, rng, length)
    return args, {**kwargs, "position_ids": np.arange(length)[None]}


def turned(source: Source, module: nn.Module, rng: Rng, length: int, *kind: str) -> Inputs:
    """Tokens, a causal mask, and cos and sin; `kind` of the layer, where rotaries differ by it."""
    args, kwargs = masked(source, module, rng, length)
    names = (x for x in vars(source.module) if x.endswith("RotaryEmbedding"))
    rotary = getattr(source.module, next(names))(source.config)  # in float32, as the class has it
    angles = rotary(torch.from_numpy(args[0]), torch.arange(length)[None], *kind)
    return args, {"position_embeddings": tuple(x.numpy() for x in angles), **kwargs}


def falcon(source: Source, module: nn.Module, rng: Rng, length: int) -> Inputs:
    args, kwargs = turned(source, module, rng, length)
    return args, {"alibi": None, **kwargs}


def bloom(source: Source, module: nn.Module, rng: Rng, length: int) -> Inputs:
    """Tokens, a residual of zeros, the bias by distance, and a causal mask."""
    (x,), kwargs = masked(source, module, rng, length)
    there = torch.ones(BATCH, length)
    alibi = source.module.build_alibi_tensor(there, source.heads, torch.float64).numpy()
    return (x, np.zeros_like(x)), {"alibi": alibi, **kwargs}


def mpt(source: Source, module: nn.Module, rng: Rng, length: int) -> Inputs:
    """Tokens, the bias by distance, and a mask that is true for what is hidden."""
    alibi = source.module.build_mpt_alibi_tensor(source.heads, length).double().numpy()
    hidden = causal(length) < 0
    return (tokens(rng, length, source.width),), {"position_bias": alibi, "attention_mask": hidden}


def patches(source: Source, module: nn.Module, rng: Rng, length: int) -> Inputs:
    """Patches of an image in one row, and before them the class token, which is not turned."""
    config = source.config
    image = torch.zeros(1, 3, config.patch_size, (length - 1) * config.patch_size).double()
    with lifted():
        angles = source.module.DINOv3ViTRopePositionEmbedding(config).eval()(image)
    pair = tuple(x.numpy() for x in angles)
    return (tokens(rng, length, source.width),), {"position_embeddings": pair}


def by_sizes(config: Any, side: str = "encoder") -> dict[str, Any]:
    """Arguments of a class that takes sizes in place of fields."""
    heads = getattr(config, f"{side}_attention_heads", None) or config.num_attention_heads
    return {"embed_dim": config.hidden_size, "num_heads": heads, "config": config}


def of_decoder(config: Any) -> dict[str, Any]:
    return {**by_sizes(config, "decoder"), "is_decoder": True}


def local(config: Any) -> dict[str, Any]:
    """GPT-Neo's layer with a window, which it hides by itself."""
    return {"config": config, "attention_type": "local", "layer_id": 0}


def with_bias(config: Any) -> dict[str, Any]:
    """T5's first layer, which has the table of distances."""
    return {"config": config, "has_relative_attention_bias": True}


def served(
    model_type: str,
    path: str,
    read: Read,
    sizes: dict[str, Any],
    built: Callable[[Any], dict[str, Any]] | None = None,
    **fields: Any,
) -> Served:
    source = Source(model_type, path, {**SMALL, **NO_TOKENS, **sizes, **fields}, built)
    return Served(model_type, source.make, partial(read, source))


LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
HALF = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
GPT2 = dict(n_embd=40, n_head=5, n_layer=2, n_positions=64, n_inner=9)
BART = dict(d_model=40, encoder_attention_heads=5, decoder_attention_heads=4)
TOWER: dict[str, Any] = dict(image_size=4, patch_size=2)

DECODERS = (
    served("llama", "llama.LlamaAttention", turned, GROUPED, rope_parameters=LLAMA3),
    served("mistral", "mistral.MistralAttention", turned, GROUPED),
    served("qwen2", "qwen2.Qwen2Attention", turned, SHARED),
    served("qwen3", "qwen3.Qwen3Attention", turned, GROUPED),
    served("gemma", "gemma.GemmaAttention", turned, GROUPED),
    served("gemma2", "gemma2.Gemma2Attention", turned, GROUPED, query_pre_attn_scalar=9),
    served(
        "gemma3_text",
        "gemma3.Gemma3Attention",
        lambda *given: turned(*given, "sliding_attention"),
        GROUPED,
    ),
    served("phi", "phi.PhiAttention", turned, SHARED, rope_parameters=HALF),
    served("phi3", "phi3.Phi3Attention", turned, SHARED),
    served("gpt2", "gpt2.GPT2Attention", masked, GPT2),
    served("gpt_neox", "gpt_neox.GPTNeoXAttention", turned, PLAIN),
    served("gptj", "gptj.GPTJAttention", placed, GPT2, rotary_dim=4),
    served("bloom", "bloom.BloomAttention", bloom, dict(hidden_size=40, n_head=5)),
    served(
        "falcon",
        "falcon.FalconAttention",
        falcon,
        dict(hidden_size=48, num_attention_heads=6, num_kv_heads=3, new_decoder_architecture=True),
    ),
    served("opt", "opt.OPTAttention", masked, PLAIN, ffn_dim=9),
    served("olmo", "olmo.OlmoAttention", turned, SHARED, clip_qkv=0.5),
    served("olmo2", "olmo2.Olmo2Attention", turned, SHARED),
    served("cohere", "cohere.CohereAttention", turned, SHARED, use_qk_norm=True),
    served(
        "stablelm",
        "stablelm.StableLmAttention",
        turned,
        SHARED,
        qk_layernorm=True,
        rope_parameters=HALF,
    ),
    served("starcoder2", "starcoder2.Starcoder2Attention", turned, SHARED),
    served("granite", "granite.GraniteAttention", turned, SHARED, attention_multiplier=0.25),
    served("gpt_oss", "gpt_oss.GptOssAttention", turned, GROUPED),
    served("smollm3", "smollm3.SmolLM3Attention", turned, SHARED),
    served("exaone4", "exaone4.Exaone4Attention", turned, GROUPED),
    served("nemotron", "nemotron.NemotronAttention", turned, SHARED, rope_parameters=HALF),
    served("mpt", "mpt.MptAttention", mpt, dict(d_model=40, n_heads=5, n_layers=2)),
    served("codegen", "codegen.CodeGenAttention", placed, {**GPT2, "n_head": 4}, rotary_dim=4),
    served("gpt_bigcode", "gpt_bigcode.GPTBigCodeAttention", masked, GPT2),
    served("glm", "glm.GlmAttention", turned, {**GROUPED, "head_dim": 8}, rope_parameters=HALF),
    served("persimmon", "persimmon.PersimmonAttention", turned, PLAIN),
    served(
        "gpt_neo",
        "gpt_neo.GPTNeoSelfAttention",
        alone,
        dict(hidden_size=40, num_heads=5, num_layers=2, window_size=3),
        local,
        attention_types=[[["local", "global"], 1]],
    ),
)
ENCODERS = (
    served("bert", "bert.BertSelfAttention", alone, PLAIN),
    served("distilbert", "distilbert.DistilBertSelfAttention", alone, dict(dim=40, n_heads=5)),
    served("vit", "vit.ViTAttention", alone, PLAIN, **TOWER),
    served("dinov2", "dinov2.Dinov2Attention", alone, PLAIN, **TOWER),
    served("dinov3_vit", "dinov3_vit.DINOv3ViTAttention", patches, PLAIN, **TOWER),
    served("clip_vision_model", "clip.CLIPAttention", alone, PLAIN, **TOWER),
    served("whisper", "whisper.WhisperAttention", alone, BART, by_sizes),
    served("bart", "bart.BartAttention", masked, BART, of_decoder),
    served("t5", "t5.T5Attention", alone, dict(d_model=34, d_kv=10, num_heads=3), with_bias),
)
SERVED = DECODERS + ENCODERS
