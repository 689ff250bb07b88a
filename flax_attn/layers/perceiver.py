"""Perceiver's attention: latents attend to inputs of any length (Jaegle et al., 2021)."""

from functools import partial
from typing import Unpack

from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from .._internal.checks import check_divides, check_positive
from ..attend import attend
from ..masks import FULL, Mask, as_mask
from ._common import as_module_data, merge_heads, split_heads
from ._init import LayerInit, LayerInitKeywords, layer_init_signature
from ._inputs import tokens, zero_padding
from ._layer import Layer


class PerceiverAttention(Layer):
    """`x + dense(attend(query(norm1(x)), key(norm2(memory)), value(norm2(memory))))`.

    With `memory_features` this is cross attention to a memory; without, self attention of the
    latents, with keys and values from `norm1(x)`.

    Shapes: x `*B T in_features`, memory `*B S memory_features` -> `*B T in_features`, or
    `*B T v_features` for self attention without a residual.

    Args:
      in_features: width of a latent.
      num_heads: number of heads; must divide qk_features and v_features.
      memory_features: width of a token of the memory; None for self attention.
      qk_features: width of all heads of queries and keys; None for in_features.
      v_features: width of all heads of values; None for qk_features.
      residual: whether x is added.
      mask: the default mask of a call; kept as `layer.mask`.
      dropout: dropout rate of the weights in training, from 0 to 1.
      kernel_init, bias_init: initializers of projections, the second also of the norms; None for
        PyTorch's, and zeros for the norms' biases.
      rngs: source of the initial values and of the dropout.
      dtype: of the arithmetic; None promotes inputs and weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, heads that do not divide the widths, a residual of another
        width than the output, a rate outside [0, 1]; in the call, if x, memory, masks or valid do
        not fit, or for a memory that is unexpected or missing.
      TypeError: if x or memory are not floating, or a mask or valid not boolean.

    Source: Jaegle et al., "Perceiver: General Perception with Iterative Attention", 2021; names as
    in its published checkpoints.

    >>> import jax.numpy as jnp
    >>> layer = PerceiverAttention(8, 2, memory_features=6, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((3, 5, 8)), jnp.ones((3, 7, 6))).shape
    (3, 5, 8)
    """

    @layer_init_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        memory_features: int | None = None,
        qk_features: int | None = None,
        v_features: int | None = None,
        residual: bool = True,
        mask: Mask | Array = FULL,
        **more: Unpack[LayerInitKeywords],
    ):
        source = in_features if memory_features is None else memory_features
        qk = in_features if qk_features is None else qk_features
        values = qk if v_features is None else v_features
        check_positive(in_features=in_features, num_heads=num_heads, memory_features=source)
        self.qk_dim = check_divides("num_heads", num_heads, "qk_features", qk)
        self.v_dim = check_divides("num_heads", num_heads, "v_features", values)
        out = values if memory_features is None else in_features
        _check_residual(residual, in_features, out)
        self.residual, self.mask = residual, as_module_data(as_mask(mask))
        init = LayerInit(**more)
        start = nnx.initializers.zeros if init.bias_init is None else init.bias_init
        norm_kwargs = {"dtype": init.dtype, "param_dtype": init.param_dtype, "rngs": init.rngs}
        norm = partial(
            nnx.LayerNorm, epsilon=1e-5, use_fast_variance=False, bias_init=start, **norm_kwargs
        )
        self.layernorm1 = norm(in_features)
        self.layernorm2 = None if memory_features is None else norm(memory_features)
        self.query, self.key = init.linear(in_features, qk), init.linear(source, qk)
        self.value, self.dense = init.linear(source, values), init.linear(values, out)
        self.dropout = init.attention_dropout()

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        memory: Float[Array, "*B S E"] | None = None,
        *,
        mask: Mask | Array | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B T F"]:
        """Attention of x over memory, or over itself.

        Args:
          x: the latents.
          memory: source of keys and values, for a layer with memory_features.
          mask: replaces the layer's; None keeps the layer's.
          positions: token positions, for masks that read them; None counts the real tokens.
          valid: which tokens of x are real. Padding has zero outputs and, in self attention, is
            masked out. The padding of a memory must be in the mask.
          deterministic: overrides `train()` and `eval()`.
        """
        self._check_memory(memory)
        widths = self.query.in_features, self.key.in_features
        call = {"mask": mask, "valid": valid, "positions": positions}
        x, memory, visible, _ = tokens(x, memory, self.mask, widths=widths, **call)
        latents = self.layernorm1(x)  # *B T D
        source = latents if self.layernorm2 is None else self.layernorm2(memory)  # *B S E
        q = split_heads(self.query(latents), self.qk_dim)  # *B T N H
        k = split_heads(self.key(source), self.qk_dim)  # *B S N H
        v = split_heads(self.value(source), self.v_dim)  # *B S N h
        drop = None if self.dropout is None else self.dropout(deterministic)
        y = self.dense(merge_heads(attend(q, k, v, mask=visible, dropout=drop)))  # *B T F
        return zero_padding(x + y if self.residual else y, valid)  # *B T F

    def _check_memory(self, memory: Array | None) -> None:
        if (memory is None) != (self.layernorm2 is None):
            widths, built = (
                ("a memory", "memory_features=None")
                if self.layernorm2 is None
                else ("no memory", f"memory_features={self.key.in_features}")
            )
            raise ValueError(f"The layer was built with {built}; got {widths}.")


def _check_residual(residual: bool, width: int, out: int) -> None:
    if residual and width != out:
        raise ValueError(
            f"The residual is x, of width {width}, and the output has v_features={out}; let them "
            "be one, or say residual=False."
        )
