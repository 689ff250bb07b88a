"""What is asked for a sharded length: a strategy and a layout, for all that is traced inside."""

from contextlib import AbstractContextManager
from typing import Any

from .._checks import check_choice
from ..layouts import LAYOUTS, Axes, Context, Named, asked, named

STRATEGIES = ("all_gather", "ring", "ulysses")
PAIRS = (("ring", "ulysses"), ("all_gather", "ulysses"))


def context_parallel(
    strategy: str | tuple[str, ...] = "all_gather", *, layout: str = "contiguous"
) -> AbstractContextManager[None]:
    """A context in which `attend` serves lengths that are sharded by this strategy and layout.

    Also called: context parallelism (CP), sequence parallelism, ring attention, DeepSpeed Ulysses.

    Arrays whose T and S are sharded over mesh axes of type Explicit are served anywhere; where
    nothing is asked, by "all_gather" and "contiguous". `jax.jit` traces anew for another strategy.

    | strategy | between devices | when |
    | --- | --- | --- |
    | "all_gather" | all keys and values come to every device | the keys of one layer fit |
    | "ring" | they go round, and no device keeps another's | they do not |
    | "ulysses" | from cut along the length to cut along the heads, and back | heads suffice |

    Args:
      strategy: one of these. One that cannot serve a request raises; none stands in for it. Of a
        length over two mesh axes it goes over both as over one; ("ring", "ulysses") or
        ("all_gather", "ulysses") goes over each by its own, where the second has the faster links.
      layout: the order in which the tokens lie, as `place` puts them: "contiguous", "zigzag" or
        "striped". Masks, scores, dropout and `Rotary` go by the tokens' own positions. What else
        is computed of positions needs `positions(length, shards, layout)`.

    Raises:
      ValueError: for another strategy, pair of them or layout; in use, for lengths, heads and mesh
        axes that do not fit.

    Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023; Jacobs et al.,
    "DeepSpeed Ulysses", 2023; Brandon et al., "Striped Attention", 2023, whose balance it is.

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
    check_choice("layout", layout, *LAYOUTS)
    return asked(Context(strategy, layout))


def on(
    mesh: Any = None, *, batch: Axes = None, heads: Axes = None, length: Axes = None
) -> AbstractContextManager[None]:
    """A context that names the mesh axes on which attention lies, where types say nothing.

    Arrays over axes of type Auto say how they are sharded only when XLA compiles, which is too late
    for a sharded length and for kernels. Inside, `attend` puts q, k and v as named, and goes over
    them as over Explicit axes: strategies, layouts and kernels alike. Arrays whose types say it
    themselves are left as they are.

    Args:
      mesh: None for the one that `jax.set_mesh` sets.
      batch, heads, length: the mesh axis of the first batch axis, of the heads, and of the lengths
        T and S; several in a tuple; None is not sharded.

    Raises:
      ValueError: if nothing is named; in use, for an axis that the mesh lacks, and for sizes that
        do not fit.

    Source: Xu et al., "GSPMD", 2021, whose axes these are.

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
