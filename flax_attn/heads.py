"""Heads: one model axis split into N of width H, and merged again."""

from jaxtyping import Array, Shaped


def split_heads(x: Shaped[Array, "*B T D"], head_dim: int) -> Shaped[Array, "*B T N H"]:
    """`*B T (N H) -> *B T N H`; the model width must be a multiple of `head_dim`."""
    if head_dim < 1 or x.shape[-1] % head_dim:
        raise ValueError(
            f"head_dim must divide the width; got head_dim={head_dim}, width={x.shape[-1]}."
        )
    return x.reshape(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)


def merge_heads(x: Shaped[Array, "*B T N H"]) -> Shaped[Array, "*B T D"]:
    """`*B T N H -> *B T (N H)`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
