"""Random attentions: `program(seed)` draws structure and shapes, `request(program, i)` the arrays.

A program compiles once and serves many requests. The same seed gives the same program and the same
requests on every machine.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import ml_dtypes  # noqa: F401, bfloat16 by name
import numpy as np

from flax_attn import Dropout

from .masks import Node, Random, Sizes, mask_node, table
from .oracle import Inputs
from .scores import Chain, score_chain

LONG = (127, 128, 129, 1023, 1024, 1025, 2047, 2048, 2049)
DTYPES = {"float64": 0.6, "float32": 0.2, "bfloat16": 0.1, "float16": 0.1}
BATCHES = [(), (1,), (2,), (3,), (2, 1), (2, 3)]


class Program(NamedTuple):
    """The structure of one attention and its shapes.

    Attributes:
      fixed: whether the mask's arrays are constants of the program, not handed in.
      scale: None, a number or "traced".
      dropout: "none", "Dropout" or "DropoutMask".
      amplitude: by which the queries are multiplied.
      poison: whether what nobody sees holds NaN and Inf.
      plan: how `blockwise` is to walk: its name and what overrules its choices.
      thorough: whether it is compiled as users compile.
      empty: what a row gives that sees nothing; never the mean of what is poisoned.
    """

    seed: int
    sizes: Sizes
    K: int
    H: int
    h: int
    dtype: str
    mask: Node
    fixed: bool
    score: Chain
    scale: Any
    sinks: bool
    dropout: str
    rate: float
    amplitude: float
    poison: bool
    plan: tuple[str, dict[str, Any]]
    thorough: bool
    empty: str

    @property
    def is_long(self) -> bool:
        """Whether its lengths are those of the default plan's blocks."""
        return max(self.sizes.T, self.sizes.S) >= LONG[0]

    @property
    def wide(self) -> str:
        """The dtype of logits and lse."""
        return "float64" if self.dtype == "float64" else "float32"

    def words(self) -> dict[str, str]:
        """The program in words."""
        s = self.sizes
        more = [f"scale={self.scale}", *(["sinks"] if self.sinks else [])]
        more += [] if self.dropout == "none" else [f"{self.dropout} {self.rate}"]
        more += [w for w in ("fixed", "poison", "thorough") if getattr(self, w)]
        more += [f"empty={self.empty}"]
        shape = f"B{list(s.batch)} T{s.T} S{s.S} N{s.N} K{self.K} H{self.H} h{self.h}"
        how = " ".join(f"{name}={value}" for name, value in self.plan[1].items())
        return {
            "mask": self.mask.words,
            "score": self.score.words,
            "more": ", ".join([*more, f"q * {self.amplitude}"]),
            "sizes": shape,
            "dtype": self.dtype,
            "plan": f"{self.plan[0]} {how}".strip(),
        }


def program(seed: int) -> Program:
    """The program of a seed."""
    drawn = Random(seed)
    is_long = drawn.rand() < 0.1
    sizes, K = _long_sizes(drawn) if is_long else _sizes(drawn)
    dtype = str(drawn.choice([*DTYPES], p=[*DTYPES.values()]))
    scale = [None, None, float(drawn.choice([1.0, 0.3, -0.5])), "traced"][drawn.randint(4)]
    found = Program(
        seed=seed,
        sizes=sizes,
        K=K,
        H=int(drawn.randint(1, 9)),
        h=int(drawn.randint(1, 9)),
        dtype=dtype,
        mask=mask_node(drawn, sizes),
        fixed=bool(drawn.rand() < 0.1),
        score=score_chain(drawn, sizes, dtype),
        scale=scale,
        sinks=bool(drawn.rand() < 0.3),
        dropout=str(drawn.choice(["none", "Dropout", "DropoutMask"], p=[0.7, 0.18, 0.12])),
        rate=float(drawn.choice([0.1, 0.5, 0.0, 1.0], p=[0.45, 0.45, 0.05, 0.05])),
        amplitude=float(drawn.choice([1e-3, 1.0, 3.0, 30.0], p=[0.1, 0.5, 0.3, 0.1])),
        poison=bool(drawn.rand() < 0.2),
        plan=("default", {}) if is_long else _plan(drawn, sizes),
        thorough=bool(drawn.rand() < 0.1),
        empty=str(drawn.choice(["zero", "mean"], p=[0.6, 0.4])),
    )
    return found._replace(empty="zero") if found.poison else found


def _sizes(drawn: Random) -> tuple[Sizes, int]:
    """Small sizes, lengths of one among them, more than eight heads to a key head at times."""
    batch = BATCHES[drawn.randint(len(BATCHES))]
    T, S = (int(n) for n in drawn.randint(1, 41, 2))
    way = drawn.rand()
    T, S = (T, T) if way < 0.25 else (1, S) if way < 0.3 else (T, 1) if way < 0.33 else (T, S)
    K, G = int(drawn.randint(1, 4)), int(drawn.randint(1, 4))
    if drawn.rand() < 0.06:
        K, G = 1, int(drawn.randint(9, 13))
    return Sizes(batch, K * G, T, S), K


def _long_sizes(drawn: Random) -> tuple[Sizes, int]:
    """Lengths at the edges of the default blocks; at most two heads in all where they are long."""
    T, S = (int(n) for n in drawn.choice(LONG, 2))
    if drawn.rand() < 0.5:
        S = T
    few = T * S > 1024 * 1025
    batch, heads = [((1,), (1, 1)), ((), (2, 1)), ((1,), (2, 2)), ((2,), (1, 1)), ((), (3, 1))][
        drawn.randint(4 if few else 5)
    ]
    return Sizes(batch, heads[0], T, S), heads[1]


def _plan(drawn: Random, sizes: Sizes) -> tuple[str, dict[str, Any]]:
    name = ["default", "loops", "loops", "unrolled", "batched", "gpu"][
        drawn.choice(6, p=[0.15, 0.2, 0.2, 0.2, 0.2, 0.05])
    ]
    rows, cols = (int(drawn.randint(1, n + 2)) for n in (sizes.T, sizes.S))
    if name in ("default", "gpu"):
        return name, {}
    if name == "unrolled":  # at most three by three blocks, for the compiler's sake
        rows, cols = max(rows, sizes.T // 3 + 1), max(cols, sizes.S // 3 + 1)
        return name, {"unrolled": True, "rows": rows, "cols": cols}
    # Short sequences are unrolled on a CPU unless loops are asked for.
    return name, {"unrolled": False, "batched": name == "batched", "rows": rows, "cols": cols}


class Request(NamedTuple):
    """The arrays of one request.

    Attributes:
      floats: what is differentiated: q, k, v, score, and scale and sinks if there are any.
      data: what is not: mask, ints (of the score), key (words of a random key), keep.
      do, dlse: the cotangents of output and lse.
      truth: the same in float64, batch axes as one, for the oracle.
    """

    floats: dict[str, Any]
    data: dict[str, Any]
    do: np.ndarray
    dlse: np.ndarray
    truth: Inputs


def request(given: Program, index: int) -> Request:
    """The arrays of request `index`, from 0."""
    drawn, s = Random([given.seed, index]), given.sizes

    def normal(*shape):
        return np.asarray(drawn.standard_normal(shape)).astype(given.dtype)

    q = (normal(*s.batch, s.T, s.N, given.H) * given.amplitude).astype(given.dtype)
    k, v = (normal(*s.batch, s.S, given.K, width) for width in (given.H, given.h))
    do = normal(*s.batch, s.T, s.N, given.h)
    dlse = drawn.standard_normal((*s.batch, s.T, s.N)).astype(given.wide)
    sinks, scale = normal(s.N), np.asarray(0.2 + drawn.rand()).astype(given.dtype)
    mask = given.mask.draw(Random([given.seed]) if given.fixed else drawn)
    steps, ints = given.score.draw(drawn)
    steps = [[np.asarray(x).astype(given.dtype) for x in step] for step in steps]
    floats = {"q": q, "k": k, "v": v, "score": steps}
    floats |= {"sinks": sinks} if given.sinks else {}
    floats |= {"scale": scale} if given.scale == "traced" else {}
    data, keep = _dropout(given, drawn)
    data |= {"mask": mask, "ints": ints}
    seen = table(given.mask, mask, s)
    truth = _truth(given, floats, ints, seen, keep, do, dlse)
    if given.poison:
        floats |= _poisoned(given, q, k, v, seen, drawn)
    return Request(floats, data, do, dlse, truth)


def _truth(given: Program, floats, ints, seen, keep, do, dlse) -> Inputs:
    def flat(x):
        x = np.asarray(x, np.float64)
        return x.reshape(-1, *x.shape[len(given.sizes.batch) :])

    number = given.H**-0.5 if given.scale is None else given.scale
    return Inputs(
        *(flat(floats[name]) for name in "qkv"),
        seen=seen,
        at=given.sizes.grid(),
        steps=given.score.steps,
        floats=[[x.astype(np.float64) for x in step] for step in floats["score"]],
        ints=ints,
        scale=floats["scale"].astype(np.float64) if given.scale == "traced" else number,
        sinks=floats["sinks"].astype(np.float64) if given.sinks else None,
        keep=keep,
        rate=given.rate,
        empty=given.empty,
        do=flat(do),
        dlse=flat(dlse),
    )


def _dropout(given: Program, drawn: Random) -> tuple[dict[str, Any], np.ndarray | None]:
    """What the dropout is made from, and who survives, B N T S."""
    whole, s = (*given.sizes.batch, *given.sizes[1:]), given.sizes
    if given.dropout == "Dropout":
        key = drawn.randint(0, 2**31, 2).astype(np.uint32)
        return {"key": key}, None if given.rate == 0 else kept(key, given.rate, s)
    if given.dropout == "DropoutMask":
        spread = Random([given.seed, 1, 1]).rand(len(whole)) < 0.8  # one shape a program
        shape = tuple(n if full else 1 for n, full in zip(whole, spread, strict=True))
        keep = drawn.rand(*shape) >= given.rate
        return {"keep": keep}, np.broadcast_to(keep, whole).reshape(-1, *whole[-3:])
    return {}, None


LARGEST = Sizes((6,), 12, 41, 41)  # of the small ones, whose bits are drawn by one program


def kept(key: np.ndarray, rate: float, sizes: Sizes) -> np.ndarray:
    """Who survives flax_attn's own draw, B N T S: that it is right is tested elsewhere."""
    B = int(np.prod(sizes.batch, dtype=int))
    small = all(n <= most for n, most in zip((B, *sizes[1:]), (6, *LARGEST[1:]), strict=True))
    places = [x.astype(np.int32) for x in (LARGEST if small else sizes).grid()]
    with jax.enable_x64(False):
        bits = np.asarray(_bits(key, rate, *places))
    return bits[:B, : sizes.N, : sizes.T, : sizes.S]


@partial(jax.jit, static_argnums=1)
def _bits(key, rate, b, n, q, k):
    return Dropout(rate, jax.random.wrap_key_data(key)).keep(b, n, q, k)


def _poisoned(given: Program, q, k, v, seen: np.ndarray, drawn: Random) -> dict[str, np.ndarray]:
    """q, k and v with NaN and Inf in queries that see nothing and keys that nobody sees."""
    B, N, _, S = seen.shape
    blind = np.swapaxes(~seen.any(3), 1, 2).reshape(*q.shape[:-1], 1)
    hidden = ~seen.any(2).reshape(B, given.K, N // given.K, S).any(2)
    hidden = np.swapaxes(hidden, 1, 2).reshape(*k.shape[:-1], 1)
    bad = np.asarray([np.nan, np.inf, -np.inf], given.dtype)

    def spoilt(x, where):
        return np.where(where, bad[drawn.randint(3, size=x.shape)], x)

    return {"q": spoilt(q, blind), "k": spoilt(k, hidden), "v": spoilt(v, hidden)}
