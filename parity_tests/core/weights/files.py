"""Safetensors files made by hand, so that they may be odd, layers to fill, and what is compared."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from flax_attn import GroupedQueryAttention
from flax_attn.norms import RMSNorm
from flax_attn.weights import CheckpointError, load
from flax_attn.weights.known_layers import flax_state

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
DATA = np.arange(6, dtype=np.float32).tobytes()


def raw(header: bytes | str | dict, data: bytes = DATA, length: int | None = None) -> bytes:
    """A file's bytes: the header's length, or another one, the header, the data."""
    text = header if isinstance(header, bytes | str) else json.dumps(header)
    text = text if isinstance(text, bytes) else text.encode()
    size = len(text) if length is None else length
    return size.to_bytes(8, "little") + text + data


def entry(**changed: object) -> dict[str, object]:
    return {**ENTRY, **changed}


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def tensors() -> dict[str, np.ndarray]:
    """A tensor of each kind, no two of one shape."""
    draw = np.random.default_rng(0)
    return {
        "a.weight": draw.standard_normal((3, 5)).astype(np.float32),
        "a.bias": draw.standard_normal(3).astype(np.float16),
        "b.weight": draw.standard_normal((2, 3, 7)).astype(ml_dtypes.bfloat16),
        "b.seen": draw.integers(0, 2, 11).astype(bool),
        "c.index": draw.integers(-9, 9, (4, 2)),
        "c.scalar": np.float64(0.5)[None].reshape(()),
        "c.empty": np.zeros((0, 6), np.float32),
    }


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays are the same bits."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and one.tobytes() == other.tobytes()


def gqa(seed=0, **more):
    given = {"qkv_bias": True, "sinks": True, "q_norm": RMSNorm(4, eps=1e-6)} | more
    return GroupedQueryAttention(12, 6, 3, 4, rngs=nnx.Rngs(seed), **given)


def plain(seed=0, **more):
    return GroupedQueryAttention(12, 6, 3, 4, rngs=nnx.Rngs(seed), **more)


def values(layer):
    return {path: np.asarray(x.get_value()) for path, x in flax_state(layer).items()}


def alike(one, other):
    one, other = values(one), values(other)
    return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)


def torch_values(seed=0, dtype=np.float32, **more):
    """A checkpoint's tensors of `plain`, as torch has them."""
    draw = np.random.default_rng(seed)
    shapes = {"q": (24, 12), "k": (12, 12), "v": (12, 12), "o": (12, 24)}
    found = {f"{n}_proj.weight": draw.standard_normal(s).astype(dtype) for n, s in shapes.items()}
    return found | more


def refused(layer, path, told, **more):
    """The error of a load that must change nothing."""
    before = values(layer)
    with pytest.raises(CheckpointError, match=told) as caught:
        load(layer, path, **more)
    after = values(layer)
    assert all(same(before[name], after[name]) for name in before)
    return caught.value


VALUES = tensors()


class Holder(nnx.Module):
    """Params by name, all zeros."""


def holder(values):
    whole = Holder()
    with jax.enable_x64(True):
        for name, value in values.items():
            part, leaf = name.split(".")
            if not hasattr(whole, part):
                setattr(whole, part, Holder())
            setattr(getattr(whole, part), leaf, nnx.Param(jnp.asarray(np.zeros_like(value))))
    return whole


def loaded(path, values=VALUES):
    """All tensors by name, or None where a CheckpointError was raised."""
    layer = holder(values)
    try:
        load(layer, path)
    except CheckpointError as error:
        assert str(error).replace("\n", "").isprintable()
        assert not any(np.asarray(x.get_value()).any() for x in flax_state(layer).values())
        return None
    return {name: np.asarray(x.get_value()) for name, x in flax_state(layer).items()}


def fresh(tmp_path, name):
    folder = tmp_path / str(name)
    folder.mkdir()
    return folder
