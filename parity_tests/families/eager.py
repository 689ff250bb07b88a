"""One layer on both sides in float64, with weights and no gradients: the cheapest proof."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn import families
from flax_attn.identify.candidate import with_zeros
from flax_attn.parity import port
from flax_attn.parity.draw import normal
from flax_attn.parity.sides.torch.float64 import lifted

from . import parts, witness
from .configs import Small
from .parts import Part

SHAPES = {"x": (2, 7), "memory": (2, 9)}  # of the tokens


def config_of(given: dict[str, Any], small: Small | Part) -> Any:
    """The config of transformers."""
    if isinstance(small, Part):
        return parts.config_of(given, small.model_type)
    return witness.config_of(given, small.model_type)


def theirs(given: dict[str, Any], small: Small | Part) -> tuple[Any, np.ndarray | None]:
    """The module of transformers with weights drawn by name, and its output; why not, and None."""
    import torch

    try:
        config = config_of(given, small)
        layer, call = of_transformers(config, small)
        layer = layer.double().eval()
        with torch.no_grad():
            for path, tensor in layer.named_parameters():
                tensor.copy_(torch.tensor(normal(0, path, tuple(tensor.shape)) / 4))
        return layer, output_of_torch(config, small, layer, call)
    except Exception as refused:  # by whatever class: it is told
        return refused, None


def output_of_torch(config: Any, small: Small | Part, layer: Any, call: Any) -> np.ndarray:
    """The output of a module of transformers for the inputs that both sides are given."""
    import torch

    read = parts.of_part(config, small.part) if isinstance(small, Part) else config
    given = _of_place(config, small) or _inputs(
        small, read.hidden_size, getattr(read, "num_attention_heads", 0)
    )
    with torch.no_grad(), lifted():
        return call(layer, **{name: torch.tensor(x) for name, x in given.items()}).numpy()


def of_transformers(config: Any, small: Small | Part) -> tuple[Any, Any]:
    """The layer, and how it is called."""
    if isinstance(small, Part):
        layer = parts.attention(parts.model_of(config, small.model_type), small)
        return layer, parts.call(config, small)
    name, index = small.model_type, small.index
    return witness.attention(config, name, index), witness.call(config, name, index)


def _inputs(small: Small | Part, width: int, heads: int) -> dict[str, np.ndarray]:
    is_part = isinstance(small, Part)
    names = ("x", "memory") if is_part and small.part == "cross" else ("x",)
    inputs = {name: normal(0, name, (*SHAPES[name], width)) for name in names}
    if is_part and parts.is_handed_a_bias(small):
        inputs["bias"] = normal(0, "bias", (heads, SHAPES["x"][1], SHAPES["x"][1]))
    return inputs


def ours(given: dict[str, Any], small: Small | Part, layer: Any) -> np.ndarray | ValueError:
    """The output of the family's layer with the same weights; or why it refuses.

    JAX must have float64 enabled.
    """
    part = small.part if isinstance(small, Part) else None

    def built() -> nnx.Module:
        how = {"rngs": nnx.Rngs(0), "param_dtype": jnp.float64}
        return families.attention(given, small.index, part=part, **how)

    try:
        mine: Any = with_zeros(built)
        rules = families.rules(given, small.index, part=part)
    except ValueError as refused:
        return refused
    return output_of_flax(given, small, port(layer, mine, rules))


@nnx.jit
def _called(mine: Any, inputs: dict[str, Any]) -> Any:
    return mine(**inputs)


def output_of_flax(given: dict[str, Any], small: Small | Part, mine: Any) -> np.ndarray:
    """The output of a layer in float64 for the inputs that both sides are given."""
    mine.eval()
    if isinstance(small, Small) and (other := witness.PLACES[small.model_type].called):
        inputs = _of_place(_config_or_first(given, small), small)
        return np.asarray(nnx.jit(other.flax)(mine, **inputs))
    last = next(x for x in ("o_proj", "out_proj", "linear_out", "o") if hasattr(mine, x))
    inner, width = getattr(mine, last).in_features, getattr(mine, last).out_features
    given = _inputs(small, width, inner // getattr(mine, "head_dim", inner))
    return np.asarray(_called(mine, given))


def _of_place(config: Any, small: Small | Part) -> dict[str, np.ndarray]:
    """What a place gives in place of tokens; empty if it gives these."""
    if isinstance(small, Part) or witness.PLACES[small.model_type].called is None:
        return {}
    return witness.inputs(config, small.model_type, small.index)


def _config_or_first(given: dict[str, Any], small: Small) -> Any:
    """The config, or where transformers refuses it that of the small one as it is."""
    try:
        return config_of(given, small)
    except Exception:  # by whatever class: then the layer is called as before
        return config_of(small.spelt("new"), small)
