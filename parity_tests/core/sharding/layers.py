"""Every exported layer with its batch over eight devices: a program, which prints what it found.

Layers are found by their export, and called as their cases are, on eight rows in place of the
case's own; so one that comes later is tried too, on axes of one kind. `--more` tries several cases
of each on axes of both kinds, and every layer that decodes with every kind of cache that it takes.
Words that are given, as in `layers.py paged`, choose the programs in whose names one of them is.
"""

import inspect
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = (  # the last of a flag counts, that of whoever imports this one
    f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
)

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flax_attn.layers
from flax_attn import CAUSAL, Float8, Int8, PagedCache, State, Window, recurrence
from flax_attn.parity import Case, draw, judge
from flax_attn.parity.cases.collect import collect
from flax_attn.sharding import context_parallel, on
from parity_tests.core.cases import pure
from parity_tests.core.layer_facts import CACHED, RECURRENT
from parity_tests.core.sharding.requests import COLLECTIVES

ROWS, T, N = 8, 11, 2
MESH = (4, 2), ("data", "model")
KINDS = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
# What the functions below the recurrent layers are given, by name, for one row.
RECURRENCES = {
    "linear_recurrence": {
        **dict.fromkeys(("q", "k"), (T, N, 3)),
        "v": (T, N, 5),
        "log_decay": (T, N, 3),
        "beta": (T, N),
        "state": (N, 3, 5),
    },
    "elementwise_recurrence": {"x": (T, 3), "log_decay": (T, 3), "state": (3,)},
    "causal_convolution": {"x": (T, 3), "state": (3, 3)},
}
# Kinds of cache, and what `init_cache` is given for them.
PAGES = {"pages": (2 * ROWS, 4)}
CACHES = {
    "static": {},
    "ring": {"window": "mask", "spare": 1},
    "int8": {"store": Int8()},
    "float8": {"store": Float8()},
    "paged": PAGES,
    "paged int8": {**PAGES, "store": Int8()},
}
# Layers without `mask=`, of which a ring needs one that looks no further back; and the one whose
# indexer goes by slot.
RINGLESS = ("multi-head", "causal")
BY_SLOT = ("indexed",)
# At each commit, forward and on Explicit axes; static caches are in `decoding.py`.
COMMIT = {
    "grouped ring ring, rows whole",
    "grouped paged, rows",
    "latent absorbed paged int8, rows",
    "t5 int8, rows whole",
    "gated_delta state, rows",
    "cross as self memory, rows whole",
}


class Program(NamedTuple):
    """`f(params, inputs)` on dicts of arrays.

    Attributes:
      along: the names of the inputs that have an entry for each row.
      gathers: whether devices ask each other for new tokens.
      axes, differentiated: on which axes it is tried, and whether gradients are.
    """

    f: Any
    params: dict[str, Any]
    inputs: dict[str, np.ndarray]
    along: tuple[str, ...]
    gathers: bool = False
    axes: tuple[str, ...] = tuple(KINDS)
    differentiated: bool = True


def chosen(cases: list[Case], more: bool) -> list[Case]:
    """Of a layer the case that is given most, and with more one that drops and the smallest."""
    by_size = sorted(cases, key=lambda x: sum(y.size for y in x.arrays().values()))
    plain = [x for x in by_size if not callable(x.config)] or by_size
    most = max(plain, key=lambda x: (has_rows(x), len(x.inputs)))
    drops = [x for x in plain if x.train][:1]
    return list(dict.fromkeys([most, *drops, plain[0]] if more else [most]))


def has_rows(case: Case) -> bool:
    """Whether the first input has batch axes, as the layer declares it."""
    first = [*inspect.signature(case.flax_class.__call__).parameters.values()][1]
    rank = len(first.annotation.dim_str.split()) - 1  # without "*B"
    config = {} if callable(case.config) else case.config
    return next(iter(case.arrays().values())).ndim > max(rank, config.get("axes", 0) + 1)


def of_case(case: Case) -> Program:
    """A case with `ROWS` rows in place of its own, or of none."""
    f, params, floats = pure(case)
    inputs, first = case.arrays(), next(iter(floats.values()))
    entries = first.shape[0] if has_rows(case) else None
    along = tuple(
        name
        for name, x in inputs.items()
        if (x.shape[0] == entries if entries else x.ndim == first.ndim)
    )
    for name in along:
        shape = (ROWS, *inputs[name].shape[1 if entries else 0 :])
        if name in floats:
            inputs[name] = draw.normal(1, name, shape)
        else:
            inputs[name] = np.resize(inputs[name], shape)
    return Program(f, jax.tree.map(as_float64, params), inputs, along)


def of_recurrence(name: str, **more: Any) -> Program:
    """One of the functions, of packed documents and padding too, from a state."""
    call = partial(getattr(recurrence, name), **more)
    inputs = {x: draw.normal(1, x, (ROWS, *shape)) for x, shape in RECURRENCES[name].items()}
    if "log_decay" in inputs:
        inputs["log_decay"] = -np.abs(inputs["log_decay"])
    inputs["segments"] = np.sort(draw.stream(1, "ids").randint(0, 3, (ROWS, T)))
    inputs["valid"] = draw.stream(1, "valid").rand(ROWS, T) < 0.8
    params = {"weight": draw.normal(1, "weight", (3, 4))} if name == "causal_convolution" else {}
    return Program(lambda params, inputs: call(**params, **inputs), params, inputs, tuple(inputs))


def of_two_calls() -> Program:
    """A recurrent layer whose packed documents go on, or end, in a second call."""
    layer = flax_attn.layers.RGLRU(11, 3, rngs=nnx.Rngs(0), width=12)
    graph, weights = nnx.split(layer)
    leaves, tree = jax.tree.flatten(weights)
    params = {str(i): np.asarray(x, np.float64) for i, x in enumerate(leaves)}
    drawn = {
        "segments": np.sort(draw.stream(1, "ids").randint(0, 3, (ROWS, T))),
        "valid": draw.stream(1, "valid").rand(ROWS, T) < 0.8,
    }
    state = layer.init_cache(ROWS, T, dtype=np.float64)
    before = {field.name: np.asarray(getattr(state, field.name)) for field in fields(state)}

    def f(params: Any, inputs: Any) -> Any:
        weights = [params[str(i)] for i in range(len(leaves))]
        made = nnx.merge(graph, jax.tree.unflatten(tree, weights))
        cache, outputs = State(**{x: inputs[x] for x in before}), []
        for part in (slice(0, 4), slice(4, T)):
            said = {x: inputs[x][:, part] for x in drawn}
            y, cache = made(inputs["x"][:, part], cache=cache, **said)
            outputs.append(y)
        return outputs, cache

    inputs = {"x": draw.normal(1, "x", (ROWS, T, 11)), **drawn, **before}
    return Program(f, params, inputs, tuple(inputs))


def of_cache(name: str, kind: str, rows: str) -> Program:
    """A layer that decodes: a prompt with padding, then one token more.

    With `rows` "rows whole" only the tokens are sharded, and the cache is not.
    """
    options, how = CACHES.get(kind, {}), {}
    if name in CACHED:
        make, arguments, keywords, how = CACHED[name]
        if kind == "ring" and not how:
            keywords = {**keywords, "mask": CAUSAL & Window(3, 0)}
        make = partial(make, *arguments, **keywords)
    else:
        make = RECURRENT.get(name)
    layer = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0), param_dtype=jnp.float64))
    graph, state, rest = nnx.split(layer, nnx.Param, ...)
    rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
    leaves, tree = jax.tree.flatten(state)
    params = {str(i): draw.normal(i, name, x.shape) / 3 for i, x in enumerate(leaves)}

    def merged(params: Any) -> Any:
        weights = [params[str(i)] for i in range(len(leaves))]
        return nnx.merge(graph, jax.tree.unflatten(tree, weights), rest, copy=True)

    width = CACHED[name][1][0] if name in CACHED else 11
    x = draw.normal(1, "x", (ROWS, 4, width))
    layer = merged(params)
    if kind == "memory":
        cache = layer.remember(draw.normal(1, "memory", (ROWS, 5, width)))
    else:
        cache = layer.init_cache(ROWS, 8, dtype=jnp.float64, **{**options, **how})
    pooled = isinstance(cache, PagedCache)
    if pooled:
        table = np.random.default_rng(2).permutation(2 * ROWS).reshape(ROWS, 2)
        cache = replace(cache, table=np.asarray(table, np.int32))
    paths, caches = jax.tree.flatten_with_path(cache)
    held = {f"cache{jax.tree_util.keystr(path)}": np.asarray(y) for path, y in paths}

    def f(params: Any, inputs: Any) -> Any:
        layer, after = merged(params), jax.tree.unflatten(caches, [inputs[key] for key in held])
        valid = {} if name in RINGLESS else {"valid": inputs["valid"]}
        first, after = layer(inputs["x"][:, :3], cache=after, **valid)
        second, after = layer(inputs["x"][:, 3:], cache=after)
        return (first, second), after

    valid = draw.stream(1, "valid").rand(ROWS, 3) < 0.7
    along = ["x", "valid"]
    if rows == "rows":
        along += [key for key in held if "pool" not in key]
    gathers = pooled or rows != "rows"
    return Program(f, params, {"x": x, "valid": valid, **held}, tuple(along), gathers)


def caches(more: bool) -> Iterator[tuple[str, Program]]:
    """Programs of the layers that decode, by every kind of cache."""
    for name in (*CACHED, *RECURRENT):
        own = ["state"] if name in RECURRENT else list(CACHES)
        if name.endswith("ring"):
            own = ["ring"]
        own = [kind for kind in own if kind != "ring" or name not in RINGLESS]
        if name in BY_SLOT:
            own = ["static", "int8", "float8"]
        if name in ("t5", "cross as self"):
            own.append("memory")
        for kind in own:
            for rows in ("rows", "rows whole"):
                title = f"{name} {kind}, {rows}"
                if more:
                    yield title, of_cache(name, kind, rows)
                elif title in COMMIT:
                    program = of_cache(name, kind, rows)
                    yield title, program._replace(axes=("explicit",), differentiated=False)


def programs(more: bool) -> Iterator[tuple[str, Program]]:
    cases = collect("parity_tests")
    for name, layer in inspect.getmembers(flax_attn.layers, inspect.isclass):
        for case in chosen([case for case in cases if case.flax_class is layer], more):
            yield f"{name} {case}", of_case(case)
    for name in RECURRENCES:
        options = {"delta": True, "chunk": 4} if name == "linear_recurrence" else {}
        yield name, of_recurrence(name, **options)
    yield "RGLRU in two calls", of_two_calls()
    yield from caches(more)


def as_float64(x: Any) -> Any:
    return x.astype("float64") if jnp.issubdtype(x.dtype, jnp.floating) else x


def both_ways(program: Program) -> Any:
    """Outputs, and gradients of all parameters and inputs by random cotangents."""

    def run(params: Any, inputs: Any) -> Any:
        if not program.differentiated:
            return program.f(params, inputs), ()
        floats = {x: y for x, y in inputs.items() if jnp.issubdtype(y.dtype, jnp.floating)}
        out, back = jax.vjp(lambda p, x: program.f(p, {**inputs, **x}), params, floats)
        return out, back(jax.tree.map(cotangent, out))

    return jax.jit(run)


def cotangent(x: Any) -> Any:
    return jnp.asarray(draw.normal(2, str(x.shape), x.shape), x.dtype)


def run(program: Program, kind: AxisType, want: Any) -> dict[str, Any]:
    """What eight devices give beside one, and what they send to each other."""
    mesh = jax.make_mesh(*MESH, axis_types=(kind,) * 2)

    def put(x: Any, spec: P) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, spec))

    inputs = {
        x: put(y, P("data") if x in program.along else P()) for x, y in program.inputs.items()
    }
    params = jax.tree.map(lambda x: put(x, P()), program.params)
    try:
        compiled = both_ways(program).lower(params, inputs).compile()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    sent = {"forward": Counter(), "backward": Counter()}
    for line in compiled.as_text().splitlines():
        for collective in re.findall(COLLECTIVES, line):
            sent["backward" if "transpose(" in line else "forward"][collective] += 1
    got = compiled(params, inputs)
    return {"error": "", "equal": alike(got, want), "gathers": program.gathers, **sent}


def alike(got: Any, want: Any) -> bool:
    outputs, gradients = ([np.asarray(x) for x in jax.tree.leaves(side)] for side in want)
    scales = [None] * len(outputs) + [judge.gradient_scale(gradients, x) for x in gradients]
    return all(
        judge.same_function(np.asarray(a), b, scale, zero=True).ok
        for a, b, scale in zip(jax.tree.leaves(got), [*outputs, *gradients], scales, strict=True)
    )


def lengths(kind: AxisType) -> dict[str, Any]:
    """A recurrence whose length is cut: what it gives, and what it says of layouts and widths."""
    mesh = jax.make_mesh((8,), ("seq",), axis_types=(kind,))
    a, b = (draw.normal(1, name, (3, 16, 5)) for name in "ab")

    def call(a: Any, b: Any) -> Any:
        return recurrence.elementwise_recurrence(a, -jnp.abs(b))

    def cut(x: Any, *spec: Any) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    x, y = cut(a, None, "seq"), cut(b, None, "seq")
    outs = call(x, y), jax.jit(call)(x, y)
    want = [np.asarray(out) for out in call(a, b)]
    with context_parallel("ring", layout="zigzag"), on(mesh, length="seq"):
        layout = sentence(call, x, y)
    q, k = cut(draw.normal(1, "q", (3, 4, 2, 8)), None, None, None, "seq"), jnp.ones((3, 4, 2, 8))
    return {
        "equal": all(alike((got, ()), (want, ())) for got in outs),
        "lies": [str(out[0].sharding.spec) for out in outs],
        "layout": layout,
        "width": sentence(recurrence.linear_recurrence, q, k, k),
    }


def sentence(f: Any, *arrays: Any) -> str:
    """What it says to these arrays."""
    try:
        return str(jax.eval_shape(f, *arrays)) and ""
    except ValueError as error:
        return str(error)


def main(more: bool, words: list[str]) -> None:
    print(json.dumps({name: lengths(kind) for name, kind in KINDS.items()}))
    for i, (name, program) in enumerate(programs(more)):
        if words and not any(word in name for word in words):
            continue
        want = both_ways(program)(program.params, program.inputs)
        for kind in program.axes if more or words else [program.axes[i % len(program.axes)]]:
            print(json.dumps({"name": name, "kind": kind, **run(program, KINDS[kind], want)}))
            sys.stdout.flush()


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main("--more" in sys.argv, [word for word in sys.argv[1:] if word != "--more"])
