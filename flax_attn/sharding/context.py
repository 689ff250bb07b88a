"""Contexts for sharded lengths: strategy, layout and names of mesh axes."""

from contextlib import AbstractContextManager
from typing import Any

from .._internal.checks import check_choice
from ..token_layouts import TOKEN_LAYOUTS, Axes, Context, Named, named, requested_context

STRATEGIES = ("all_gather", "ring", "ulysses")
PAIRS = (("ring", "ulysses"), ("all_gather", "ulysses"))


def context_parallel(
    strategy: str | tuple[str, ...] = "all_gather", *, layout: str = "contiguous"
) -> AbstractContextManager[None]:
    """A context in which `attend` serves lengths that are sharded by this strategy and layout.

    Also called: context parallelism (CP), sequence parallelism, ring attention, DeepSpeed Ulysses.

    Outside of a context, arrays whose T and S are sharded over mesh axes of type Explicit use
    "all_gather" and "contiguous". `jax.jit` traces again for another strategy.

    | strategy | between devices | when |
    | --- | --- | --- |
    | "all_gather" | all keys and values come to every device | the keys of one layer fit |
    | "ring" | keys and values rotate, and no device stores another's | they do not fit |
    | "ulysses" | all-to-all from sharded length to sharded heads, and back | heads suffice |

    Args:
      strategy: one of these. If it cannot serve a request, it raises an error; no other replaces
        it. It treats a length over two mesh axes like one axis; ("ring", "ulysses") or
        ("all_gather", "ulysses") uses one strategy for each axis, where the second has the
        faster links.
      layout: the order of the tokens, as `place` arranges them: "contiguous", "zigzag" or
        "striped". Masks, scores, dropout and `Rotary` use the tokens' original positions. Your own
        code that uses positions needs `positions(length, shards, layout)`.

    Raises:
      ValueError: for another strategy, pair of them or layout; in use, for lengths, heads and mesh
        axes that do not fit.

    Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023; Jacobs et al.,
    "DeepSpeed Ulysses", 2023; Brandon et al., "Striped Attention", 2023, for the balanced layouts.

    >>> import jax
    >>> from flax_attn import CAUSAL, attend
    >>> from flax_attn.sharding import place, unplace
    >>> n = jax.device_count()
    >>> mesh = jax.make_mesh((n,), ("seq",))  # whose axis is Explicit
    >>> x = jax.random.normal(jax.random.key(0), (8 * n, 2, 4))
    >>> cut = jax.device_put(place(x, n, "zigzag", axis=0), jax.NamedSharding(mesh, jax.P("seq")))
    >>> with context_parallel("ring", layout="zigzag"):
    ...     out = attend(cut, cut, cut, mask=CAUSAL)
    >>> out = unplace(jax.device_get(out), n, "zigzag", axis=0)
    >>> bool(abs(out - attend(x, x, x, mask=CAUSAL)).max() < 1e-5)
    True
    """
    pair = (strategy,) if isinstance(strategy, str) else tuple(strategy)
    for each in pair:
        check_choice("strategy", each, *STRATEGIES)
    if len(pair) > 1 and pair not in PAIRS:
        raise ValueError(
            f"Two mesh axes can share a length as {' or '.join(map(str, PAIRS))}; got {pair}. One "
            "strategy for all axes goes by its name alone."
        )
    strategy = pair[0] if len(pair) == 1 else pair
    check_choice("layout", layout, *TOKEN_LAYOUTS)
    return requested_context(Context(strategy, layout))


def on(
    mesh: Any = None, *, batch: Axes = None, heads: Axes = None, length: Axes = None
) -> AbstractContextManager[None]:
    """A context that names the mesh axes of attention, for axes whose types do not show them.

    The sharding of arrays over axes of type Auto is known only when XLA compiles, which is too late
    for a sharded length and for kernels. Inside this context, `attend` shards q, k and v as named,
    and treats them like arrays over Explicit axes: strategies, layouts and kernels. Arrays whose
    types show their sharding are not changed.

    Args:
      mesh: None for the one that `jax.set_mesh` sets.
      batch, heads, length: the mesh axis of the first batch axis, of the heads, and of the lengths
        T and S; several in a tuple; None is not sharded.

    Raises:
      ValueError: if nothing is named; in use, for an axis that the mesh lacks, and for sizes that
        do not fit.

    Source: Xu et al., "GSPMD", 2021.

    >>> import jax
    >>> from jax.sharding import AxisType
    >>> from flax_attn import CAUSAL, attend
    >>> n = jax.device_count()
    >>> mesh = jax.make_mesh((n,), ("seq",), axis_types=(AxisType.Auto,))
    >>> x = jax.random.normal(jax.random.key(0), (8 * n, 2, 4))
    >>> with on(mesh, length="seq"):
    ...     out = attend(x, x, x, mask=CAUSAL)
    >>> bool(abs(out - attend(x, x, x, mask=CAUSAL)).max() < 1e-5)
    True
    """
    if batch is heads is length is None:
        raise ValueError("sharding.on names no mesh axis; give batch=, heads= or length=.")
    return named(Named(mesh, batch, heads, length))
