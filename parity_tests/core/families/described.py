"""What a layer of a family is, to be compared with another."""

import jax
from flax import nnx

from flax_attn import families


def described(layer):
    """All that a config decides: shapes, the rotary, the mask, the rules, norms and dropout.

    Of a recurrent layer, which has no mask, its numbers and flags.
    """
    params, _ = jax.tree.flatten_with_path(nnx.state(layer, nnx.Param))
    shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in params}
    found = (x for name, x in sorted(vars(layer).items()) if name.endswith("norm"))
    norms = [
        {k: v for k, v in vars(norm).items() if isinstance(v, bool | int | float | str)}
        for norm in found
        if norm is not None
    ]
    if not hasattr(layer, "mask"):
        numbers = bool | int | float | tuple
        return shapes, norms, {k: v for k, v in vars(layer).items() if isinstance(v, numbers)}
    dropout, after = layer.dropout and layer.dropout.rate, getattr(layer, "norm_after_rotary", None)
    clip = getattr(layer, "clip_qkv", None)
    return shapes, layer.rotary, layer.mask, layer.rules, after, norms, dropout, clip


def described_part(given, index, part):
    """The same of an attention of an encoder with a decoder."""
    layer = nnx.eval_shape(lambda: families.attention(given, index, part=part, rngs=nnx.Rngs(0)))
    if not hasattr(layer, "mask"):
        return described(layer)
    shapes = {".".join(map(str, path)): x.shape for path, x in nnx.to_flat_state(nnx.state(layer))}
    plain = {k: v for k, v in vars(layer).items() if isinstance(v, bool | int | float)}
    return shapes, plain, layer.mask, layer.dropout and layer.dropout.rate
