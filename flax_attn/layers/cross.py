"""Cross attention: queries of one sequence over keys of another (Vaswani et al., 2017)."""

from typing import Any, Unpack, overload

from flax import nnx
from jaxtyping import Array, Float

from .._internal.checks import check_divides, check_positive
from ..masks import FULL, Mask, as_mask
from ._cached import CrossCall, M
from ._common import as_module_data
from ._cross_attention import CrossForward
from ._init import LayerInit, LayerInitKeywords, keywords_of, layer_init_signature
from ._self_attention import NormFn


class CrossAttention(CrossForward):
    """`out_proj(attend(q_norm(q_proj(x)), k_norm(k_proj(memory)), v_proj(memory)))`.

    Also called: encoder-decoder attention, cross-attention.

    There are N heads, of width D / N by default. Query head n uses key/value head n // (N / K).

    Without a memory this is self attention; with `mask=CAUSAL` that of a decoder.

    Shapes: x `*B T in_features`, memory `*B S memory_features` -> `*B T in_features`.

    Args:
      in_features: width of a token of x, D.
      num_heads: number of heads; must divide in_features unless there is a head_dim.
      num_kv_heads: key/value heads, K; must divide N; None for N.
      head_dim: width of a head, H; N * H need not be in_features. None for D / N.
      memory_features: width of a token of the memory; None for in_features.
      norms: norms of queries and of keys over the last axis of `*B T N H`, such as two of
        `RMSNorm(head_dim, eps=1e-5)` (Llama 3.2 Vision), kept as `q_norm` and `k_norm`; None for
        no norms.
      use_bias: whether the projections have biases.
      out_bias: whether `out_proj` has one; None for use_bias (Stable Diffusion has that one only).
      key_bias: whether `use_bias` includes `k_proj`, as in Bart; not in Whisper.
      mask: the default mask of a call; kept as `layer.mask`.
      dropout: dropout rate of the weights in training, from 0 to 1.
      kernel_init, bias_init: initializers of the projections; None for PyTorch's.
      rngs: source of the initial values, torch's U(+-1 / sqrt(width in)), and of the dropout.
      dtype: of the arithmetic; None promotes inputs and weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, heads that do not divide in_features, K that does not divide
        N, a rate outside [0, 1]; in the call, if x, memory, masks or valid do not fit, for a
        missing memory whose width differs from x's, or an unknown `empty`.
      TypeError: if x or memory are not floating, or a mask or valid not boolean.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.3; names as in Bart's and
    Whisper's published checkpoints.

    >>> import jax.numpy as jnp
    >>> from flax_attn import Lengths
    >>> layer = CrossAttention(8, 2, memory_features=6, rngs=nnx.Rngs(0))
    >>> x, memory = jnp.ones((3, 5, 8)), jnp.ones((3, 7, 6))
    >>> layer(x, memory, mask=Lengths(jnp.asarray([7, 7, 4]))).shape  # padding behind the memory
    (3, 5, 8)
    >>> stored = layer.remember(memory)  # keys and values, projected once for all tokens
    >>> y, stored = layer(x[:, :1], cache=stored)
    >>> y.shape
    (3, 1, 8)
    """

    @layer_init_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        memory_features: int | None = None,
        norms: tuple[NormFn, NormFn] | None = None,
        use_bias: bool = True,
        key_bias: bool = True,
        out_bias: bool | None = None,
        mask: Mask | Array = FULL,
        **more: Unpack[LayerInitKeywords],
    ):
        memory_features = in_features if memory_features is None else memory_features
        check_positive(in_features=in_features, num_heads=num_heads)
        check_positive(memory_features=memory_features)
        if head_dim is None:
            head_dim = check_divides("num_heads", num_heads, "in_features", in_features)
        check_positive(head_dim=head_dim)
        self.head_dim = head_dim
        self.mask = as_module_data(as_mask(mask))
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive(num_kv_heads=kv_heads)
        check_divides("num_kv_heads", kv_heads, "num_heads", num_heads)
        self.q_norm, self.k_norm = (None, None) if norms is None else norms
        init, width, kv_width = LayerInit(**more), num_heads * head_dim, kv_heads * head_dim
        self.q_proj = init.linear(in_features, width, use_bias)
        self.k_proj = init.linear(memory_features, kv_width, use_bias and key_bias)
        self.v_proj = init.linear(memory_features, kv_width, use_bias)
        out_bias = use_bias if out_bias is None else out_bias
        self.out_proj = init.linear(width, in_features, out_bias)
        self.dropout = init.attention_dropout()

    def projections(self) -> tuple[nnx.Linear, nnx.Linear, nnx.Linear, nnx.Linear]:
        """The projections of queries, keys, values and output."""
        return self.q_proj, self.k_proj, self.v_proj, self.out_proj

    @overload
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        memory: Float[Array, "*B S E"] | None = None,
        *,
        cache: None = None,
        **call: Unpack[CrossCall],
    ) -> Float[Array, "*B T D"]: ...
    @overload
    def __call__(
        self, x: Float[Array, "*B T D"], *, cache: M, **call: Unpack[CrossCall]
    ) -> tuple[Float[Array, "*B T D"], M]: ...
    @keywords_of(CrossForward.forward)
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        memory: Float[Array, "*B S E"] | None = None,
        **call: Any,
    ) -> Any:
        """Attention of x over memory, or over itself.

        Args:
          x: the tokens.
          memory: source of keys and values; None for x.
          mask: replaces the layer's; None keeps the layer's.
          positions: token positions of x, for masks that read them; None counts real tokens.
          valid: which tokens of x are real. Padding has zero outputs and, in self attention, is
            masked out. The padding of a memory must be in the mask.
          empty: the output of a fully masked token: "zero", or "mean", as in
            `GroupedQueryAttention`.
          deterministic: overrides `train()` and `eval()`.
          cache: from `init_cache` or `remember`; the call then returns y and the cache.
        """
        return self.forward({}, x, memory, **call)
