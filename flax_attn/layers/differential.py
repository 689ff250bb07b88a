"""Differential attention: the difference of two heads' attention maps."""

import math
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .._internal.checks import check_divides, check_positive
from .._internal.types import wide
from ..masks import CAUSAL, Mask
from ..norms import rms_norm
from ..rules import Rules
from ._cached import AnyCache, CacheOptions, arithmetic_dtype, new_cache
from ._common import split_heads
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._self_attention import RotaryFn, SelfAttention, Tokens
from ._token_indices import rotate_by


class DifferentialAttention(SelfAttention):
    """`o_proj((1 - l0) * norm((A_i - lambda A_j) [v_i, v_j]))`, A the softmaxes of heads i and j.

    Also called: differential attention, Diff Transformer.

    Head i pairs with head j = i + N / 2. The values of the two halves of the key/value heads are
    concatenated, and both heads of a pair use them. `lambda` is
    `exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + l0`, and l0 is
    `0.8 - 0.6 exp(-0.3 depth)`. The norm has no gain, over the 2 head_dim components of a pair.

    `attend` runs twice, once for each half of the heads, so that no T x S weights are stored.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token.
      num_heads: query heads, N.
      num_kv_heads: key/value heads, K, an even number; must divide N.
      head_dim: width of a head, H.
      depth: index of the layer in the model, from 0.
      rotary: a `Rotary`, or anything called as `rotary(x, positions)` on `*B T N H`; None for none.
      mask: the default mask of a call; kept as `layer.mask`. It has one head for all, or N / 2, one
        for each pair.
      eps: of the norm.
      qkv_bias, out_bias: whether `q_proj`, `k_proj` and `v_proj`, and `o_proj`, have biases.
      kernel_init, bias_init: initializers of the projections; None for PyTorch's.
      rngs: source of the initial values, torch's U(+-1 / sqrt(width in)); the four vectors of
        lambda are drawn from N(0, 0.1).
      dtype: of the arithmetic; None promotes x and the weights.
      param_dtype: of the weights.

    There is no dropout: neither the paper nor DiffLlama defines it for the difference.

    Raises:
      ValueError: for counts below 1 or odd ones, K that does not divide N, a depth below 0; in the
        call as `GroupedQueryAttention` does.
      TypeError: if x is not floating, or a mask or valid not boolean.

    Source: Ye et al., "Differential Transformer", 2024; pairs of heads and names as in DiffLlama.

    >>> layer = DifferentialAttention(12, 6, 2, 4, depth=1, rngs=nnx.Rngs(0))
    >>> x = jnp.ones((2, 5, 12))
    >>> run = nnx.jit(DifferentialAttention.__call__)  # layer(x), compiled
    >>> run(layer, x, valid=jnp.arange(5)[None] < jnp.asarray([[5], [3]])).shape  # padding behind
    (2, 5, 12)
    >>> y, cache = run(layer, x, cache=layer.init_cache(2, length=8))  # a prompt
    >>> run(layer, x[:, :1], cache=cache)[0].shape  # then token by token
    (2, 1, 12)
    """

    @init_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        depth: int,
        *,
        rotary: RotaryFn | None = None,
        mask: Mask | Array = CAUSAL,
        eps: float = 1e-5,
        qkv_bias: bool = False,
        out_bias: bool = False,
        **more: Unpack[InitKeywords],
    ):
        _check(in_features, num_heads, num_kv_heads, head_dim, depth)
        self.set_rules(rotary, mask, Rules())
        self.head_dim, self.eps = head_dim, eps
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        init = InitWithoutDropout(**more)
        self.q_proj = init.linear(in_features, num_heads * head_dim, use_bias=qkv_bias)
        self.k_proj = init.linear(in_features, num_kv_heads * head_dim, use_bias=qkv_bias)
        self.v_proj = init.linear(in_features, num_kv_heads * head_dim, use_bias=qkv_bias)
        self.o_proj = init.linear(num_heads * head_dim, in_features, use_bias=out_bias)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            start = nnx.initializers.normal(0.1)
            vector = start(init.rngs.params(), (head_dim,), init.param_dtype)
            setattr(self, name, nnx.Param(vector))

    def project(
        self, tokens: Tokens
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T K H"], Float[Array, "*B T J V"], Array]:
        """Rotated queries and keys, J = K / 2 values of two concatenated heads each, and lambda."""
        q, k, v = (
            split_heads(project(tokens.x), self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rotary is not None:
            q, k = (rotate_by(self.rotary, x, tokens.positions) for x in (q, k))
        return q, k, _concat_halves(v), self.share()

    def attention(
        self,
        q: Float[Array, "*B T N H"],
        k: Float[Array, "*B T K H"],
        v: Any,  # *B T J V
        tokens: Tokens,
    ) -> tuple[Float[Array, "*B T N V"], Any]:
        """Outputs of the first heads, followed by those of the second heads, and the cache.

        A cache stores the keys of a pair concatenated, as the values, so each number once. Queries
        have zeros at the other head's key. Both attentions start from the same cache, so they
        write the same update.
        """
        (q1, q2), (k1, k2) = jnp.split(q, 2, axis=-2), jnp.split(k, 2, axis=-2)  # *B T N/2 H
        if tokens.cache is not None:
            k1 = k2 = _concat_halves(k)
            zeros = jnp.zeros_like(q1)
            q1, q2 = (jnp.concatenate(pair, axis=-1) for pair in ((q1, zeros), (zeros, q2)))
        o1, cache = super().attention(q1, k1, v, tokens)
        o2, _ = super().attention(q2, k2, v, tokens)
        return jnp.concatenate([o1, o2], axis=-2), cache

    def combine(
        self, o: Float[Array, "*B T N V"], v: Array, rest: Float[Array, ""]
    ) -> Float[Array, "*B T P V"]:
        """Normalised output of the first heads minus lambda times that of the second."""
        first, second = jnp.split(o, 2, axis=-2)  # *B T N/2 2H
        o = first - rest.astype(first.dtype) * second  # *B T N/2 2H
        return (1 - self.lambda_init) * rms_norm(o, eps=self.eps)

    @property
    def default_scale(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The scale of a single head."""
        return self.head_dim**-0.5

    def init_cache(
        self, batch: int | tuple[int, ...], length: int, **options: Unpack[CacheOptions]
    ) -> AnyCache:
        """An empty cache; arguments as in `GroupedQueryAttention.init_cache`."""
        pairs = self.k_proj.out_features // self.head_dim // 2
        sizes = (pairs, 2 * self.head_dim, 2 * self.head_dim)
        return new_cache(batch, length, sizes, self.mask, arithmetic_dtype(self.k_proj), options)

    def share(self) -> Float[Array, ""]:
        """The factor lambda of the second head; in float32 or wider."""
        names = (("lambda_q1", "lambda_k1"), ("lambda_q2", "lambda_k2"))
        pairs = ((getattr(self, q)[...], getattr(self, k)[...]) for q, k in names)
        first, second = (jnp.exp(jnp.sum((q * k).astype(wide(q.dtype)))) for q, k in pairs)
        return first - second + self.lambda_init


def _concat_halves(x: Float[Array, "*B T K H"]) -> Float[Array, "*B T J V"]:
    """Concatenates the two halves of the heads along their width."""
    return jnp.concatenate(jnp.split(x, 2, axis=-2), axis=-1)


def _check(in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, depth: int) -> None:
    check_positive(in_features=in_features, num_heads=num_heads, num_kv_heads=num_kv_heads)
    check_positive(head_dim=head_dim)
    check_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)
    if num_kv_heads % 2:
        raise ValueError(
            "num_kv_heads must be even, since heads are taken in pairs; got "
            f"num_kv_heads={num_kv_heads}."
        )
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise ValueError(f"depth must be a whole number of at least 0; got {depth!r}.")
