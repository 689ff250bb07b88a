"""Loops side by side: what they compute, and that they share no memory."""

import os
import re
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import pytest

from flax_attn._internal.types import Sizes
from flax_attn.backends import blockwise
from flax_attn.backends.blockwise.plan import make_plan
from flax_attn.dropout import Dropout
from flax_attn.masks import CAUSAL, FULL, Segments
from flax_attn.parity import judge
from flax_attn.rules import Rules
from flax_attn.scores import Additive, Alibi, ScoreFn, Softcap
from parity_tests.tables import with_nightly

from .law_cases import normal

B, T, N, K, H = 2, 7, 6, 3, 5
SCORES = {
    "none": Rules(CAUSAL),
    "bias": Rules(FULL, Additive(jnp.asarray(normal(3, 1, N, T, T), "float32"))),
    "slopes": Rules(CAUSAL, Alibi(jnp.asarray(normal(4, N), "float32"))),
    "cap": Rules(CAUSAL, Softcap(3.0), sinks=jnp.asarray(normal(5, N), "float32")),
}


def arrays() -> list[jax.Array]:
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H)
    return [jnp.asarray(normal(i, *shape), "float32") for i, shape in enumerate(shapes)]


def everything(rules: Rules, q, k, v, **how):
    """Output and log-sum-exp, and the gradients of all by random cotangents."""
    rules = rules.bind(Sizes((B,), N, T, T), H)
    run = partial(blockwise.forward, rows=3, cols=4, **how)
    out, back = jax.vjp(lambda *x: run(*x), q, k, v, rules)
    cotangents = [jnp.asarray(normal(9 + i, *x.shape), x.dtype) for i, x in enumerate(out)]
    return jax.tree.leaves((out, back(tuple(cotangents))))


@pytest.mark.nightly
@pytest.mark.parametrize("how", [{"lanes": 4}, {"lanes": 3, "unrolled": False}])
@pytest.mark.parametrize("name", with_nightly(SCORES, commit=["bias"]))
def test_several_loops_compute_what_one_does(name, how):
    with jax.enable_x64(True):
        rules = jax.tree.map(lambda x: x.astype("float64"), SCORES[name])
        qkv = [x.astype("float64") for x in arrays()]
        one = everything(rules, *qkv, unrolled=True)
        several = everything(rules, *qkv, **{"unrolled": True, **how})
        for a, b in zip(one, several, strict=True):
            assert a.dtype == b.dtype
            if a.dtype == jnp.float64:  # integers have no gradient
                assert judge.same_function(b, a).ok


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(SCORES, commit=["cap"]))
def test_the_gradient_of_a_gradient_is_that_of_one_loop(name):
    def twice(lanes: int):
        run = partial(blockwise.forward, rows=3, cols=4, unrolled=True, lanes=lanes)

        def gradient(qkv: list, rules: Rules) -> list:
            loss = lambda *x: sum(jnp.sin(y).sum() for y in run(*x, rules))  # noqa: E731
            return jax.grad(loss, (0, 1, 2))(*qkv)

        def length(qkv: list, rules: Rules):
            return sum((x**2).sum() for x in gradient(qkv, rules))

        return jax.jit(jax.grad(length, (0, 1), allow_int=True))

    with jax.enable_x64(True):
        rules = jax.tree.map(lambda x: x.astype("float64"), SCORES[name])
        rules = rules.bind(Sizes((B,), N, T, T), H)
        qkv = [x.astype("float64") for x in arrays()]
        several, one = (jax.tree.leaves(twice(n)(qkv, rules)) for n in (3, 1))
        for a, b in zip(several, one, strict=True):
            if b.dtype == jnp.float64:  # integers have no gradient
                assert b.any() and judge.same_function(a, b).ok


@pytest.mark.nightly
def test_they_run_under_vmap():
    with jax.enable_x64(True):
        q, k, v = (jnp.stack([x, x + 1]).astype("float64") for x in arrays())
        rules = Rules(CAUSAL).bind(Sizes((B,), N, T, T), H)
        run = partial(blockwise.forward, rules=rules, rows=3, cols=4, unrolled=True, lanes=2)
        o, _ = jax.vmap(lambda q, k, v: run(q, k, v))(q, k, v)
        for i in range(2):
            assert judge.same_function(o[i], run(q[i], k[i], v[i])[0]).ok


def loops(rules: Rules, B=8, N=12, T=256, K=None, platform="cpu", **options) -> int:
    """How many loops are planned."""
    sizes = Sizes((B,), N, T, T)
    return make_plan(sizes, K or N, rules.bind(sizes, 64), platform, **options).lanes


def on_cores(monkeypatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)


def test_who_runs_in_several(monkeypatch):
    """Only what was seen to share no memory, and fits the cache."""
    on_cores(monkeypatch, 2)
    bias = Additive(jnp.ones((1, 1, 1, 1)))
    for score in (Rules().score, Alibi(jnp.ones(12)), Softcap(3.0), bias):
        assert loops(Rules(CAUSAL, score), T=512) == 2
    assert loops(Rules(CAUSAL), T=513) == loops(Rules(CAUSAL), platform="gpu") == 1
    assert loops(Rules(CAUSAL), lanes=1) == loops(Rules(Segments(jnp.zeros((8, 256), int)))) == 1
    assert loops(Rules(dropout=Dropout(0.5, jax.random.key(0)))) == 1
    assert loops(Rules(score=ScoreFn(lambda x, *_: x))) == 1


def test_how_many(monkeypatch):
    """No more than cores and heads, and one where the work is little."""
    on_cores(monkeypatch, 9)
    assert loops(Rules()) == 4 and loops(Rules(), B=1, T=512, K=3) == 3
    assert loops(Rules(), B=1, N=16) == 4 and loops(Rules(), B=1, N=15) == 1
    on_cores(monkeypatch, 3)
    assert loops(Rules()) == 3
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        assert loops(Rules()) == 1
    (size,) = jax.export.symbolic_shape("b")
    assert make_plan(Sizes((size,), 12, 512, 512), 12, Rules(), "cpu").lanes == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    for cores, count in ((2, 2), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert loops(Rules()) == count


# Memory: two loops that share some run one after the other, and slower than one.

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from flax_attn._internal.types import Sizes
from flax_attn.backends import blockwise
from flax_attn.parity import judge
from flax_attn.masks import CAUSAL
from flax_attn.rules import Rules
from flax_attn.scores import Additive, Alibi, Softcap

T, N = 256, 4
score = {
    "none": Rules().score,
    "bias": Additive(jnp.ones((1, N, T, T))),
    "slopes": Alibi(jnp.ones(N)),
    "cap": Softcap(3.0),
}[sys.argv[1]]
rules = Rules(CAUSAL, score).bind(Sizes((1,), N, T, T), 64)
how = dict(rows=128, cols=1024, unrolled=True, lanes=2)

def both(q, do):
    o, back = jax.vjp(lambda *x: blockwise.forward(*x, rules, **how)[0], q, 2 * q, 3 * q)
    return o, back(do)

q = jnp.ones((1, T, N, 64))
jax.jit(both).lower(q, q).compile()
"""


def dumped(folder: Path, name: str) -> tuple[str, str]:
    """The optimized program and the plan of its memory, as XLA writes them."""
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-c", PROGRAM, name]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    (program,) = folder.glob("*jit_both.cpu_after_optimizations.txt")
    memory = program.with_name(program.name.replace(".txt", "-buffer-assignment.txt"))
    return program.read_text(), memory.read_text()


def loops_of(program: str) -> list[set[str]]:
    """The names of what each loop of the whole computes."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) .*?\{$(.*?)^\}", program, re.M | re.S))
    (entry,) = re.findall(r"^ENTRY %?([\w.\-]+)", program, re.M)
    loops = re.findall(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", bodies[entry])
    made = r"^\s*(?:ROOT )?%?([\w.\-]+) = (?!.* get-tuple-element\()(?!.* parameter\()"
    return [set(re.findall(made, bodies[a] + bodies[b], re.M)) for a, b in loops]


def places(memory: str) -> dict[str, tuple[str, int, int]]:
    """Allocation, first byte and last of every array that is not a constant."""
    found, allocation = {}, ""
    for line in memory.splitlines():
        if line.startswith("allocation "):
            allocation = line
        made = re.match(r" value: <\d+ ([\w.\-]+) @0> \(size=(\d+),offset=(\d+)\)", line)
        if made and "constant" not in allocation and "thread-local" not in allocation:
            size, offset = int(made[2]), int(made[3])
            found[made[1]] = (allocation.split(":")[0], offset, offset + size)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(SCORES, commit=["none"]))
def test_they_share_no_memory(name, tmp_path):
    program, memory = dumped(tmp_path, name)
    loops, at = loops_of(program), places(memory)
    assert len(loops) == 4, "two forward and two backward"
    assert all(len(loop & at.keys()) > 20 for loop in loops)
    for one, other in (loops[:2], loops[2:]):
        for a, b in product(one & at.keys(), other & at.keys()):
            (there, first, last), (here, start, end) = at[a], at[b]
            assert there != here or last <= start or end <= first, (a, b)
