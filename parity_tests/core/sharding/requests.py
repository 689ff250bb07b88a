"""Attention on eight devices beside one: run as a program of its own, it prints what it found.

`python -m parity_tests.core.sharding.requests` makes eight devices of one CPU, which must be said
before jax starts, and compares every request on them with the same request on one device: on axes
of one kind, or with `--more` on axes of every kind.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = (  # the last of a flag counts, that of whoever imports this one
    f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_attn import (
    CAUSAL,
    Additive,
    Alibi,
    Dropout,
    DropoutMask,
    Lengths,
    Mask,
    MaskFn,
    Prefix,
    Score,
    ScoreFn,
    Segments,
    Softcap,
    T5Bias,
    assume_platform,
    attend,
    attention_weights,
    explain,
    frozen,
)
from flax_attn.parity import judge

B, T, S, N, K, H, h = 4, 12, 14, 8, 4, 6, 10
KINDS = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
MESH_SET = "explicit, in the mesh"  # by jax.set_mesh
BACKENDS = ("blockwise", "reference")
BY_BOTH = (
    "sinks, slopes and scale",
    "dropout",
    "arrays cut along heads",
    "rows that see nothing",
    "positions",
)
COLLECTIVES = r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape)


def whole(seed: int, below: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(1, below, shape).astype(np.int32)


class Request(NamedTuple):
    """What is asked, from arrays by name; `cut` tells how those are sharded that come so."""

    asked: Callable[[dict], dict]
    arrays: Mapping[str, np.ndarray] = MappingProxyType({})
    cut: Mapping[str, P] = MappingProxyType({})
    spec: P = P("data", None, "model")
    key_heads: int = K
    kinds: tuple[str, ...] = tuple(KINDS)
    lengths: tuple[int, int] = (T, S)


def by_place(b: Any, n: Any, q: Any, k: Any) -> Any:
    return (3 * q + 5 * k + 7 * b + n) % 4 > 0


def by_head(gain: Any, x: Any, b: Any, n: Any, q: Any, k: Any) -> Any:
    return x * gain[n] + (b - q).astype(x.dtype) / 50


@frozen
class Reach(Mask):
    """A user's class that says nothing of shards: it is asked by the numbers of the whole."""

    table: Any

    def __call__(self, b, n, q, k):
        return abs(q - k) <= self.table[b, n]


@frozen
class Temperature(Score):
    """Another; its array is whole on every device."""

    table: Any

    def __call__(self, logits, b, n, q, k):
        return logits * self.table[b, n] + ((q + k) % 3).astype(logits.dtype)


def standing(seed: int, length: int) -> np.ndarray:
    """Positions in any order, with gaps; some are absent."""
    random = np.random.RandomState(seed)
    at = np.stack([random.permutation(max(20, length))[:length] for _ in range(B)]).astype(np.int32)
    return np.where(random.rand(B, length) < 0.2, -1, at)


IDS = {"q_ids": np.sort(whole(1, 4, B, T)), "kv_ids": np.sort(whole(2, 4, B, S))}
REQUESTS = {
    "documents": Request(
        lambda a: {"mask": Lengths(a["kv"]) & Segments(q_ids=a["q_ids"], kv_ids=a["kv_ids"])},
        {"kv": whole(3, S, B), **IDS},
        {"kv": P("data"), "q_ids": P("data"), "kv_ids": P("data")},
    ),
    "sinks, slopes and scale": Request(
        lambda a: {
            "mask": CAUSAL,
            "score": Softcap(a["cap"]) >> Alibi(a["slopes"]),
            "sinks": a["sinks"],
            "scale": a["scale"],
        },
        {
            "slopes": drawn(4, N),
            "sinks": drawn(5, N),
            "scale": drawn(6),
            "cap": np.asarray(2.0),
        },
    ),
    "a table for each head": Request(
        lambda a: {"mask": CAUSAL, "score": T5Bias(a["table"], buckets=8, max_distance=9)},
        {"table": drawn(21, 8, N)},
    ),
    "a table that comes cut": Request(
        lambda a: {"mask": CAUSAL, "score": T5Bias(a["table"], buckets=8, max_distance=9)},
        {"table": drawn(21, 8, N)},
        {"table": P(None, "model")},
        kinds=(*KINDS, MESH_SET),
    ),
    "dropout": Request(lambda a: {"dropout": Dropout(0.4, jax.random.key(3))}),
    "functions": Request(
        lambda a: {"mask": MaskFn(by_place), "score": ScoreFn(by_head, a["gain"])},
        {"gain": drawn(7, N)},
        kinds=(*KINDS, MESH_SET),
    ),
    "classes of a user": Request(
        lambda a: {"mask": Reach(a["reach"]), "score": Temperature(a["heat"])},
        {"reach": whole(19, S, B, N), "heat": drawn(20, B, N)},
        kinds=(*KINDS, MESH_SET),
    ),
    "small arrays that come cut": Request(
        lambda a: {
            "mask": CAUSAL,
            "score": Alibi(a["slopes"]) >> Alibi(a["each"]),
            "sinks": a["sinks"],
        },
        {"slopes": drawn(16, N), "each": drawn(17, B, N), "sinks": drawn(18, N)},
        {"slopes": P("model"), "each": P("data", "model"), "sinks": P("model")},
        kinds=(*KINDS, MESH_SET),
    ),
    "arrays cut along heads": Request(
        lambda a: {
            "score": Additive(a["bias"]),
            "dropout": DropoutMask(a["keep"], 0.3),
            "mask": a["seen"],
        },
        {
            "bias": drawn(8, N, T, S),
            "keep": drawn(9, B, N, T, S) < 0.5,
            "seen": drawn(10, B, 1, 1, S) < 1,
        },
        {"bias": P("model"), "keep": P("data", "model"), "seen": P("data")},
    ),
    "one key head, which all devices have": Request(
        lambda a: {"mask": CAUSAL, "sinks": a["sinks"], "dropout": Dropout(0.3, jax.random.key(7))},
        {"sinks": drawn(15, N)},
        key_heads=1,
        kinds=("auto",),
    ),
    "rows that see nothing": Request(
        lambda a: {"mask": a["seen"], "sinks": a["sinks"], "empty": "mean"},
        {"seen": drawn(21, B, N, T, S) < -1.5, "sinks": np.where(np.arange(N) % 2, -np.inf, 0.3)},
        {"seen": P("data", "model")},
    ),
    "rows that see nothing, dropped": Request(
        lambda a: {
            "mask": a["seen"],
            "dropout": Dropout(0.4, jax.random.key(8)),
            "empty": "mean",
        },
        {"seen": drawn(22, B, 1, T, 1) < 0},
        {"seen": P("data")},
    ),
    # Of the slots half of the devices see most, which they read as one block, and half a few.
    "a token beside a cache": Request(
        lambda a: {"mask": Lengths(a["kv"])},
        {"kv": np.asarray([100, 1000, 300, 200], np.int32)},
        {"kv": P("data")},
        lengths=(1, 1100),
    ),
    "positions": Request(
        lambda a: {
            "mask": (CAUSAL | Prefix(3)) & MaskFn(by_place),
            "score": ScoreFn(by_head, a["gain"]),
            "dropout": Dropout(0.4, jax.random.key(9)),
            "q_positions": a["q_at"],
            "kv_positions": a["kv_at"],
        },
        {
            "gain": drawn(7, N),
            "q_at": standing(24, T),
            "kv_at": standing(25, S),
        },
        {"q_at": P("data"), "kv_at": P("data")},
    ),
    "batch alone": Request(
        lambda a: {"mask": CAUSAL, "dropout": Dropout(0.2, jax.random.key(5))},
        spec=P(("data", "model")),
    ),
}


def program(request: Request, backend: str) -> tuple[Callable, Callable]:
    """Output and lse; all gradients by random cotangents."""

    def forward(q, k, v, arrays):
        return attend(q, k, v, **request.asked(arrays), backend=backend, return_lse=True)

    def gradients(q, k, v, arrays, do, dlse):
        floats = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        (_, lse), back = jax.vjp(
            lambda q, k, v, floats: forward(q, k, v, {**arrays, **floats}), q, k, v, floats
        )
        return back((do, jnp.where(jnp.isneginf(lse), 0, dlse)))

    return jax.jit(forward), jax.jit(gradients)


def given(name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """q, k and v, and the cotangents of output and lse."""
    entries = 8 if "batch" in name else B
    heads, (T, S) = REQUESTS[name].key_heads, REQUESTS[name].lengths
    keys = [drawn(11, entries, S, heads, H), drawn(12, entries, S, heads, h)]
    arrays = [drawn(0, entries, T, N, H), *keys]
    return arrays, [drawn(13, entries, T, N, h), drawn(14, entries, T, N)]


@cache
def wanted(name: str) -> list[np.ndarray]:
    """Output, lse and gradients of one device, by the plain formula."""
    (arrays, cotangents), rules = given(name), dict(REQUESTS[name].arrays)
    forward, gradients = program(REQUESTS[name], "reference")
    outputs = forward(*arrays, rules)
    return [
        np.asarray(x) for x in (*outputs, *jax.tree.leaves(gradients(*arrays, rules, *cotangents)))
    ]


def run(name: str, kind: str, backend: str) -> dict[str, Any]:
    request, (arrays, cotangents) = REQUESTS[name], given(name)
    types = (KINDS[kind.partition(",")[0]],) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
    with jax.set_mesh(mesh) if kind == MESH_SET else nullcontext():
        return run_on(mesh, request, arrays, cotangents, backend, wanted(name))


def run_on(
    mesh: Any, request: Request, arrays: list, cotangents: list, backend: str, want: list
) -> dict[str, Any]:
    def placed(x: np.ndarray, spec: P) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, spec))

    cut = {n: placed(x, request.cut.get(n, P())) for n, x in request.arrays.items()}
    q, *spread = (placed(x, request.spec) for x in (arrays[0], *cotangents))
    k, v = (placed(x, request.spec if x.shape[2] > 1 else P("data")) for x in arrays[1:])
    forward, gradients = program(request, backend)
    compiled = forward.lower(q, k, v, cut).compile()
    backward = gradients.lower(q, k, v, cut, *spread).compile()
    got = [*compiled(q, k, v, cut), *jax.tree.leaves(backward(q, k, v, cut, *spread))]
    return {
        "forward": Counter(re.findall(COLLECTIVES, compiled.as_text())),
        "backward": Counter(re.findall(COLLECTIVES, backward.as_text())),
        "kept": all(x.sharding.is_equivalent_to(q.sharding, 4) for x in (got[0], got[2])),
        "equal": [bool(v) for v in verdicts(got, want)],
        "bits": bool(((np.asarray(got[0]) == 0) == (want[0] == 0)).all()),
    }


def verdicts(got: list, want: list) -> list[bool]:
    got, want = ([np.asarray(x) for x in xs] for xs in (got, want))
    everything = want[2:]
    return [
        judge.same_function(
            a, b, judge.gradient_scale(everything, b) if i > 1 else None, zero=True
        ).ok
        for i, (a, b) in enumerate(zip(got, want, strict=True))
    ]


def chosen_on_a_slice() -> dict[str, Any]:
    """What "auto" takes on TPUs for each kind of axes, and what splash says."""
    found = {}
    for kind, of in KINDS.items():
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(of,) * 2)
        cut = NamedSharding(mesh, P("data", None, "model"))
        q = jax.ShapeDtypeStruct((4, 1024, 8, 128), jnp.bfloat16, sharding=cut)
        with assume_platform("tpu"):
            verdicts = explain(q, q, q, mask=CAUSAL)
        refusal = next(v.refusal for v in verdicts if v.backend == "splash")
        found[kind] = {"chosen": verdicts.chosen, "splash": refusal}
    return found


def refused(spec: P, key_spec: P, kind: AxisType = AxisType.Explicit) -> str:
    """The sentence for arrays that are sharded so, over Explicit axes and one of that kind."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit, kind))
    q, k = (
        jax.device_put(jnp.ones((4, 8, 8, 8)), NamedSharding(mesh, s)) for s in (spec, key_spec)
    )
    try:
        attend(q, k, k, backend="auto" if kind is AxisType.Explicit else "blockwise")
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def at_the_edge() -> dict[str, bool]:
    """No keys at all, and a batch that is left open, where XLA may shard as it likes."""
    forward = jax.jit(partial(attend, backend="blockwise"))
    q, none = jnp.asarray(drawn(0, 4, 3, 8, 6), "float32"), jnp.ones((4, 0, 8, 6))
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 3, 8, 6"), q.dtype)
    left_open = jax.export.export(forward)(shape, shape, shape)
    same = judge.exact(left_open.call(q, q, q), forward(q, q, q))
    return {
        "no keys": not forward(q, none, none).any(),
        "an open batch": same.ok,
        "a length over Auto axes": gathered(forward),
        "a length over an axis of one device": not_cut(forward),
        "a long causal text": long_text(),
        "weights of a few key heads": weights_stay((4, 5, 8, 6), (4, 7, 2, 6), ("data",)),
        "weights of the second batch axis": weights_stay(
            (3, 4, 5, 8, 6), (3, 4, 7, 4, 6), (None, "data")
        ),
    }


def long_text() -> bool:
    """Whether a text of many blocks gives the plain formula's output and gradient, compiled."""

    def both(x: jax.Array, backend: str) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(
            lambda x: (attend(x, x, x, mask=CAUSAL, backend=backend) ** 2).sum()
        )(x)

    x = jnp.asarray(drawn(0, 1, 2048, 2, 4), "float32")
    got, want = (jax.jit(both, static_argnums=1)(x, name) for name in BACKENDS)
    return all(judge.no_worse(a, b, b, "float32").ok for a, b in zip(got, want, strict=True))


def not_cut(forward: Callable) -> bool:
    """Whether a length on a mesh axis of one device is served as if the axis were not there."""
    mesh = jax.make_mesh((8, 1), ("data", "seq"), axis_types=(AxisType.Explicit,) * 2)
    q, k = (jnp.asarray(drawn(i, 8, n, 3, 6), "float32") for i, n in enumerate((7, 9)))
    cut = [jax.device_put(q, NamedSharding(mesh, P("data", "seq")))]
    cut += [jax.device_put(k, NamedSharding(mesh, P("data")))] * 2
    found = forward.lower(*cut).compile()
    none = not re.findall(COLLECTIVES, found.as_text())
    want = forward(q, k, k)
    return none and judge.no_worse(found(*cut), want, want, "float32").ok


def weights_stay(q_shape: tuple, k_shape: tuple, batch: tuple) -> bool:
    """Whether weights over Explicit axes are one device's and stay where they are."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    arrays = [jnp.asarray(drawn(i, *s), "float32") for i, s in enumerate((q_shape, k_shape))]
    whole = P(*batch, *(None,) * (len(q_shape) - 3 - len(batch)))
    cut = P(*whole, None, "model"), P(*whole, None, "model" if k_shape[-2] >= 4 else None)
    q, k = (jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, cut, strict=True))
    found = jax.jit(partial(attention_weights, mask=CAUSAL)).lower(q, k).compile()
    none = not re.findall(COLLECTIVES, found.as_text())
    want = attention_weights(*arrays, mask=CAUSAL)
    kept = found(q, k).sharding.is_equivalent_to(
        NamedSharding(mesh, P(*whole, "model")), len(q_shape)
    )
    return none and kept and judge.no_worse(found(q, k), want, want, "float32").ok


def gathered(forward: Callable) -> bool:
    """Whether a length that is cut over Auto axes is brought together, and the result the same."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jnp.asarray(drawn(0, 2, 16, 3, 6), "float32")
    cut = jax.device_put(x, NamedSharding(mesh, P(None, "data")))
    text = forward.lower(cut, cut, cut).compile().as_text()
    same = judge.no_worse(forward(cut, cut, cut), forward(x, x, x), forward(x, x, x), "float32")
    return set(re.findall(COLLECTIVES, text)) == {"all-gather"} and same.ok


REFUSED = {
    "length": (P(None, "data"), P()),
    "width": (P(None, None, None, "data"), P()),
    "batch": (P("data"), P("model")),
    "axes of two types": (P("data"), P("data"), AxisType.Auto),
}


def tried(more: bool) -> Iterator[tuple[str, str, str]]:
    """Requests, kinds of axes and backends, of which some are asked of the plain formula too."""
    by_both = BY_BOTH if more else BY_BOTH[::4]
    for i, (name, request) in enumerate(REQUESTS.items()):
        for kind in request.kinds if more else [request.kinds[i % len(request.kinds)]]:
            for backend in BACKENDS if name in by_both else BACKENDS[:1]:
                yield name, kind, backend


def main(more: bool) -> None:
    print(json.dumps({"slice": chosen_on_a_slice()}))
    print(json.dumps({"refused": {name: refused(*specs) for name, specs in REFUSED.items()}}))
    print(json.dumps(at_the_edge()))
    for name, kind, backend in tried(more):
        with jax.enable_x64(True):
            found = run(name, kind, backend)
        print(json.dumps({"name": name, "kind": kind, "backend": backend, **found}))
        sys.stdout.flush()


if __name__ == "__main__":
    main("--more" in sys.argv)
