"""Python for the options of a layer, from what was measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..positions import Frequencies, Rotary, Yarn, alibi_slopes
from ..scores import Alibi
from .fit_bias import Bias, fit_bias
from .fit_mask import fit_mask, mask_text
from .measure import Measured
from .name_rotary import name_rotary, rotary_text
from .norms import Side, parameter
from .roles import Unclear
from .rotation import Rotation

# Of a number measured in float64.
CLOSE = 1e-9
# Of rates computed in float32.
FLOAT32 = 1e-6
# By the axes of batch, tokens and features in the module's input: how the layer is called.
AXES = {
    (1, 0, 2): "the module takes `T B D`: layer(x.swapaxes(0, 1)).swapaxes(0, 1)",
    (0, 2, 1): "the module takes `B D T`: layer(x.swapaxes(1, 2)).swapaxes(1, 2)",
}


@dataclass(frozen=True)
class Facts:
    """What several runs say.

    Attributes:
      runs: at one length, and at a longer one if the module takes it.
      dropout: the rate of dropout on the weights.
      numbers: numbers in the module's attributes.
      names: its parameters.
      features: width of a token.
      memory: width of a token of the memory; None without one.
      order: axes of batch, tokens and features in the module's input.
    """

    runs: Sequence[Measured]
    dropout: float
    numbers: Sequence[float]
    names: Sequence[str]
    features: int
    memory: int | None = None
    order: tuple[int, int, int] = (0, 1, 2)

    def lines(self) -> Iterator[str]:
        """What was measured, a line each."""
        first = self.runs[0]
        roles = first.attention.roles
        yield (
            f"{roles.heads} query heads and {roles.kv_heads} key heads of {roles.head_dim}, "
            f"logits times {first.rotation.scale:.6g}"
        )
        for role, names in roles.parameters.items():
            if names:
                yield f"{role} from {', '.join(names)}"
        yield f"mask of its own: {_mask_name([run.visible for run in self.runs]) or 'unknown'}"
        if (first.called.visible != first.visible).any():
            yield f"a mask is given by the caller{self._named_mask()}"
        if gives_bias(first):
            yield f"a bias of the logits is given by the caller{self._named_bias()}"
        if self.order in AXES:
            yield AXES[self.order]

    def _named_mask(self) -> str:
        """The name of the caller's mask, if it has one, and how the layer gets it."""
        tables = [run.called.visible for run in self.runs]
        name = _mask_name(tables) or _mask_name(tables[:1])
        if name:
            return f": build the layer with mask={name}, or call layer(x, mask={name})"
        return ": call layer(x, mask=Dense(m)) with m True where a query may attend, `B N T S`"

    def _named_bias(self) -> str:
        """The name of the caller's bias, if it has one."""
        called = [run.called for run in self.runs]
        if any(np.abs(np.nan_to_num(x.bias - x.bias[:1])).max() > CLOSE for x in called):
            return ""
        bias = fit_bias([x.bias[0] for x in called], [x.visible[0] for x in called], {})
        return f": {_score_text(bias)}" if bias is not None and bias.kind == "alibi" else ""


def _mask_name(tables: Sequence[np.ndarray]) -> str:
    """What all rows and heads of these tables see, by name; "" if it has none."""
    if any((x != x[:1, :1]).any() for x in tables):
        return ""
    mask = fit_mask([x[0, 0] for x in tables])
    return "" if mask is None else mask_text(mask)


def keywords(options: Mapping[str, str]) -> str:
    """Keyword arguments."""
    return ", ".join(f"{name}={text}" for name, text in options.items())


def gives_bias(first: Measured) -> bool:
    """Whether the caller adds something to the logits."""
    shown = first.visible & first.called.visible
    return bool((np.abs(first.called.bias - first.bias)[shown] > CLOSE).any())


def side_options(first: Measured) -> dict[str, str]:
    """Norms and clamp of queries and keys."""
    made = {}
    for name, side in (("q_norm", first.query), ("k_norm", first.key)):
        if side.norm is not None:
            made[name] = _norm_text(side, first)
    if first.query.clip != first.key.clip:
        raise Unclear("queries and keys are clamped to different bounds")
    if first.query.clip is not None:
        made["clip_qkv"] = _number(first.query.clip)
    return made


def _norm_text(side: Side, first: Measured) -> str:
    norm, width = side.norm, first.attention.roles.head_dim
    assert norm is not None
    features = str(width * side.count if norm.over_heads else width)
    options = {"eps": _number(norm.eps)}
    if norm.kind == "layer":
        if norm.over_heads or norm.plus_one:
            raise Unclear("a LayerNorm over all heads together, or with a gain added to one")
        options |= {"use_bias": "True"} if norm.bias is not None else {}
        if side.gain_size > width:
            features = f"({side.count}, {width})"
        return f"LayerNorm({features if norm.gain else None}, {keywords(options)})"
    if side.gain_size > width and not norm.over_heads:
        raise Unclear("an RMS norm of each head with a gain for each head")
    options |= {"plus_one": "True"} if norm.plus_one else {}
    options |= {"over_heads": "True"} if norm.over_heads else {}
    return f"RMSNorm({features if norm.gain else None}, {keywords(options)})"


def mask_options(facts: Facts, usual: str) -> dict[str, str]:
    """The mask that all rows and heads have, unless it is the layer's usual one."""
    tables = []
    for run in facts.runs:
        if (run.visible != run.visible[:1, :1]).any():
            raise Unclear("rows or heads attend to different keys")
        tables.append(run.visible[0, 0])
    mask = fit_mask(tables)
    if mask is None:
        raise Unclear("a mask that is none of flax_attn.masks")
    text = mask_text(mask)
    return {} if text == usual else {"mask": text}


def rules_options(facts: Facts, bias: Bias) -> dict[str, str]:
    """Keywords of `Rules`: score and scale."""
    first = facts.runs[0]
    parts = [] if bias.score is None else [_score_text(bias)]
    parts += ["Additive(bias)"] if gives_bias(first) else []
    softcap = [] if first.softcap is None else [f"Softcap({_number(first.softcap)})"]
    parts = [*parts, *softcap] if first.capped_bias else [*softcap, *parts]
    made = {"score": " >> ".join(parts)} if parts else {}
    scale = first.rotation.scale
    usual = first.attention.roles.head_dim**-0.5
    rotary = _rotary(facts) if first.rotation.width else None
    if rotary is not None and isinstance(rotary.scaling, Yarn):
        usual *= _stretch(first) ** 2 if rotary.scaling.magnitude != 1 else 1.0
    if abs(scale / usual - 1) > CLOSE:
        made["scale"] = _scale_text(scale, first.attention.roles.head_dim)
    return made


def fitted_bias(facts: Facts) -> Bias:
    """What the module itself adds to the logits."""
    tables, visible = [], []
    attention = facts.runs[0].attention
    shared = [name for name in attention.path["query"] if name in facts.names]
    parameters = {name: parameter(attention, name) for name in shared}
    for run in facts.runs:
        same = np.nan_to_num(run.bias)
        if np.abs(same - same[:1]).max() > CLOSE * max(1.0, float(np.abs(same).max())):
            raise Unclear("rows of the batch have different biases")
        tables.append(run.bias[0])
        visible.append(run.visible[0])
    bias = fit_bias(tables, visible, parameters)
    if bias is None:
        raise Unclear("a bias of the logits that is none of flax_attn.scores")
    return bias


def _score_text(bias: Bias) -> str:
    if isinstance(bias.score, Alibi):
        slopes = bias.score.slopes
        usual = alibi_slopes(len(slopes))
        same = np.array_equal(np.asarray(slopes), usual)
        values = (
            f"alibi_slopes({len(slopes)})"
            if same
            else f"[{', '.join(_number(float(x)) for x in slopes)}]"
        )
        return f"Alibi({values})"
    raise Unclear(f"a bias of the kind {bias.kind}, which is no option of a grouped layer")


def _scale_text(scale: float, head_dim: int) -> str:
    """A scale as it may have been written: of few digits, a root, or a quotient."""
    if abs(float(f"{scale:.4g}") / scale - 1) < CLOSE:
        return repr(float(f"{scale:.4g}"))
    root = round(scale**-2)
    if root > 1 and abs(scale * root**0.5 - 1) < CLOSE:
        return f"{root}**-0.5"
    for divisor in (head_dim, head_dim**0.5):
        factor = float(f"{scale * divisor:.4g}")
        if abs(factor / divisor / scale - 1) < CLOSE:
            return f"{factor!r} / {head_dim}" + ("" if divisor == head_dim else "**0.5")
    return repr(scale)


def _number(x: float) -> str:
    """A measured number, of few digits if that is what it is."""
    short = float(f"{x:.6g}")
    return repr(short if abs(short - x) <= CLOSE * abs(x) else float(x))


def rotary_options(facts: Facts) -> dict[str, str]:
    """The rotation, and whether norms come after it."""
    first = facts.runs[0]
    if not first.rotation.width:
        return {}
    after = {"norm_after_rotary": "True"} if first.after_rotary else {}
    return {"rotary": rotary_text(_rotary(facts)), **after}


def _rotary(facts: Facts) -> Rotary:
    """The rotation's name; of one that stretches all components, the scale is the usual one."""
    first = facts.runs[0]
    names = _names(first.rotation, facts)
    if isinstance(names[0].scaling, Yarn) and _stretch(first) != 1.0:
        stretched = replace(first.rotation, magnitude=_stretch(first))
        yarn = _names(stretched, facts)[0]
        return yarn if isinstance(yarn.scaling, Yarn) else names[0]
    return names[0]


def _names(rotation: Rotation, facts: Facts) -> list[Rotary]:
    """The rotation's names, by rates that were computed in float64, or else in float32."""
    head_dim = facts.runs[0].attention.roles.head_dim
    names = name_rotary(rotation, head_dim, facts.numbers)
    if isinstance(names[0].scaling, Frequencies):
        names = name_rotary(rotation, head_dim, facts.numbers, FLOAT32)
    return names


def _stretch(first: Measured) -> float:
    """The factor of cos and sin if it, and not the scale, is what is unusual."""
    rotation, head_dim = first.rotation, first.attention.roles.head_dim
    if rotation.width < head_dim:
        return 1.0
    stretch = (rotation.scale * head_dim**0.5) ** 0.5
    return 1.0 if abs(stretch - 1) < CLOSE else stretch
