"""Shared by layers that decode: construction of a cache, and attention with or without one."""

from collections.abc import Callable
from typing import Any, Literal, TypedDict, TypeVar, get_args

from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jaxtyping import Array, Bool, Float, Int

from .._internal.checks import check_choice, check_input
from ..attend import Empty, attend
from ..cache import Cache, Memory, PagedCache, attend_cached, attend_memory
from ..cache.checks import check_no_mean
from ..masks import Mask
from ..masks.ranges import reach_of
from ..quantized import Float8, Int8
from ._inputs import zero_padding

AnyCache = Cache | PagedCache
C = TypeVar("C", Cache, PagedCache)
M = TypeVar("M", Cache, PagedCache, Memory)


class Call(TypedDict, total=False):
    """Keyword arguments of a call of a self-attention layer, except `cache`."""

    mask: Mask | Array | None
    positions: Int[Array, "... T"] | None
    valid: Bool[Array, "*#B T"] | Mask | None
    empty: Empty
    deterministic: bool | None


class CrossCall(TypedDict, total=False):
    """Keyword arguments of a call of a layer for self and cross attention, except `cache`."""

    mask: Mask | Array | None
    positions: Int[Array, "*#B T"] | None
    valid: Bool[Array, "*#B T"] | Mask | None
    empty: Empty
    deterministic: bool | None


class CacheOptions(TypedDict, total=False):
    """Keyword arguments of `init_cache`: see `Cache.empty`, and `PagedCache.empty` for `pages`.

    With window="mask" the ring buffer covers the range that the layer's mask reaches back to.
    """

    window: int | Literal["mask"] | None
    keep_first: int
    spare: int
    dtype: Any
    store: Int8 | Float8 | None
    pages: tuple[int, int] | None
    layers: int | None


def new_cache(
    batch: int | tuple[int, ...],
    length: int,
    sizes: tuple[int, int, int],
    mask: Mask,
    dtype: Any,
    options: CacheOptions,
    latent: bool = False,
) -> AnyCache:
    """Returns an empty cache for `sizes` = (K, H, h): key heads, key width, value width.

    Raises:
      ValueError: for incompatible options, or window="mask" with a mask of unbounded reach.
    """
    cache_kwargs: dict[str, Any] = {"dtype": dtype, "latent": latent, **options}
    cache_kwargs["dtype"] = dtype if cache_kwargs["dtype"] is None else cache_kwargs["dtype"]
    pages = cache_kwargs.pop("pages", None)
    if cache_kwargs.get("window") == "mask":
        cache_kwargs["window"] = _window_of(mask, cache_kwargs.get("keep_first", 0))
    if pages is None:
        return Cache.empty(batch, length, *sizes, **cache_kwargs)
    ring = {name: cache_kwargs.pop(name, None) for name in ("window", "keep_first", "spare")}
    if any(ring.values()):
        raise ValueError(
            "A paged cache is no ring: leave window, keep_first and spare out, or pages; got "
            f"pages={pages} and {', '.join(f'{k}={v}' for k, v in ring.items() if v)}."
        )
    heads, *widths = sizes
    return PagedCache.empty(batch, length, heads, pages, *widths, **cache_kwargs)


def arithmetic_dtype(linear: nnx.Linear) -> Any:
    """Dtype in which `linear` computes, for inputs of no higher precision."""
    return kernel_of(linear).dtype if linear.dtype is None else linear.dtype


def kernel_of(linear: Any) -> Array:
    """The matrix that `linear` multiplies by, with the adapter of an `nnx.LoRA` added to it."""
    if not isinstance(linear, nnx.LoRA):
        return linear.kernel[...]
    factors = linear.lora_a[...], linear.lora_b[...]
    kernel, a, b = promote_dtype((kernel_of(linear.base_module), *factors))
    return kernel + a @ b


def _window_of(mask: Mask, keep_first: int) -> int:
    back = reach_of(mask, keep_first)
    if back is None:
        raise ValueError(
            'window="mask" needs a mask that looks back over a known number of tokens, such as '
            f"CAUSAL & Window(255, 0); this layer's looks back without a limit: {mask}."
        )
    return back


def cross_attend(
    q: Float[Array, "*B T N H"],
    memory: Float[Array, "*B S E"],
    keys_and_values: Callable[[Array], tuple[Array, Array]],
    cache: Any,
    *,
    valid: Bool[Array, "*#B T"] | Mask | None,
    order: Int[Array, "*B T"] | None,
    empty: Empty,
    **attend_kwargs: Any,
) -> tuple[Float[Array, "*B T N h"], Any]:
    """Attends to `memory`, to a `Memory` or with a cache; returns the output and the cache.

    Without a cache, the mask already excludes padding. `order` holds the queries' token indices.
    """
    if isinstance(cache, Memory):
        return attend_memory(q, cache, q_positions=order, **attend_kwargs), cache
    k, v = keys_and_values(memory)
    if cache is None:
        return attend(q, k, v, empty=empty, **attend_kwargs), None
    check_empty(empty, cache)
    return attend_cached(q, k, v, cache, valid=valid, **attend_kwargs)


def cache_memory(
    memory: Float[Array, "*B S E"],
    valid: Bool[Array, "*#B S"] | Mask | None,
    width: int,
    keys_and_values: Callable[[Array], tuple[Array, Array]],
) -> Memory:
    """Returns the keys and values of `memory`, whose tokens have this width, as a `Memory`."""
    memory = zero_padding(check_input("memory", memory, width), valid)
    return Memory.of(*keys_and_values(memory), valid)


def check_empty(empty: Empty, cache: Any) -> None:
    """Raises ValueError for an unknown `empty`, and for "mean" with a cache."""
    check_choice("empty", empty, *get_args(Empty))
    if cache is not None:
        check_no_mean(empty)


def check_eval(dropout: Any, deterministic: bool | None) -> None:
    """Raises ValueError if dropout is active; for calls with a cache."""
    off = dropout.deterministic if deterministic is None else deterministic
    if dropout.rate and not off:
        raise ValueError(
            f"dropout={dropout.rate} is for training, and a cache is for decoding: call "
            "layer.eval() before, or pass deterministic=True."
        )


def with_cache(y: Array, cache: Any) -> Any:
    """Returns y, or `(y, cache)` if the call had a cache."""
    return y if cache is None else (y, cache)
