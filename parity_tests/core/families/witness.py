"""The attention of transformers' classes, given what their whole model gives it."""

import copy
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest

# The folder of a family, the beginning of its classes' names, and where the text's differ.
FOLDERS = {
    "llama": ("llama", "Llama", ""),
    "mistral": ("mistral", "Mistral", ""),
    "qwen2": ("qwen2", "Qwen2", ""),
    "qwen3": ("qwen3", "Qwen3", ""),
    "gemma2": ("gemma2", "Gemma2", ""),
    "smollm3": ("smollm3", "SmolLM3", ""),
    "olmo2": ("olmo2", "Olmo2", ""),
    "cohere": ("cohere", "Cohere", ""),
    "phi3": ("phi3", "Phi3", ""),
    "gpt_oss": ("gpt_oss", "GptOss", ""),
    "gemma3_text": ("gemma3", "Gemma3", "Text"),
    "llama4_text": ("llama4", "Llama4", "Text"),
}


def library() -> Any:
    """transformers, which says nothing of the configs that it doubts; the test is skipped else."""
    pytest.importorskip("torch", reason="the witness is torch's")
    found = pytest.importorskip("transformers", reason="the witness is transformers'")
    found.logging.set_verbosity_error()
    return found


def found(name: str, kind: str) -> Any:
    """A class of a family: its Config, Attention, DecoderLayer or Model."""
    folder, prefix, text = FOLDERS[name]
    if kind == "Config":
        return getattr(library(), f"{prefix}{text}Config")
    module = import_module(f"transformers.models.{folder}.modeling_{folder}")
    both = (f"{prefix}{text}{kind}", f"{prefix}{kind}")
    return next(getattr(module, x) for x in both if hasattr(module, x))


def config_of(given: dict[str, Any], name: str) -> Any:
    """The config of a family, as `from_pretrained` makes it of a file's contents."""
    config = found(name, "Config").from_dict(copy.deepcopy(given))
    config._attn_implementation = "eager"
    return config


def handed(config: Any, name: str, index: int, x: Any) -> dict[str, Any]:
    """Which rotary angles and which mask the whole model hands to the attention of a layer."""
    import torch

    kept = {}

    class Layer(torch.nn.Module):
        def __init__(self, config: Any, layer_idx: int):
            super().__init__()
            self.layer_idx = layer_idx

        def forward(self, hidden_states: Any, **given: Any) -> Any:
            kept[self.layer_idx] = given
            return hidden_states

    decoder = found(name, "DecoderLayer")
    module = import_module(decoder.__module__)
    with torch.no_grad():
        with patch.object(module, decoder.__name__, Layer):
            model = found(name, "Model")(config)
        model(inputs_embeds=x.detach(), use_cache=False)
    return {key: kept[index][key] for key in ("position_embeddings", "attention_mask")}


def attention(config: Any, name: str, index: int) -> Any:
    """The attention of one layer."""
    return found(name, "Attention")(config, index)


def call(config: Any, name: str, index: int) -> Any:
    """`call(attention, x)`, as the layer of the whole model calls it."""

    def called(layer: Any, x: Any) -> Any:
        return layer(x, **handed(config, name, index, x))[0]

    return called
