"""What a layer of a family is, to be compared with another."""

import jax
from flax import nnx


def described(layer):
    """All that a config decides: shapes, the rotary, the mask, the rules, norms and dropout."""
    params, _ = jax.tree.flatten_with_path(nnx.state(layer, nnx.Param))
    shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in params}
    found = (x for name, x in sorted(vars(layer).items()) if name.endswith("norm"))
    norms = [
        {k: v for k, v in vars(norm).items() if isinstance(v, bool | int | float | str)}
        for norm in found
        if norm is not None
    ]
    dropout, after = layer.dropout and layer.dropout.rate, getattr(layer, "norm_after_rotary", None)
    return shapes, layer.rotary, layer.mask, layer.rules, after, norms, dropout
