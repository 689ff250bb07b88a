"""Lengths on eight devices beside one: run as a program of its own, it prints what it found.

`python -m parity_tests.core.sharding.lengths` compares every request, by one of the strategies in
one of the layouts, with the same request on one device, and `--more` by two strategies. Names of
requests choose them, and try each by every strategy in every layout. `--process I ADDRESS` before
names makes it process I of two, of four devices each, that meet there.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} "
    f"--xla_force_host_platform_device_count={4 if '--process' in sys.argv else 8} "
    "--xla_backend_optimization_level=0"  # which compiles sooner
)

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_attn import (
    CAUSAL,
    Additive,
    Alibi,
    Causal,
    Chunked,
    Documents,
    Dropout,
    DropoutMask,
    GroupedQueryAttention,
    MaskFn,
    Prefix,
    Rotary,
    ScoreFn,
    Segments,
    Softcap,
    T5Bias,
    Window,
    attend,
    attention_weights,
    explain,
    taps,
)
from flax_attn.parity import judge
from flax_attn.sharding import context_parallel, on, place, unplace
from parity_tests.core.sharding.requests import (
    COLLECTIVES,
    by_head,
    by_place,
    drawn,
    standing,
    verdicts,
    whole,
)

OF_TWO = "--process" in sys.argv
B, T, S, N, K, H, h = 4, 16, 24, 8, 2, 5, 7
LAYOUTS = ("contiguous", "zigzag", "striped")
STRATEGIES = ("ring", "all_gather", "ulysses")
# Sizes and names of a mesh's axes, and how `B T N H` lies on them.
MESHES = {
    "rows": ((2, 4), ("data", "seq"), P("data", "seq")),
    "heads": ((2, 2, 2), ("data", "model", "seq"), P("data", "seq", "model")),
    "one axis": ((8,), ("seq",), P(None, "seq")),
    "two axes": ((2, 2, 2), ("data", "seq", "near"), P("data", ("seq", "near"))),
}
# Over two mesh axes, with a strategy for each or one for both; the first two always.
OVER_BOTH = (
    ("causal", ("ring", "ulysses"), "zigzag"),
    ("rows that see nothing, dropped", ("all_gather", "ulysses"), "zigzag"),
    ("documents", ("ring", "ulysses"), "striped"),
    ("a window, capped, beside sinks", ("ring", "ulysses"), "contiguous"),
    ("arrays by slot", ("ring", "ulysses"), "zigzag"),
    ("positions", ("all_gather", "ulysses"), "striped"),
    ("rows that see nothing", "ring", "zigzag"),
)
# Asked over axes of type Auto as well, which are named; the first two always.
BY_NAME = ("causal", "a token each", "slopes, scale and sinks")
Arrays = Mapping[str, np.ndarray]


class Request(NamedTuple):
    """What is asked, from arrays by name.

    Attributes:
      tokens: of an array its axes of queries and of keys, which lie as a layout says.
      cut: how arrays come that are sharded.
      layouts: what its lengths fit.
    """

    asked: Callable[[dict], dict]
    arrays: Arrays = MappingProxyType({})
    tokens: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    cut: Mapping[str, P] = MappingProxyType({})
    lengths: tuple[int, int] = (T, S)
    mesh: str = "rows"
    layouts: tuple[str, ...] = LAYOUTS


REQUESTS = {
    "causal": Request(lambda a: {"mask": CAUSAL}, lengths=(T, T)),
    "a window, capped, beside sinks": Request(
        lambda a: {"mask": Window(5, 0), "score": Softcap(2.0), "sinks": a["sinks"]},
        {"sinks": drawn(5, N)},
        lengths=(T, T),
    ),
    "documents": Request(
        lambda a: {"mask": CAUSAL & Segments(a["ids"]) & Documents(a["lengths"])},
        {"ids": np.sort(whole(1, 3, B, T)), "lengths": whole(2, 8, B, 2)},
        {"ids": (1,)},
        {"ids": P("data", "seq"), "lengths": P("data")},
        lengths=(T, T),
    ),
    "a window both ways": Request(
        lambda a: {"mask": Window(1, 2) & Causal(1)}, lengths=(T, T), mesh="one axis"
    ),
    "slopes, scale and sinks": Request(
        lambda a: {
            "mask": Causal("end"),
            "score": Softcap(a["cap"]) >> Alibi(a["slopes"], offset="end"),
            "sinks": a["sinks"],
            "scale": a["scale"],
        },
        {"slopes": drawn(4, N), "sinks": drawn(5, N), "scale": drawn(6), "cap": np.asarray(2.0)},
        mesh="heads",
    ),
    "a table": Request(
        lambda a: {
            "mask": (CAUSAL | Prefix(3)) & Chunked(10),
            "score": T5Bias(a["table"], buckets=8, max_distance=9),
        },
        {"table": drawn(21, 8, N)},
    ),
    "dropout": Request(
        lambda a: {"mask": ~Window(2, 1), "dropout": Dropout(0.4, jax.random.key(3))},
        mesh="heads",
    ),
    "arrays by slot": Request(
        lambda a: {
            "score": Additive(a["bias"]) >> Additive(a["keys"]),
            "dropout": DropoutMask(a["keep"], 0.3),
            "mask": a["seen"],
        },
        {
            "bias": drawn(8, N, T, S),
            "keys": drawn(8, S),
            "keep": drawn(9, B, N, T, S) < 0.5,
            "seen": drawn(10, B, 1, 1, S) < 1,
        },
        {"bias": (1, 2), "keys": (0,), "keep": (2, 3), "seen": (3,)},
        {"keep": P("data", None, "seq"), "seen": P("data", None, None, "seq")},
    ),
    "functions": Request(
        lambda a: {"mask": MaskFn(by_place), "score": ScoreFn(by_head, a["gain"])},
        {"gain": drawn(7, N)},
    ),
    "rows that see nothing": Request(
        lambda a: {"mask": Window(5, 0) & a["seen"], "empty": "mean"},
        {"seen": drawn(21, B, 1, T, 1) < 0},
        {"seen": (2,)},
        lengths=(T, T),
    ),
    "rows that see nothing, dropped": Request(
        lambda a: {
            "mask": a["seen"],
            "dropout": Dropout(0.4, jax.random.key(8)),
            "sinks": a["sinks"],
            "empty": "mean",
        },
        {"seen": drawn(21, B, N, T, S) < -1.5, "sinks": np.where(np.arange(N) % 2, -np.inf, 0.3)},
        {"seen": (2, 3)},
    ),
    "positions": Request(
        lambda a: {
            "mask": CAUSAL | Prefix(3),
            "dropout": Dropout(0.4, jax.random.key(9)),
            "q_positions": a["q_at"],
            "kv_positions": a["kv_at"],
        },
        {"q_at": standing(24, T), "kv_at": standing(25, S)[:1]},
        {"q_at": (1,), "kv_at": (1,)},
        {"q_at": P("data", "seq")},
    ),
    "a token each": Request(
        lambda a: {"mask": CAUSAL, "score": Additive(a["bias"])},
        {"bias": drawn(8, 8, 16)},
        {"bias": (0, 1)},
        lengths=(8, 16),
        mesh="one axis",
        layouts=("contiguous", "striped"),
    ),
}


def program(request: Request) -> Callable:
    """Output and lse, and all gradients by random cotangents."""

    def everything(q, k, v, arrays, do, dlse):
        floats = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}

        def forward(q, k, v, floats):
            return attend(q, k, v, **request.asked({**arrays, **floats}), return_lse=True)

        (o, lse), back = jax.vjp(forward, q, k, v, floats)
        return o, lse, *jax.tree.leaves(back((do, jnp.where(jnp.isneginf(lse), 0, dlse))))

    return jax.jit(everything)


def given(request: Request) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """q, k and v, and the cotangents of output and lse."""
    T, S = request.lengths
    arrays = [drawn(0, B, T, N, H), drawn(11, B, S, K, H), drawn(12, B, S, K, h)]
    return arrays, [drawn(13, B, T, N, h), drawn(14, B, T, N)]


@cache
def wanted(name: str) -> list[np.ndarray]:
    """Output, lse and gradients of one device."""
    (arrays, cotangents), request = given(REQUESTS[name]), REQUESTS[name]
    return [np.asarray(x) for x in program(request)(*arrays, dict(request.arrays), *cotangents)]


def run(
    name: str, strategy: Any, layout: str, by_name: bool = False, over: str | None = None
) -> dict[str, Any]:
    request = REQUESTS[name]
    sizes, names, spec = MESHES[over or request.mesh]
    kind = AxisType.Auto if by_name else AxisType.Explicit
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))
    batch, length, heads = (*spec, None)[:3]
    shards = mesh.shape["seq"] * mesh.shape.get("near", 1)

    def put(x: np.ndarray, spec: P, *axes: int) -> jax.Array:
        for axis in axes:
            x = place(x, shards, layout, axis=axis)
        return jax.device_put(x, NamedSharding(mesh, spec))

    arrays, cotangents = ([put(x, spec, 1) for x in xs] for xs in given(request))
    rules = {
        n: put(x, request.cut.get(n, P()), *request.tokens.get(n, ()))
        for n, x in request.arrays.items()
    }
    told = on(mesh, batch=batch, heads=heads, length=length) if by_name else nullcontext()
    with context_parallel(strategy, layout=layout), told:
        compiled = program(request).lower(*arrays, rules, *cotangents).compile()
    got = list(compiled(*arrays, rules, *cotangents))
    kept = got[0].sharding.is_equivalent_to(arrays[0].sharding, 4)
    floats = [n for n in sorted(rules) if jnp.issubdtype(rules[n].dtype, jnp.floating)]
    back = [(1,)] * 5 + [request.tokens.get(n, ()) for n in floats]
    for i, axes in enumerate(back):
        got[i] = fetched(got[i])
        for axis in axes:
            got[i] = unplace(got[i], shards, layout, axis=axis)
    want = wanted(name)
    return {
        "equal": [bool(v) for v in verdicts(got, want)],
        "kept": bool(kept),
        "bits": bool(((got[0] == 0) == (want[0] == 0)).all()),
        "sent": Counter(re.findall(COLLECTIVES, compiled.as_text())),
    }


def rows(names: list[str], more: bool) -> Iterator[dict[str, Any]]:
    """What is tried, and what came of it."""
    for i, name in enumerate(REQUESTS):
        for strategy, layout in pairs(i, more or OF_TWO, bool(names) and not OF_TWO):
            if not names or name in names:
                row = {"name": name, "strategy": strategy, "layout": layout}
                yield row | run(**row)
    if names:
        return
    for i, name in enumerate(BY_NAME if more else BY_NAME[:2]):
        row = {"name": name, "strategy": STRATEGIES[i], "layout": REQUESTS[name].layouts[i - 1]}
        yield row | run(**row, by_name=True)
    for name, strategy, layout in OVER_BOTH if more else OVER_BOTH[:2]:
        row = {"name": name, "strategy": strategy, "layout": layout}
        yield row | run(**row, over="two axes")


def pairs(i: int, more: bool, whole: bool) -> list[tuple[str, str]]:
    """Strategies and layouts of request i: one of each (of the first all strategies), two, all."""
    layouts = [*REQUESTS.values()][i].layouts
    if whole:
        return list(product(STRATEGIES, layouts))
    one = [(s, s + 1) for s in range(3)] if i == 0 else [(i % 3, i + i // 3)]
    two = [(0, i), (1 + i % 2, i + 1)]
    return [(STRATEGIES[s], layouts[x % len(layouts)]) for s, x in (two if more else one)]


def at_the_edge() -> dict[str, bool]:
    """Weights, and a layer with rotary embeddings, in a layout."""
    return {
        "weights": weights_alike("zigzag"),
        "a layer, gathered": layer_alike("all_gather", "striped"),
        "a layer, by name": layer_alike("ring", "zigzag", by_name=True),
        "a layer over two axes, one of one device": layer_alike("ring", "zigzag", more=("one",)),
        "what dropout keeps": all(map(kept_alike, STRATEGIES)),
    }


def fetched(x: jax.Array) -> np.ndarray:
    """All of an array, also of what lies on another process's devices."""
    return np.asarray(process_allgather(x, tiled=True) if OF_TWO else x)


def put_on(x: np.ndarray, spec: P, mesh: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


def weights_alike(layout: str) -> bool:
    """Whether `attention_weights` are one device's, also for a ring, and lie as the queries do."""
    mesh = jax.make_mesh((2, 4), ("data", "seq"))
    arrays = drawn(0, B, T, N, H), drawn(1, B, S, K, H)
    want = attention_weights(*arrays, mask=Causal("end"))
    q, k = (put_on(place(x, 4, layout, axis=1), P("data", "seq"), mesh) for x in arrays)
    with context_parallel("ring", layout=layout):
        got = jax.jit(lambda q, k: attention_weights(q, k, mask=Causal("end")))(q, k)
    kept = got.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None, "seq")), 4)
    got = unplace(unplace(fetched(got), 4, layout, axis=2), 4, layout, axis=3)
    return kept and judge.no_worse(got, want, want, "float64").ok


def kept_alike(strategy: str) -> bool:
    """Whether a listener hears which weights are kept, in the order in which they lie."""
    mesh, spec = jax.make_mesh((2, 4), ("data", "seq")), P("data", "seq")
    x, keep = drawn(0, B, T, N, H), drawn(9, B, N, T, T) < 0.5

    def both(x: np.ndarray) -> np.ndarray:
        return place(place(x, 4, "zigzag", axis=2), 4, "zigzag", axis=3)

    def heard(x: Any, drop: Any) -> np.ndarray:
        with taps.listen() as found:
            attend(x, x, x, dropout=drop, backend="blockwise")
        return np.asarray(dict(found)["keep"])

    cut = put_on(place(x, 4, "zigzag", axis=1), spec, mesh)
    with context_parallel(strategy, layout="zigzag"):
        by_index = heard(cut, Dropout(0.4, jax.random.key(3)))
        by_slot = heard(cut, DropoutMask(both(keep), 0.5))
    want = heard(jnp.asarray(x), Dropout(0.4, jax.random.key(3)))
    return bool((by_index == both(want)).all() and (by_slot == both(keep)).all())


def layer_alike(
    strategy: str, layout: str, by_name: bool = False, more: tuple[str, ...] = ()
) -> bool:
    """Whether a layer's output and gradients are those of one device, its rotary told nothing."""
    layer = GroupedQueryAttention(
        11, N, K, 6, rotary=Rotary(), param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(layer)

    def everything(params, x, do):
        out, back = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
        return out, *jax.tree.leaves(back(do))

    x, do = drawn(0, B, T, 11), drawn(1, B, T, 11)
    want = jax.jit(everything)(params, x, do)
    kind = AxisType.Auto if by_name else AxisType.Explicit
    names, ones = ("seq", *more), (1,) * len(more)
    mesh = jax.make_mesh((2, 4, *ones), ("data", *names), axis_types=(kind,) * (2 + len(more)))
    spec = P("data", names if more else "seq")
    told = on(batch="data", length="seq") if by_name else nullcontext()  # of the mesh that is set
    with context_parallel(strategy, layout=layout), jax.set_mesh(mesh), told:
        given = (put_on(place(y, 4, layout, axis=1), spec, mesh) for y in (x, do))
        got = list(jax.jit(everything)(jax.device_put(params, P()), *given))
    got[1:-1] = map(fetched, got[1:-1])
    got[0], got[-1] = (unplace(fetched(y), 4, layout, axis=1) for y in (got[0], got[-1]))
    return all(judge.no_worse(a, b, b, "float64").ok for a, b in zip(got, want, strict=True))


def refused(asked: dict, *specs: P, lengths: tuple = (T, S), heads: int = N, **how: Any) -> str:
    """The sentence for what cannot be served."""
    mesh = jax.make_mesh((2, 4), ("data", "seq"))
    shapes = (B, lengths[0], heads, H), *((B, lengths[1], K, H),) * 2
    specs = specs or (P("data", "seq"),) * 3
    arrays = [put_on(np.ones(shape), spec, mesh) for shape, spec in zip(shapes, specs, strict=True)]
    with context_parallel(**asked):
        try:
            attend(*arrays, **how)
        except (ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def refused_by_name(**names: str) -> str:
    """The sentence for axes that are named wrongly."""
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.ones((3, 8, 2, 5))
    try:
        with on(mesh, **names):
            attend(x, x, x)
    except ValueError as error:
        return f"ValueError: {error}"
    return "nothing"


def sentences() -> dict[str, str]:
    ring, cut = {"strategy": "ring"}, P("data", "seq")
    mesh = jax.make_mesh((2, 4), ("data", "seq"))
    with context_parallel("ring", layout="zigzag"):
        x = jax.ShapeDtypeStruct((B, T, N, H), jnp.float32, sharding=NamedSharding(mesh, cut))
        told = explain(x, x, x, mask=CAUSAL)
    return {
        "explained": str(told),
        "explained, of a ring": told.sequence.sends,
        "zigzag": refused(ring | {"layout": "zigzag"}, lengths=(T, 20)),
        "heads": refused({"strategy": "ulysses"}, heads=6),
        "keys that are not cut": refused({}, cut, P("data"), P("data")),
        "a strategy too many": refused({"strategy": ("ring", "ulysses")}),
        "a name that is not there": refused_by_name(length="sequence"),
        "a batch that does not fit": refused_by_name(batch="seq"),
        "no name": refused_by_name(),
        "the plain formula in a ring": refused(ring, backend="reference"),
    }


def main(names: list[str]) -> None:
    names, more = [name for name in names if name != "--more"], "--more" in names
    if OF_TWO:
        _, process, address, *names = names
        jax.distributed.initialize(address, num_processes=2, process_id=int(process))
        assert (jax.device_count(), jax.local_device_count()) == (8, 4)
    with jax.enable_x64(True):
        if not names:
            print(json.dumps({"sentences": sentences(), "edges": at_the_edge()}))
        for row in rows(names, more):
            print(json.dumps(row))
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
