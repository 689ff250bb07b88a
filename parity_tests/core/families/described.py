"""What a layer of a family is, to be compared with another."""

import jax
from flax import nnx

from flax_attn import Mask, Rotary, Rules, families


def described(layer):
    """All that a config decides: shapes, norms, rotary, mask and rules, numbers, dropout."""
    params, _ = jax.tree.flatten_with_path(nnx.state(layer, nnx.Param))
    shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in params}
    found = (x for name, x in sorted(vars(layer).items()) if name.endswith("norm"))
    norms = [
        {k: v for k, v in vars(norm).items() if isinstance(v, bool | int | float | str)}
        for norm in found
        if norm is not None
    ]
    numbers = bool | int | float | tuple | Mask | Rotary | Rules
    plain = {k: v for k, v in vars(layer).items() if isinstance(v, numbers)}
    dropout = getattr(layer, "dropout", None)
    return shapes, norms, plain, dropout and dropout.rate


def described_part(given, index, part):
    """The same of an attention of an encoder with a decoder."""
    layer = nnx.eval_shape(lambda: families.attention(given, index, part=part, rngs=nnx.Rngs(0)))
    if not hasattr(layer, "mask"):
        return described(layer)
    shapes = {".".join(map(str, path)): x.shape for path, x in nnx.to_flat_state(nnx.state(layer))}
    plain = {
        k: v for k, v in vars(layer).items() if isinstance(v, bool | int | float | Rotary | Rules)
    }
    return shapes, plain, layer.mask, layer.dropout and layer.dropout.rate
