"""Which torch tensor goes where in Flax: by type and name, never by shape, and strict."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np
from flax import nnx

from .errors import ParityError
from .rule import Rule, axis_sizes, backwards, lay_out
from .source import Source

# Torch's type and name of a value -> where it lies in the Flax module of that type, and how.
_LINEAR: dict[str, tuple[str, str | None]] = {
    "weight": ("kernel", "o i -> i o"),
    "bias": ("bias", None),
}
_NORM: dict[str, tuple[str, str | None]] = {"weight": ("scale", None), "bias": ("bias", None)}
PAIRS: dict[str, tuple[type, dict[str, tuple[str, str | None]]]] = {
    "Linear": (nnx.Linear, _LINEAR),
    "Embedding": (nnx.Embed, {"weight": ("embedding", None)}),
    "LayerNorm": (nnx.LayerNorm, _NORM),
    "RMSNorm": (nnx.RMSNorm, {"weight": ("scale", None)}),
}
# Packed or separate projections of nn.MultiheadAttention -> three Linear layers.
_QKV = ("q_proj", "k_proj", "v_proj")
ATTENTION: dict[str, tuple[tuple[str, ...], str | None]] = {
    "in_proj_weight": (tuple(f"{p}.kernel" for p in _QKV), "(n o) i -> n i o"),
    "in_proj_bias": (tuple(f"{p}.bias" for p in _QKV), "(n o) -> n o"),
    **{f"{p}_weight": ((f"{p}.kernel",), "o i -> i o") for p in _QKV},
}


@dataclass(frozen=True)
class Move:
    """Some torch tensors, some Flax Params, and the layout between them (None: as it is)."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    layout: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)

    def forward(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Flax's arrays from torch's."""
        return self._carry(values, self.sources, self.targets, self.layout)

    def back(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Torch's arrays from Flax's."""
        layout = None if self.layout is None else backwards(self.layout)
        return self._carry(values, self.targets, self.sources, layout)

    def _carry(self, values, here, there, layout):
        arrays = [values[name] for name in here]
        laid = arrays if layout is None else lay_out(arrays, layout, len(there), self.sizes)
        return dict(zip(there, laid, strict=True))


@dataclass(frozen=True)
class Plan:
    """The whole mapping of a torch module onto a Flax module.

    Attributes:
      moves: what is carried.
      constants: buffers that Flax computes where it needs them, not carried.
      skipped: tensors left out by `Rule.skip`.
      tied: torch's second names of tensors that are carried once.
    """

    moves: tuple[Move, ...]
    constants: tuple[str, ...]
    skipped: tuple[str, ...]
    tied: tuple[str, ...]

    def forward(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Flax's arrays by path, from torch's by name."""
        return {k: v for move in self.moves for k, v in move.forward(values).items()}

    def back(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Torch's arrays by name, from Flax's by path."""
        return {k: v for move in self.moves for k, v in move.back(values).items()}

    def __str__(self) -> str:
        lines = [
            f"{', '.join(m.sources)} -> {', '.join(m.targets)}"
            + (f"  {m.layout}" if m.layout else "")
            for m in self.moves
        ]
        lines += [f"{name}: constant, not carried" for name in self.constants]
        lines += [f"{name}: skipped by rule" for name in self.skipped]
        return "\n".join(lines + [f"{name}: tied, carried once" for name in self.tied])


def make_plan(sources: Sequence[Source], module: nnx.Module, rules: Sequence[Rule] = ()) -> Plan:
    """The mapping of described torch tensors onto a Flax module.

    Raises:
      ParityError: with every problem at once: tensors without a place, Params that nothing fills or
        that are filled twice, shapes that differ, rules that match nothing, ties on one side only.
    """
    return _Planner(sources, module, rules).plan()


class _Planner:
    def __init__(self, sources: Sequence[Source], module: nnx.Module, rules: Sequence[Rule]):
        self.sources = {source.name: source for source in sources}
        self.module, self.rules = module, rules
        self.params = flax_params(module)
        self.problems: list[str] = []
        self.moves: list[Move] = []
        self.done: set[str] = set()
        self.skipped: list[str] = []
        self.tied: list[str] = []

    def plan(self) -> Plan:
        for rule in self.rules:
            self._apply(rule)
        for name, source in self.sources.items():
            if name not in self.done and source.kind != "buffer":
                self._move_by_type(name, name)
        constants = tuple(
            n for n, s in self.sources.items() if s.kind == "buffer" and n not in self.done
        )
        self._check_filled()
        self.moves = self._without_ties()
        if self.problems:
            text = "\n".join(f"  - {problem}" for problem in self.problems)
            raise ParityError(f"The torch module does not fit the Flax module:\n{text}")
        return Plan(tuple(self.moves), constants, tuple(self.skipped), tuple(self.tied))

    def _apply(self, rule: Rule) -> None:
        names = [name for name in self.sources if name not in self.done]
        if rule.kind == "tied":
            return self._tie(rule)
        groups = rule.groups(names)
        if not groups:
            self.problems.append(f"{rule} matches no tensor left of torch's: {_some(names)}.")
        for here, there in groups:
            missing = [name for name in here if name not in self.sources]
            if missing:
                self.problems.append(
                    f"{rule} asks for {_some(missing)}, which torch does not have."
                )
                continue
            self.done.update(here)
            if rule.kind == "skip":
                self.skipped += here
            elif rule.layout is None:
                self._move_by_type(here[0], there[0])
            else:
                self._move(Move(here, there, rule.layout, dict(rule.sizes)))

    def _tie(self, rule: Rule) -> None:
        second, first = rule.sides
        one, two = self.sources.get(second), self.sources.get(first)
        if one is None or two is None or (one.same_as or one.name) != (two.same_as or two.name):
            self.problems.append(f"{rule}: these are not one tensor in torch.")
            return
        self.done.add(second)
        self.tied.append(second)

    def _move_by_type(self, name: str, there: str) -> None:
        """Moves one tensor whose torch name was changed to `there`, by the type that holds it."""
        self.done.add(name)
        kind = self.sources[name].kind
        owner, _, role = there.rpartition(".")
        dot = f"{owner}." if owner else ""
        if there in self.params:
            layout = None
            for cls, roles in PAIRS.values():
                if kind in PAIRS and PAIRS[kind][0] is cls and isinstance(self._at(owner), cls):
                    layout = {target: how for target, how in roles.values()}.get(role)
            return self._move(Move((name,), (there,), layout))
        if kind == "MultiheadAttention" and role in ATTENTION:
            targets, layout = ATTENTION[role]
            return self._move(Move((name,), tuple(dot + t for t in targets), layout))
        if kind in PAIRS and role in PAIRS[kind][1]:
            cls, roles = PAIRS[kind]
            target, layout = roles[role]
            held = self._at(owner)
            if held is None or isinstance(held, cls):
                return self._move(Move((name,), (dot + target,), layout))
            self.problems.append(
                f"{name} of a {kind} meets {owner or 'the module'}, {_a(held)}, where {_a(cls)} "
                f'would be known: say Rule("{name} -> ...", "layout").'
            )
            return None
        return self._move(Move((name,), (there,), None))

    def _move(self, move: Move) -> None:
        absent = [path for path in move.targets if path not in self.params]
        if absent:
            near = get_close_matches(absent[0], self.params, 3, 0.3) or list(self.params)[:3]
            shape = list(self.sources[move.sources[0]].shape)
            self.problems.append(
                f"{', '.join(move.sources)} {shape} goes to {_some(absent)}, which Flax does not "
                f"have; nearest: {_some(near)}."
            )
            return
        shapes = [self.sources[name].shape for name in move.sources]
        whole = shapes[0] if len(shapes) == 1 else (len(shapes), *shapes[0])
        sizes = dict(move.sizes)
        try:
            if move.layout is not None:
                sizes = axis_sizes(move.layout, whole, len(move.targets), sizes)
            moved = Move(move.sources, move.targets, move.layout, sizes)
            got = moved.forward({n: np.empty(s) for n, s in zip(move.sources, shapes, strict=True)})
        except ValueError as error:
            self.problems.append(f"{', '.join(move.sources)}: {error}.")
            return
        for path, value in got.items():
            want = self.params[path].get_value().shape
            if value.shape != want:
                self.problems.append(
                    f"{', '.join(move.sources)} {[list(s) for s in shapes]} would fill {path} as "
                    f"{list(value.shape)}, but it is {list(want)}."
                )
        self.moves.append(moved)

    def _check_filled(self) -> None:
        """Every Param filled by one tensor, every tensor in one Param: ties agree on both sides."""
        fillers: dict[int, dict[tuple[str, ...], str]] = {}
        places: dict[tuple[str, ...], dict[tuple[int, ...], str]] = {}
        for move in self.moves:
            roots = tuple(self.sources[name].same_as or name for name in move.sources)
            ids = tuple(id(self.params[path]) for path in move.targets)
            places.setdefault(roots, {})[ids] = ", ".join(move.targets)
            for path, param in zip(move.targets, ids, strict=True):
                fillers.setdefault(param, {})[roots] = path
        for filled in fillers.values():
            if len(filled) > 1:
                by = " and by ".join(", ".join(roots) for roots in filled)
                self.problems.append(f"{next(iter(filled.values()))} is filled twice: by {by}.")
        for roots, held in places.items():
            if len(held) > 1:
                self.problems.append(
                    f"{', '.join(roots)} is tied in torch, but {' and '.join(held.values())} are "
                    'Params apart: tie them, or say Rule.tied("second -> first") or Rule.skip.'
                )
        for path, param in self.params.items():
            if id(param) not in fillers:
                near = get_close_matches(path, self.sources, 3, 0.3) or list(self.sources)[:3]
                self.problems.append(
                    f"{path} {list(param.get_value().shape)} is filled by nothing; "
                    f"nearest in torch: {_some(near)}."
                )

    def _without_ties(self) -> list[Move]:
        """The moves, without those that carry a tied tensor a second time."""
        for move in self.moves:
            self.tied += [name for name in move.sources if self.sources[name].same_as]
        return [m for m in self.moves if not any(self.sources[n].same_as for n in m.sources)]

    def _at(self, path: str) -> Any:
        held: Any = self.module
        for piece in path.split(".") if path else ():
            held = held[int(piece)] if piece.isdigit() else getattr(held, piece, None)
        return held


def flax_params(module: nnx.Module) -> dict[str, nnx.Param]:
    """Every `nnx.Param` by dotted path; a shared one under each of its paths."""
    found: dict[str, nnx.Param] = {}

    def walk(node: Any, path: tuple[str, ...], above: tuple[int, ...]) -> None:
        if isinstance(node, nnx.Param):
            found[".".join(path)] = node
        elif isinstance(node, nnx.Variable) or id(node) in above:
            return
        elif isinstance(node, nnx.Module):
            for name, child in sorted(vars(node).items()):
                walk(child, (*path, name), (*above, id(node)))
        elif isinstance(node, list | tuple):
            for i, child in enumerate(node):
                walk(child, (*path, str(i)), above)
        elif isinstance(node, dict):
            for name, child in node.items():
                walk(child, (*path, str(name)), above)

    walk(module, (), ())
    return found


def _some(names: Any) -> str:
    names = list(names)
    return (
        ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") or "none"
    )


def _a(thing: Any) -> str:
    name = thing.__name__ if isinstance(thing, type) else type(thing).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
