"""The layer with the fewest options that computes what was measured, as Python that builds it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from ..layers import CrossAttention, GatedQueryAttention, GroupedQueryAttention, T5Attention
from ..masks import CAUSAL, FULL, Causal, Chunked, Prefix, Window
from ..norms import LayerNorm, RMSNorm
from ..positions import (
    Frequencies,
    LinearScaling,
    Llama3Scaling,
    Proportional,
    Rotary,
    Yarn,
    alibi_slopes,
)
from ..rules import Rules
from ..scores import Additive, Alibi, Softcap, T5Bias
from ..weights.rule import Rule
from .carry import rules_for, wanted_of
from .fit_bias import Bias
from .matrices import ROLES, Matrices, Matrix
from .measure import Measured
from .options import (
    Facts,
    fitted_bias,
    gives_bias,
    keywords,
    mask_options,
    rotary_options,
    rules_options,
    side_options,
)
from .roles import Unclear

# What the Python of a proposal is built from.
CLASSES = (
    *(CrossAttention, GatedQueryAttention, GroupedQueryAttention, T5Attention),
    *(LayerNorm, RMSNorm, Rules, Additive, Alibi, Softcap),
    *(Causal, Chunked, Prefix, Window, Rotary, alibi_slopes),
    *(Frequencies, LinearScaling, Llama3Scaling, Proportional, Yarn),
)
NAMES = {x.__name__: x for x in CLASSES} | {"CAUSAL": CAUSAL, "FULL": FULL, "nnx": nnx}
T5_PATHS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}


@dataclass(frozen=True)
class FromCaller:
    """What the caller gives.

    Attributes:
      data: what the text of a layer names.
      call: keywords of the call.
    """

    data: Mapping[str, Any]
    call: Mapping[str, Any]


@dataclass(frozen=True)
class Proposal:
    """A layer that may be it.

    Attributes:
      text: Python that builds it, without `rngs`.
      rules: carry the weights.
      called: what the caller gives in each run that was measured.
    """

    text: str
    rules: tuple[Rule, ...]
    called: tuple[FromCaller, ...]

    def build(self, run: int = 0) -> Any:
        """The layer, with new weights and the bias that the caller gives in a run."""
        code = f"{self.text[:-1]}, rngs=nnx.Rngs(0))"
        return eval(code, {**NAMES, **self.called[run].data})


@dataclass(frozen=True)
class Parts:
    """What a layer is built from.

    Attributes:
      facts: what was measured.
      finder: the parameters.
      matrices: of queries, keys, values and a gate.
      output: of the output projection.
    """

    facts: Facts
    finder: Matrices
    matrices: Mapping[str, Matrix]
    output: Matrix

    @property
    def first(self) -> Measured:
        return self.facts.runs[0]

    @property
    def biased(self) -> str:
        """The letters of the roles with a bias."""
        return "".join(
            role[0] for role, x in self.matrices.items() if x.biases is not None and role != "gate"
        )

    def rules(self, paths: Mapping[str, str] | None = None) -> list[Rule]:
        """Rules that carry the matrices to our projections, or to those of other names."""
        names, heads = paths or {}, self.first.attention.roles.kv_heads
        wanted = []
        for role, matrix in self.matrices.items():
            path = ROLES[role]
            wanted += wanted_of(names.get(path, path), matrix, heads)
        wanted += wanted_of(names.get("o_proj", "o_proj"), self.output, heads, output=True)
        return rules_for(wanted, self.finder.shapes)


def proposals(facts: Facts) -> Iterator[Proposal]:
    """Layers that may be it, those with the fewest options first.

    Raises:
      Unclear: for a step that none of our layers has.
    """
    attention = facts.runs[0].attention
    finder = Matrices(attention, facts.names)
    matrices = {role: finder.of_role(role) for role in ROLES if getattr(attention.heads, role)}
    parts = Parts(facts, finder, matrices, finder.of_output())
    _check(parts)
    bias = fitted_bias(facts)
    if facts.memory is not None:
        yield _cross(parts, bias)
    elif isinstance(bias.score, T5Bias):
        yield _t5(parts, bias.score, bias)
    else:
        yield from _grouped(parts, bias)


def _check(parts: Parts) -> None:
    """Raises Unclear for what no layer of ours has."""
    facts, roles = parts.facts, parts.first.attention.roles
    if roles.value_dim != roles.head_dim:
        raise Unclear(
            f"heads of values have {roles.value_dim} components and those of keys "
            f"{roles.head_dim}, which no layer here has"
        )
    memory = facts.features if facts.memory is None else facts.memory
    for role, matrix in parts.matrices.items():
        width = memory if role in ("key", "value") else facts.features
        for head in getattr(parts.first.attention.heads, role):
            _check_source(parts.first, head.projection.operand, role)
        if {piece.index.shape[1] for piece in matrix.weights} != {width}:
            raise Unclear(f"the {role} is not made from all {width} features of a token")
    if parts.output.weights[0].index.shape[1] != facts.features:
        raise Unclear("an output of another width than the input")


def _check_source(first: Measured, operand: int, role: str) -> None:
    """Raises Unclear if a projection's operand is computed from the inputs."""
    program = first.attention.program
    if program.source(operand) is None:
        node = program.computed(operand)
        inside = f" in {node.path}" if node.path else ""
        raise Unclear(
            f"the {role} is made from the result of {node.name}{inside}, not from the input "
            "itself: identify the attention without what comes before it"
        )


def _grouped(parts: Parts, bias: Bias) -> Iterator[Proposal]:
    first, facts = parts.first, parts.facts
    roles = first.attention.roles
    sizes = (facts.features, roles.heads, roles.kv_heads, roles.head_dim)
    options = {**_biases(parts), **side_options(first), **mask_options(facts, "CAUSAL")}
    options |= {"sinks": "True"} if first.sinks is not None else {}
    options |= _dropout(facts)
    more = rules_options(facts, bias)
    options |= {"rules": f"Rules({keywords(more)})"} if more else {}
    rules = [*parts.rules(), *_norm_rules(first), *_sink_rules(parts)]
    kind = "GatedQueryAttention" if "gate" in parts.matrices else "GroupedQueryAttention"
    for gate in _gates(parts):
        text = _call(kind, sizes, {**rotary_options(facts), **options, **gate})
        yield Proposal(text, tuple(rules), _called(facts))


def _cross(parts: Parts, bias: Bias) -> Proposal:
    first, facts = parts.first, parts.facts
    roles = first.attention.roles
    _refuse(first, bias, "cross attention", norms=True)
    letters, options = parts.biased, {}
    if roles.kv_heads != roles.heads:
        options["num_kv_heads"] = str(roles.kv_heads)
    if roles.heads * roles.head_dim != facts.features:
        options["head_dim"] = str(roles.head_dim)
    if facts.memory != facts.features:
        options["memory_features"] = str(facts.memory)
    if letters not in ("", "qv", "qkv"):
        raise Unclear(f"biases of {letters} alone in cross attention")
    options |= {} if letters else {"use_bias": "False"}
    options |= {"key_bias": "False"} if letters == "qv" else {}
    has_bias = parts.output.biases is not None
    options |= {} if has_bias == bool(letters) else {"out_bias": str(has_bias)}
    sides = side_options(first)
    if len(sides) == 2:
        options["norms"] = f"({sides['q_norm']}, {sides['k_norm']})"
    elif sides:
        raise Unclear("a norm of queries or keys alone in cross attention")
    options |= {**mask_options(facts, "FULL"), **_dropout(facts)}
    rules = [*parts.rules({"o_proj": "out_proj"}), *_norm_rules(first)]
    text = _call("CrossAttention", (facts.features, roles.heads), options)
    return Proposal(text, tuple(rules), _called(facts))


def _t5(parts: Parts, score: T5Bias, bias: Bias) -> Proposal:
    first, facts = parts.first, parts.facts
    roles = first.attention.roles
    _refuse(first, None, "T5's attention", scale=1.0)
    if roles.kv_heads != roles.heads or parts.biased or parts.output.biases is not None:
        raise Unclear("T5's table in an attention with biases, or with shared heads of keys")
    if bias.parameter is None or bias.transposed or bias.rows is not None:
        raise Unclear("a bias by distance that is no table of T5's")
    options = {
        "buckets": "" if score.buckets == 32 else str(score.buckets),
        "max_distance": "" if score.max_distance == 128 else str(score.max_distance),
        "bidirectional": "" if score.bidirectional else "False",
    }
    options = {name: text for name, text in options.items() if text}
    options |= {**mask_options(facts, "FULL"), **_dropout(facts)}
    table = Rule(f"{bias.parameter} -> relative_attention_bias.embedding")
    text = _call("T5Attention", (facts.features, roles.heads, roles.head_dim), options)
    return Proposal(text, (*parts.rules(T5_PATHS), table), _called(facts))


def _refuse(
    first: Measured, bias: Bias | None, what: str, norms: bool = False, scale: float | None = None
) -> None:
    """Raises Unclear for options that only grouped layers have."""
    usual = first.attention.roles.head_dim**-0.5 if scale is None else scale
    sides = [x for x in (first.query, first.key) if x.clip is not None or (x.norm and not norms)]
    more = {
        "a rotation": bool(first.rotation.width),
        "another scale": abs(first.rotation.scale / usual - 1) > 1e-9,
        "a softcap": first.softcap is not None,
        "sinks": first.sinks is not None,
        "a bias of the logits": gives_bias(first) or (bias is not None and bias.score is not None),
        "a norm or a clamp of heads": bool(sides),
        "a gate": bool(first.attention.heads.gate),
    }
    for name, has in more.items():
        if has:
            raise Unclear(f"{what} with {name}")


def _call(kind: str, sizes: tuple[int, ...], options: Mapping[str, str]) -> str:
    arguments = ", ".join([*map(str, sizes), keywords(options)]).removesuffix(", ")
    return f"{kind}({arguments})"


def _dropout(facts: Facts) -> dict[str, str]:
    return {"dropout": repr(facts.dropout)} if facts.dropout else {}


def _biases(parts: Parts) -> dict[str, str]:
    made = {"out_bias": "True"} if parts.output.biases is not None else {}
    letters = parts.biased
    if letters == "qkv":
        return {"qkv_bias": "True", **made}
    return {"qkv_bias": repr(letters), **made} if letters else made


def _called(facts: Facts) -> tuple[FromCaller, ...]:
    """The caller's bias and mask of each run."""
    made = []
    for run in facts.runs:
        data = {"bias": np.nan_to_num(run.called.bias)} if gives_bias(facts.runs[0]) else {}
        visible = run.called.visible
        same = (visible == visible[:, :1]).all()
        masked = any((x.called.visible != x.visible).any() for x in facts.runs)
        call = {"mask": visible[:, :1] if same else visible} if masked else {}
        made.append(FromCaller(data, call))
    return tuple(made)


def _gates(parts: Parts) -> Iterator[dict[str, str]]:
    if "gate" not in parts.matrices:
        yield {}
        return
    gate = parts.matrices["gate"]
    if parts.first.query.clip is not None:
        raise Unclear("a gate and a clamp")
    one = len(gate.weights[0].index) == 1 and parts.first.attention.roles.head_dim > 1
    biased = {"gate_bias": "True"} if gate.biases is not None else {}
    plain = {**({"gate": "'head'"} if one else {}), **biased}
    yield plain
    yield {**plain, "activation": "'softplus'"}


def _norm_rules(first: Measured) -> Iterator[Rule]:
    for name, side in (("q_norm", first.query), ("k_norm", first.key)):
        if side.norm is not None:
            pairs = ((side.norm.gain, "scale"), (side.norm.bias, "bias"))
            yield from (Rule(f"{torch} -> {name}.{part}") for torch, part in pairs if torch)


def _sink_rules(parts: Parts) -> Iterator[Rule]:
    """The parameter that has the values of the sinks."""
    if parts.first.sinks is None:
        return
    wanted = parts.first.sinks[0]
    for name, array in parts.finder.arrays.items():
        values = array.ravel()
        if values.shape == wanted.shape and (np.abs(values - wanted) < 1e-9).all():
            left = " ".join("n" if size > 1 else "1" for size in array.shape)
            yield Rule(f"{name} -> sinks", None if left == "n" else f"{left} -> n")
            return
    raise Unclear("sinks that are no parameter")
