"""What an attention written by hand may be: its sizes by its weights, and a grid of options."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, islice, product
from math import isfinite, prod
from numbers import Integral, Real
from typing import Any

import numpy as np

from .. import masks, norms, positions, rules, scores
from ..errors import ParityError
from ..layers.cross import CrossAttention
from ..layers.grouped_query import GroupedQueryAttention
from ..parity.port import plan, suggest
from ..weights.described import Source
from ..weights.rule import Rule
from .call import BATCH_FIRST, TOKENS_FIRST, Call
from .candidate import Candidate, Drawn

GRID = 48  # options that are tried
MOST_HEADS = 32  # that are tried where no number of the module says how many there are
BASES = (10_000.0, 500_000.0, 1_000_000.0)
LAYERS = (CrossAttention, GroupedQueryAttention, norms.LayerNorm, norms.RMSNorm)
OPTIONS = (masks.Window, positions.Rotary, rules.Rules, scores.Alibi, scores.Softcap)
NAMES = {x.__name__: x for x in (*LAYERS, *OPTIONS)} | {"CAUSAL": masks.CAUSAL, "FULL": masks.FULL}
BIASED = ("", "qkv", "qv", "kv", "q", "k", "v")  # projections that may have a bias


@dataclass(frozen=True)
class Weights:
    """The parameters of a module by what they look like, and the numbers in its attributes."""

    sources: list[Source]
    norms: dict[str, Any]
    numbers: list[tuple[str, float]]
    dropout: str

    @classmethod
    def of(cls, drawn: Drawn) -> "Weights":
        owners = dict(drawn.module.named_modules())
        sources = [s for s in drawn.sources if s.kind != "buffer" and not s.same_as]
        paths = dict.fromkeys(s.name.rpartition(".")[0] for s in sources)
        kinds = {path: type(owners[path]).__name__.lower() for path in paths if path}
        is_norm = [path for path, kind in kinds.items() if "norm" in kind or "norm" in path]
        rest = [s for s in sources if s.name.rpartition(".")[0] not in is_norm]
        numbers = [*_numbers(drawn.module)]
        rates = [*_rates(owners, numbers)]
        dropout = f", dropout={rates[0]!r}" if rates and rates[0] else ""
        return cls(rest, {path: owners[path] for path in is_norm}, numbers, dropout)

    def named(self, *words: str) -> list[float]:
        """Numbers whose names have one of these words."""
        return [*dict.fromkeys(x for name, x in self.numbers if any(w in name for w in words))]

    def sizes(self, width: int, memory: int) -> Iterator[tuple[int, int, int, int, bool]]:
        """Heads, those of keys, their width, elements of all biases, and whether it has sinks."""
        sinks = [s for s in self.sources if "sink" in s.name.lower()]
        left = [s for s in self.sources if s not in sinks]
        matrices = [s for s in left if len(s.shape) > 1 and {width, memory} & {*s.shape}]
        total, every = (sum(prod(s.shape) for s in some) for some in (matrices, left))
        numbers = [*self.named("head"), *self.named("")]
        counts = [int(x) for x in numbers if x > 0 and x == int(x)]
        counts += [size for s in matrices if len(s.shape) > 2 for size in s.shape]
        counts = [*dict.fromkeys(counts)] or [*range(1, MOST_HEADS + 1)]
        groups = [int(x) for x in self.named("kv", "group") if x > 0 and x == int(x)]
        for heads, k in product(counts, dict.fromkeys([*groups, *counts, 1])):
            each = 2 * (heads * width + k * memory)
            if total and heads % k == 0 and total % each == 0:
                yield heads, k, total // each, every - total, bool(sinks)


def by_hand(drawn: Drawn, call: Call) -> Iterator[Candidate]:
    """Grouped-query or cross attention whose sizes and options the module may have."""
    call = call.at(call.length, 0, None)  # of random tokens: those of the caller may be all equal
    call = replace(call, order=_order(drawn, call))
    masks = [None, *range(len([*call.masks()]))]
    made = (
        replace(base, mask=mask, is_one_of_few=False)
        for base in _grid(drawn, call)
        for mask in masks
        if mask is None or "CAUSAL" not in base.text  # which the caller's mask would replace
    )
    yield from islice(made, GRID)


def _grid(drawn: Drawn, call: Call) -> Iterator[Candidate]:
    weights = Weights.of(drawn)
    for head_dim, text in _layers(weights, call):
        is_cross = text.startswith("Cross")
        options = [""] if is_cross else _options(weights, drawn, call, head_dim)
        for more, each in product(options, [*_rules(drawn, Candidate(f"{text})", NAMES))]):
            yield Candidate(f"{text}{more})", NAMES, each, order=call.order)


def _order(drawn: Drawn, call: Call) -> tuple[int, int, int]:
    """The order of axes, by whether outputs depend on tokens of another index of the first axis."""
    first, *others = call.inputs
    if first.ndim == 2 or call.batch == 1:
        return BATCH_FIRST
    changed = call.with_tokens(np.concatenate([2 * first[:1], first[1:]]), *others)
    same = np.array_equal(drawn.output(call)[1:], drawn.output(changed)[1:])
    return BATCH_FIRST if same else TOKENS_FIRST


def _is_causal(drawn: Drawn, call: Call) -> bool:
    """Whether the first token's output is of the first token alone."""
    first, *others = call.inputs
    later = np.arange(call.length).reshape([-1 if i == call.axis else 1 for i in range(first.ndim)])
    changed = call.with_tokens(np.where(later > 0, 2 * first, first), *others)
    before, after = (drawn.output(x).take(0, call.axis) for x in (call, changed))
    return np.array_equal(before, after)


def _numbers(module: Any) -> Iterator[tuple[str, float]]:
    """Numbers in the attributes of a module, its parts and its configs, with their names."""
    left = [(vars(part), 0) for part in module.modules()]
    for items, depth in left:
        for name, value in items.items():
            if isinstance(value, Real) and not isinstance(value, bool):  # numpy's too
                if isfinite(value):
                    yield name.lower(), int(value) if isinstance(value, Integral) else float(value)
            elif depth < 2 and not name.startswith("_") and not hasattr(value, "forward"):
                inner = value if isinstance(value, dict) else getattr(value, "__dict__", {})
                left.append(({str(key): x for key, x in inner.items()}, depth + 1))


def _rates(owners: dict[str, Any], numbers: list[tuple[str, float]]) -> Iterator[float]:
    """Rates of dropout, that of the attention weights first, by its name."""
    layers = {path.lower(): x for path, x in owners.items() if "Dropout" in type(x).__name__}
    is_late = ("resid", "proj", "out", "hidden")
    yield from (x.p for path, x in layers.items() if "att" in path)
    yield from (x for name, x in numbers if "att" in name and "drop" in name)
    yield from (x.p for path, x in layers.items() if not any(word in path for word in is_late))
    yield from (x for name, x in numbers if name in ("dropout", "dropout_p"))


# The layer, and how the weights are carried.


def _layers(weights: Weights, call: Call) -> Iterator[tuple[int, str]]:
    """The width of a head, and the start of Python that builds a layer with it."""
    width, memory = call.inputs[0].shape[-1], call.inputs[-1].shape[-1]
    for heads, groups, head_dim, biases, sinks in weights.sizes(width, memory):
        sizes = {"q": heads * head_dim, "k": groups * head_dim, "v": groups * head_dim}
        if len(call.groups) > 1:
            is_usual = groups == heads and heads * head_dim == width
            inner = "" if is_usual else f", num_kv_heads={groups}, head_dim={head_dim}"
            inner += "" if memory == width else f", memory_features={memory}"
            for qkv, out in product((True, False), (True, False)):
                if biases == sum(sizes.values()) * qkv + width * out:
                    more = f"{inner}, use_bias={qkv}, out_bias={out}{weights.dropout}"
                    yield head_dim, f"CrossAttention({width}, {heads}{more}"
            continue
        normed = "".join(_normed(weights, head_dim)) + ", sinks=True" * sinks + weights.dropout
        for qkv, out in product(BIASED, (False, True)):
            if biases == sum(sizes[x] for x in qkv) + width * out:
                biased = {"": "", "qkv": ", qkv_bias=True"}.get(qkv, f", qkv_bias={qkv!r}")
                biased += ", out_bias=True" * out
                start = f"GroupedQueryAttention({width}, {heads}, {groups}, {head_dim}"
                yield head_dim, f"{start}{biased}{normed}"


def _normed(weights: Weights, head_dim: int) -> Iterator[str]:
    """Norms of queries and keys, and of what goes into the output."""
    paths = [*weights.norms]
    for name, letter, place in (("q_norm", "q", 0), ("k_norm", "k", 1)):
        named = [x for x in paths if letter in x.rpartition(".")[2].lower().replace("norm", "")]
        path = named[0] if named else paths[place] if len(paths) == 2 else None
        if path is not None:
            yield f", {name}={_norm(weights.norms[path], head_dim)}"


def _norm(module: Any, head_dim: int) -> str:
    """Python that builds a norm."""
    names = ("eps", "variance_epsilon", "epsilon")
    values = [x for name in names if (x := getattr(module, name, None)) is not None]
    eps = values[0] if values else float(np.finfo(np.float64).eps)  # torch's None, in float64
    tensors = dict(module.named_parameters())
    shape = next((tuple(x.shape) for x in tensors.values()), (head_dim,))
    biased = ("LayerNorm" in type(module).__name__ and "bias" in tensors) or len(tensors) == 2
    size = shape[0] if len(shape) == 1 else shape
    if biased or "LayerNorm" in type(module).__name__:
        return f"LayerNorm({size}, eps={eps}{', use_bias=True' * biased})"
    return f"RMSNorm({size}, eps={eps}{', over_heads=True' * (prod(shape) > head_dim)})"


def _rules(drawn: Drawn, candidate: Candidate) -> Iterator[tuple[Rule, ...]]:
    """Rules that carry all weights; a fused one in either order of its parts."""
    try:
        layer = candidate.build()
        rules = suggest(drawn.module, layer)
    except (ParityError, ValueError):  # sizes of no layer
        return
    same = [[*rules] for _, rules in groupby(rules, lambda rule: rule.names)]
    for i in range(max(map(len, same), default=1)):  # one order for fused weights and their biases
        each = tuple(rules[min(i, len(rules) - 1)] for rules in same)
        try:
            plan(drawn.module, layer, each)
        except ParityError:
            continue
        yield each


# The options.


def _options(weights: Weights, drawn: Drawn, call: Call, head_dim: int) -> Iterator[str]:
    """Options of the layer as Python, likely ones first."""
    orders = ["", ", norm_after_rotary=True"] if weights.norms else [""]
    rotaries, masks_of = (
        [*_rotaries(weights, drawn, call, head_dim)],
        [*_masks(weights, drawn, call)],
    )
    scores_of = _scores(weights, call, head_dim)
    for score, rotary, mask, order in product(scores_of, rotaries, masks_of, orders):
        if (rotary or not order) and not (rotary and "Alibi" in score):
            yield f"{rotary}{order}{mask}{score}"


def _masks(weights: Weights, drawn: Drawn, call: Call) -> Iterator[str]:
    """Masks of the layer's own; the caller's may stand for either."""
    if [*call.masks()]:
        yield from (", mask=CAUSAL", ", mask=FULL")
        return
    is_causal = _is_causal(drawn, call)
    for back in (int(size) - 1 for size in weights.named("window", "local", "span") if size > 1):
        yield f", mask={f'CAUSAL & Window({back}, 0)' if is_causal else f'Window({back}, {back})'}"
    yield f", mask={'CAUSAL' if is_causal else 'FULL'}"


def _scores(weights: Weights, call: Call, head_dim: int) -> Iterator[str]:
    """Scales and changes of the logits."""
    slopes = [f"score=Alibi({[*map(float, x)]})" for x in call.slopes()]
    caps = [f"score=Softcap({x!r})" for x in weights.named("cap") if x > 0]
    scales = [x for x in weights.named("scal") if x > 0 and abs(x * head_dim**0.5 - 1) > 1e-6]
    for score, scale in product([*slopes, *caps, ""], [*scales, None, 1.0]):
        inner = ", ".join(filter(None, (score, f"scale={scale!r}" if scale is not None else "")))
        yield f", rules=Rules({inner})" if inner else ""


def _rotaries(weights: Weights, drawn: Drawn, call: Call, head_dim: int) -> Iterator[str]:
    """None, and rotations by usual bases or by those of a table, of all components or some."""
    tables = [*_tables(drawn, call)]
    bases = [float(x) for x in weights.named("base", "theta") if x > 1] or BASES
    widths = [w for w in (head_dim, head_dim // 2, head_dim // 4) if w and w % 2 == 0]
    made = [*product(tables or product(bases, widths), ("half", "interleaved"))]
    texts = [
        f", rotary=Rotary({base!r}"
        + f", layout={layout!r}" * (layout != "half")
        + f", width={width})" * (width != head_dim)
        + ")" * (width == head_dim)
        for (base, width), layout in made
    ]
    yield from [*texts, ""] if tables else ["", *texts]


def _tables(drawn: Drawn, call: Call) -> Iterator[tuple[float, int]]:
    """Bases and widths of rates that the module has in a buffer, or the call in its tables."""
    buffers = (x for _, x in drawn.module.named_buffers() if x.ndim == 1 and x.is_floating_point())
    for rates in [*(x.numpy() for x in buffers), *call.rates()]:
        if len(rates) > 1 and rates[0] == 1 and (np.diff(rates) < 0).all() and rates[-1] > 0:
            exact = rates[-1] ** (-len(rates) / (len(rates) - 1))
            yield float(f"{exact:.6g}"), 2 * len(rates)
