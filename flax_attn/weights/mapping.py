"""Maps torch tensors to Flax Params strictly by type and name, never by shape."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import pairwise
from typing import Any

from flax import nnx

from .._internal.nearest import listed
from ..taps import POINTS
from .described import Source
from .einops_layout import sizes_of
from .known_layers import (
    LAYERS,
    NORMS,
    PAIRS,
    a,
    becomes,
    cell_of,
    flax_path,
    flax_state,
    get_path,
    may_keep,
    no_groups,
    place,
    refusal,
    unstacked,
)
from .move import Misfit, Move, Stack
from .rule import Rule


class Draft:
    """An attempted mapping, with its problems.

    With `partial`, Params may stay unfilled, and rules may match no tensor.

    Attributes:
      moves, constants, skipped, tied: contents of the plan, if there are no problems.
      problems: sentences.
      unplaced: names of torch tensors without a target.
      unfilled: paths of Flax's Params and statistics that no tensor fills.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        module: nnx.Module,
        rules: Sequence[Rule] = (),
        suggests: bool = True,
        parts: Sequence[str] | None = None,
        partial: bool = False,
    ):
        self.sources = {source.name: source for source in sources}
        self.module, self.rules, self.suggests = module, tuple(rules), suggests
        self.partial = partial
        self.parts = parts
        self.state = flax_state(module)
        self.problems: list[str] = []
        self.unplaced: list[str] = []
        self.misfits: list[int] = []
        self.moves: list[Move | Stack] = []
        self.stacks: dict[tuple[str, ...], dict[int, Move]] = {}
        self.done: set[str] = set()
        self.skipped: list[str] = []
        self.tied: list[str] = []
        for rule in self.rules:
            self._apply(rule)
        for name, source in self.sources.items():
            if name not in self.done and (source.kind != "buffer" or self._is_state(name)):
                self._carry(name, name)
        for layers in self.stacks.values():
            self._move(Stack(tuple(layers[number] for number in sorted(layers))))
        self.constants = tuple(
            n for n, s in self.sources.items() if s.kind == "buffer" and n not in self.done
        )
        self.unfilled = self._check_filled()
        self._carry_ties_once()

    def also(self, rule: Rule) -> "Draft":
        """Returns a draft with one more rule, whose problems do not suggest nearest names."""
        rules = [*self.rules, rule]
        sources = list(self.sources.values())
        return Draft(sources, self.module, rules, False, self.parts, self.partial)

    def _apply(self, rule: Rule) -> None:
        names = [name for name in self.sources if name not in self.done]
        groups = rule.groups(names)
        if not (groups or rule.may_miss or self.partial or self._is_tap_rule(rule)):
            self.problems.append(f"{rule} matches no tensor left of torch's: {some(names)}.")
        for sources, targets in groups:
            missing = [name for name in sources if name not in self.sources]
            if missing:
                self.problems.append(f"{rule} asks for {some(missing)}, which torch does not have.")
                continue
            if rule.kind == "tied":
                self._tie_tensors(rule, sources[0], targets[0])
                continue
            if self._is_constant_buffer(rule, sources[0], targets[0]):
                continue
            if rule.may_miss and not self._fits(rule, sources, targets):
                continue
            self.done.update(sources)
            if rule.kind == "skip":
                self.skipped += sources
            elif rule.layout is None:
                self._carry(sources[0], targets[0], rule.shift)
            else:
                paths = [unstacked(self.module, flax_path(self.module, x)) for x in targets]
                move = Move(sources, tuple(x for x, _ in paths), rule.layout, dict(rule.sizes))
                self._add(move, paths[0][1])

    def _fits(self, rule: Rule, sources: Sequence[str], targets: Sequence[str]) -> bool:
        """Whether a rule's layout fits the shapes of these tensors."""
        if rule.layout is None:
            return True
        shapes = [self.sources[name].shape for name in sources]
        try:
            sizes_of(rule.layout, shapes, len(targets), dict(rule.sizes))
        except ValueError:
            return False
        return True

    def _is_tap_rule(self, rule: Rule) -> bool:
        """Whether a rule maps only taps: points inside attention, or modules without tensors."""
        if rule.kind != "move" or rule.layout is not None:
            return False
        source, target = rule.sides
        if self.parts is not None:
            groups = rule.groups(
                [part for part in self.parts if part.count(".") == source.count(".")]
            )
        else:
            groups = [((source,), (target,))]
        if source.rpartition(".")[2] in POINTS and get_path(self.module, target) is None:
            return True
        return bool(groups) and all(map(self._has_no_tensors, (to for _, (to, *_) in groups)))

    def _has_no_tensors(self, path: str) -> bool:
        """Whether the Flax module at a path exists and has no tensors."""
        path = flax_path(self.module, path)
        is_module = isinstance(get_path(self.module, path), nnx.Module)
        return is_module and not any(name.startswith(f"{path}.") for name in self.state)

    def _is_constant_buffer(self, rule: Rule, name: str, path: str) -> bool:
        """Whether a name is a buffer, matched by a rule for its module, that Flax does not have."""
        moves = rule.kind == "move" and self.sources[name].kind == "buffer"
        named = name.count(".") == rule.sides[0].count(".")
        return moves and not named and flax_path(self.module, path) not in self.state

    def _is_state(self, name: str) -> bool:
        """Whether Flax has a variable of a floating buffer's name and shape that is no Param."""
        variable, source = self.state.get(flax_path(self.module, name)), self.sources[name]
        return variable is not None and "float" in source.dtype and may_keep(variable, source.shape)

    def _tie_tensors(self, rule: Rule, second: str, first: str) -> None:
        one, two = self.sources.get(second), self.sources.get(first)
        if one is None or two is None or (one.same_as or one.name) != (two.same_as or two.name):
            self.problems.append(f"{rule}: {second} and {first} are not one tensor in torch.")
            return
        self.done.add(second)
        self.tied.append(second)

    def _carry(self, name: str, path: str, shift: float = 0.0) -> None:
        """Adds the move of one tensor to a path, laid out by its type."""
        self.done.add(name)
        path, number = unstacked(self.module, flax_path(self.module, path))
        move = self._typed(name, path)
        if move is not None:
            self._add(replace(move, shift=shift), number)

    def _add(self, move: Move, number: int | None) -> None:
        """Adds a move; a single layer of a stack is collected until all layers are known."""
        if number is None:
            return self._move(move)
        layers = self.stacks.setdefault(move.targets, {})
        if number in layers:
            by = f"{', '.join(layers[number].sources)} and by {', '.join(move.sources)}"
            self.problems.append(f"Layer {number} of {move.targets[0]} is filled twice: by {by}.")
        layers[number] = move
        return None

    def _typed(self, name: str, full_path: str) -> Move | None:
        """Returns the move of a tensor according to its type and the Flax module at the path."""
        source = self.sources[name]
        owner, role, layer, kind = self._owner(full_path, source.kind)
        if full_path in self.state:
            return self._carry_onto(name, full_path, layer)
        known = place(kind, role, layer)
        dot = f"{owner}." if owner else ""
        if known is not None:
            paths = tuple(dot + target for target in known.targets)
            absent = any(path not in self.state for path in paths)
            why = (
                refusal(source, layer, full_path, self.module)
                if absent
                else no_groups(source, layer)
            )
            if why is None:
                return Move((name,), paths, known.layout, dict(known.sizes))
            return self._refuse((name,), why)
        flax_type = becomes(cell_of(kind, role), role)
        why = refusal(source, layer, full_path, self.module)
        if why is None and flax_type is not None and layer is not None:
            why = self._check_pair(name, owner, layer, flax_type[0], "...")
        if why is not None:
            return self._refuse((name,), why)
        target = f"{dot}{flax_type[1]}" if flax_type is not None and layer is None else full_path
        return Move((name,), (target,), None)

    def _owner(self, path: str, kind: str) -> tuple[str, str, Any, str]:
        """Returns the path of a tensor's Flax owner, its role there, the owner, and its kind."""
        # The output projection of nn.MultiheadAttention belongs to nnx.MultiHeadAttention itself.
        owner, _, role = path.rpartition(".")
        above, _, last = owner.rpartition(".")
        layer, parent = get_path(self.module, owner), get_path(self.module, above)
        if layer is None and last == "out_proj" and isinstance(parent, nnx.MultiHeadAttention):
            return above, f"{last}.{role}", parent, "MultiheadAttention"
        return owner, role, layer, kind

    def _carry_onto(self, name: str, path: str, layer: Any) -> Move | None:
        """Returns the move of a tensor to an existing Flax path, laid out by both types."""
        source, (owner, _, leaf) = self.sources[name], path.rpartition(".")
        known = place(source.kind, name.rpartition(".")[2], layer)
        if known is not None and known.targets == (leaf,):
            return Move((name,), (path,), known.layout, dict(known.sizes))
        if PAIRS.get(source.kind) and isinstance(layer, LAYERS) and len(source.shape) > 1:
            flax_type = next(iter(PAIRS[source.kind]))
            return self._refuse((name,), self._check_pair(name, owner, layer, flax_type, path))
        return Move((name,), (path,), None)

    def _check_pair(self, name: str, owner: str, layer: Any, flax_type: type, path: str) -> str:
        kind, where = self.sources[name].kind, owner or "the module"
        if kind in NORMS and type(layer).__name__ in NORMS:
            return (
                f"{name} is of {a(kind)} of torch, and {where} of Flax is {a(layer)}: another "
                f"function; nnx.{kind} is the same one."
            )
        return (
            f"{name} of {a(kind)} meets {where}, {a(layer)}, "
            f'where {a(flax_type)} would be known: say Rule("{name} -> {path}", "layout").'
        )

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        self.unplaced += names
        if why not in self.problems:
            self.problems.append(why)

    def _move(self, move: Move | Stack) -> None:
        shapes = {name: self.sources[name].shape for name in move.sources}
        listing = " ".join(str(list(shape)) for shape in shapes.values())
        what = f"{', '.join(move.sources)} {listing}"
        absent = [path for path in move.targets if path not in self.state]
        if absent:
            first = self._same_role_names(
                absent[0], self.sources[move.sources[0]].shape, self._wants()
            )
            suggestion = nearest(absent[0], self.state if self.suggests else (), first)
            return self._refuse(
                move.sources,
                f"{what} goes to {some(absent)}, which Flax does not have; nearest: {suggestion}.",
            )
        wants = {path: tuple(self.state[path].get_value().shape) for path in move.targets}
        try:
            self.moves.append(move.fitted(shapes, wants))
        except ValueError as error:
            current_shapes = " ".join(str(list(want)) for want in wants.values())
            why = f"{what} cannot fill {some(wants)} {current_shapes}: {error}."
            return self._misfit(move, why)
        except Misfit as misfit:
            return self._misfit(move, str(misfit))
        return None

    def _misfit(self, move: Move | Stack, why: str) -> None:
        self.misfits += [id(self.state[path]) for path in move.targets]
        self._refuse(move.sources, why)

    def _root(self, name: str) -> str:
        return self.sources[name].same_as or name

    def _check_filled(self) -> list[str]:
        """Checks that tensors and Params correspond one to one; returns the unfilled paths."""
        fillers: dict[int, dict[tuple[str, ...], str]] = {}
        places: dict[str, dict[tuple[int, ...], str]] = {}
        for move in self.moves:
            roots = tuple(self._root(name) for name in move.sources)
            ids = tuple(id(self.state[path]) for path in move.targets)
            for root in roots:
                places.setdefault(root, {})[ids] = ", ".join(move.targets)
            for path, param in zip(move.targets, ids, strict=True):
                fillers.setdefault(param, {})[roots] = path
        for filled in fillers.values():
            if len(filled) > 1:
                by = " and by ".join(", ".join(roots) for roots in filled)
                self.problems.append(f"{next(iter(filled.values()))} is filled twice: by {by}.")
        for root, uses in places.items():
            if len(uses) > 1:
                self.problems.append(
                    f"{root} is tied in torch, but {' and '.join(uses.values())} are "
                    'Params apart: tie them, or say Rule.tied("second -> first") or Rule.skip.'
                )
        unfilled = {
            id(x): path
            for path, x in reversed(self.state.items())
            if id(x) not in fillers and isinstance(x, nnx.Param | nnx.BatchStat)
        }
        missed = [path for param, path in unfilled.items() if param not in self.misfits]
        if not self.partial:
            self.problems += [self._unfilled(path) for path in reversed(missed)]
        return list(reversed(unfilled.values()))

    def _unfilled(self, path: str) -> str:
        what = f"{path} {list(self.state[path].get_value().shape)} is filled by nothing"
        owner, _, leaf = path.rpartition(".")
        targets = {target for move in self.moves for target in move.targets}
        siblings = {target for target in targets if target.rpartition(".")[0] == owner}
        if isinstance(self.state[path], nnx.BatchStat) and siblings:
            return f"{what}: torch keeps no statistics there, it needs track_running_stats=True."
        if leaf == "bias" and siblings:
            return f"{what}: torch has no bias there, so Flax needs use_bias=False."
        shapes = {name: source.shape for name, source in self.sources.items()}
        first = self._same_role_names(path, self.state[path].get_value().shape, shapes)
        suggestion = nearest(path, self.sources if self.suggests else (), first)
        return f"{what}; nearest in torch: {suggestion}."

    def _wants(self) -> dict[str, tuple[int, ...]]:
        return {path: tuple(x.get_value().shape) for path, x in self.state.items()}

    def _same_role_names(
        self, name: str, shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]]
    ) -> list[str]:
        """Returns names that agree in being a bias or not, those of the same sizes if any."""
        if not self.suggests:
            return []
        same = [other for other in shapes if ("bias" in _leaf(other)) == ("bias" in _leaf(name))]
        return [other for other in same if sorted(shapes[other]) == sorted(shape)] or same

    def _carry_ties_once(self) -> None:
        """Merges the moves of tied tensors into one, under torch's first name."""
        first_moves: dict[tuple[str, ...], Move | Stack] = {}
        for move in self.moves:
            self.tied += [name for name in move.sources if self.sources[name].same_as]
            move = move.renamed(self._root)
            first_moves.setdefault(move.sources, move)
        self.moves = list(first_moves.values())
        carried = {name for move in self.moves for name in move.sources}
        self.tied = [name for name in dict.fromkeys(self.tied) if name not in carried]


def nearest(name: str, names: Iterable[str], first: Iterable[str] = ()) -> str:
    """Returns up to three names most similar to `name`, or the first ones if none is similar.

    Args:
      first: names listed before all others, if they are similar at all.
    """
    candidates = [*_close(name, list(first)), *(_close(name, names := list(names)) or names[:3])]
    return some(list(dict.fromkeys(candidates))[:3])


def _close(name: str, names: list[str]) -> list[str]:
    # `get_close_matches` is slow: only the names that share most letter pairs are compared.
    likely = sorted(names, key=lambda other: -len(_letters(name) & _letters(other)))[:12]
    return get_close_matches(name, likely, 3, 0.3)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


@lru_cache(maxsize=8192)
def _letters(name: str) -> frozenset[str]:
    return frozenset(map("".join, pairwise(name)))


def some(names: Iterable[str]) -> str:
    """Lists the first six names."""
    return listed(names, 6) or "none"
