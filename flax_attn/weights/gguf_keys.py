"""Converts the keys of a GGUF file to the config.json of its model.

Source: the keys in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and what llama.cpp's
`convert_hf_to_gguf.py` writes for a config.
"""

import os
from collections.abc import Callable, Mapping
from math import pi
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, quoted
from .entry import read_tensor
from .gguf import Gguf, read_gguf

_FREQS = "rope_freqs.weight"
# Rotary scaling of Llama 3.1 to 3.3; a file contains only the resulting frequencies.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def gguf_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the `config.json` of a GGUF file's model, as `families` reads it.

    Supports the architectures llama and gemma3. Values come only from the file: `vocab_size` is
    the number of embeddings, `tie_word_embeddings` whether there is no separate output matrix. A
    float32 is returned as its shortest decimal: 1e-05.

    Args:
      path: path of the file.

    Returns:
      A dict with `model_type`, sizes, rotary parameters and the epsilon of the norms.

    Raises:
      CheckpointError: for a file that `load` cannot read, another architecture, a key that is
        missing, unknown or of another type, and rotary frequencies that no config describes.

    Source: the keys that llama.cpp's converter writes.

    >>> import struct, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "empty.gguf"
    ...     size = path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0))
    ...     try:
    ...         gguf_config(path)
    ...     except CheckpointError as error:
    ...         print(error.reason)
    It has no general.architecture; gemma3, llama are read.
    """
    keys = _Keys(Path(path), read_gguf(Path(path)))
    config = _CONFIGS[keys.architecture](keys)
    keys.check_all_read()
    return {name: value for name, value in config.items() if value is not None}


class _Keys:
    """The keys of a file; tracks which of them were read."""

    def __init__(self, path: Path, header: Gguf):
        self.path, self.header = path, header
        architecture = header.keys.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in _CONFIGS:
            is_none = "It has no general.architecture"
            is_other = f"Its general.architecture is {quoted(architecture)}"
            problem = is_none if architecture is None else is_other
            raise self.fault(f"{problem}; {', '.join(sorted(_CONFIGS))} are read.")
        self.architecture = architecture
        dot = f"{architecture}."
        self.left = {k.removeprefix(dot): v for k, v in header.keys.items() if k.startswith(dot)}

    def fault(self, why: str) -> CheckpointError:
        return CheckpointError(self.path, None, why)

    def check_all_read(self) -> None:
        if self.left:
            names = ", ".join(quoted(f"{self.architecture}.{key}") for key in [*self.left][:6])
            raise self.fault(f"It has keys that are not known here: {names}.")

    def count(self, key: str, missing: int | None = None) -> int:
        """Returns a positive integer; CheckpointError if the key and the default are missing."""
        return self._value(key, int, missing)

    def number(self, key: str, missing: float | None = None) -> float:
        """Returns a positive float."""
        value = self._value(key, float, missing)
        # The shortest decimal of the stored float32, as config.json has it.
        return float(str(np.float32(value))) if np.float32(value) == value else value

    def _value(self, key: str, kind: type, missing: Any) -> Any:
        value = self.left.pop(key, missing)
        if type(value) is not kind or not 0 < value < float("inf"):
            what = "whole number" if kind is int else "number with a fraction"
            raise self.fault(f"{self.architecture}.{key} must be a {what} above zero.")
        return value

    def divided(self, whole: str, size: int, part: str, by: int) -> int:
        """Returns `size // by`; CheckpointError, naming both keys, unless `by` divides it."""
        if size % by:
            dot = self.architecture
            raise self.fault(f"{dot}.{part}, {by}, must divide {dot}.{whole}, {size}.")
        return size // by

    def holds(self, name: str) -> bool:
        return name in self.header.entries


def _decoder(keys: _Keys) -> dict[str, Any]:
    """Returns the config entries common to both architectures."""
    heads, width = keys.count("attention.head_count"), keys.count("embedding_length")
    key_heads = keys.count("attention.head_count_kv", heads)
    widths = ["attention.key_length", "attention.value_length", "rope.dimension_count"]
    head_dims = {keys.count(key) for key in widths if key in keys.left}
    head_dims = head_dims or {
        keys.divided("embedding_length", width, "attention.head_count", heads)
    }
    keys.divided("attention.head_count", heads, "attention.head_count_kv", key_heads)
    if len(head_dims) > 1:
        raise keys.fault(f"{', '.join(widths)} must be equal, since whole heads are rotated.")
    embedding = keys.header.entries.get("token_embd.weight")
    rows = None if embedding is None else embedding.shape[0]
    return {
        "hidden_size": width,
        "num_hidden_layers": keys.count("block_count"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dims.pop(),
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": keys.count("vocab_size", rows),
        "tie_word_embeddings": not keys.holds("output.weight"),
        "attention_bias": keys.holds("blk.0.attn_q.bias"),
        "rope_scaling": _scaling(keys),
    }


def _scaling(keys: _Keys) -> dict[str, Any] | None:
    """Returns the config's `rope_scaling`."""
    kind = keys.left.pop("rope.scaling.type", "none")
    keys.left.pop("rope.scaling.finetuned", None)  # describes training, does not affect results
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise keys.fault(f"rope.scaling.type is {quoted(kind)}; none, linear, yarn are read.")
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        length = keys.count("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = length
    return scaling


def _llama(keys: _Keys) -> dict[str, Any]:
    config = {"model_type": "llama", **_decoder(keys)}
    config["rope_theta"] = keys.number("rope.freq_base", 10_000.0)
    if keys.left.pop("tensor_data_layout", "Meta AI original pth") != "Meta AI original pth":
        raise keys.fault("Its llama.tensor_data_layout is not known here.")
    if keys.holds(_FREQS):
        if config["rope_scaling"] is not None:
            raise keys.fault(f"It has rope.scaling.type and {_FREQS}, of which a config has one.")
        config["rope_scaling"] = _llama3(keys, config)
    return config


def _llama3(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Llama 3's scaling, if the file's frequency divisors match it."""
    divisors = read_tensor(_FREQS, keys.header.entries[_FREQS]).astype(np.float64)
    low, high, length = _LLAMA3.values()
    fractions = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    waves = length / (2 * pi * config["rope_theta"] ** fractions)  # periods per training sequence
    factor = float(divisors.max(initial=0))
    if divisors.shape == waves.shape and factor >= 1:
        smooth = np.clip((waves - low) / (high - low), 0, 1)
        want = 1 / ((1 - smooth) / factor + smooth)
        if (np.abs(divisors / want - 1) < 1e-5).all():
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise CheckpointError(keys.path, _FREQS, "Its frequencies are not those that Llama 3 has.")


def _gemma3(keys: _Keys) -> dict[str, Any]:
    config = {"model_type": "gemma3_text", **_decoder(keys)}
    config["rope_theta"] = keys.number("rope.freq_base", 1_000_000.0)
    config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10_000.0)
    config["sliding_window"] = keys.count("attention.sliding_window")
    config["sliding_window_pattern"] = keys.count("attention.sliding_window_pattern", 6)
    # The 27B model scales queries differently; like llama.cpp, recognise it by its 62 layers.
    config["query_pre_attn_scalar"] = config["head_dim"]
    if config["num_hidden_layers"] == 62:
        sizes = "embedding_length", config["hidden_size"]
        config["query_pre_attn_scalar"] = keys.divided(
            *sizes, "attention.head_count", config["num_attention_heads"]
        )
    return config


_CONFIGS: Mapping[str, Callable[[_Keys], dict[str, Any]]] = {"gemma3": _gemma3, "llama": _llama}
