"""Proposes rules where names and types do not determine the mapping.

A proposal is never applied: the shape of a square matrix does not show whether it is transposed.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import product

from flax import nnx

from .einops_layout import Size
from .fused import Roles, fits, heads_of, in_order, role
from .gates import ORDER, Gates, gates, role_of, shared, side
from .in_order import Likeness, defined, paired_in_order
from .known_layers import LAYERS, NORMS, PAIRS, RECURRENT, flax_path, get_path, may_keep, place
from .mapping import Draft
from .parametrized import not_removed
from .rule import Rule
from .suggest_layouts import fitting_layout, sizes_both_ways

MAX_PROPOSALS = 12  # more would not be read
CERTAIN = 2.0  # greater than any name similarity
MAX_NAMES = 60  # limit on names that are tried one by one
SAME_ROLES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
GATED = (r"gate", r"up")
ALTERNATIVES = (
    "of two rules with the same names take one: query, key and value of a fused weight lie one "
    "after another, [3, heads, width], or head by head, [heads, 3, width]"
)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def propose(draft: Draft) -> list[Rule]:
    """Returns proposed rules for the tensors that a draft has not placed."""
    rules: list[Rule] = []
    while len(rules) < MAX_PROPOSALS:
        for rule in _candidates(draft):
            then = draft.also(rule)
            if _wrong(then) < _wrong(draft) and _fits_shapes(draft, then):
                rules, draft = [*rules, rule, *_other_order(draft, rule)], then
                break
        else:
            break
    return rules


def _other_order(draft: Draft, rule: Rule) -> list[Rule]:
    """Returns the same rule for parts stored head by head, if that fits too."""
    if rule.layout is None or "{" not in rule.names:
        return []
    sources, targets = rule.groups(draft.unplaced)[0]
    if _gates_of(draft, sources[0]):
        return []
    for layout, sizes in _fused(draft, sources, targets, by_heads=True):
        other = Rule(rule.names, layout, **sizes)
        then = draft.also(other)
        if other != rule and _wrong(then) < _wrong(draft) and _fits_shapes(draft, then):
            return [other]
    return []


def _wrong(draft: Draft) -> int:
    return len(draft.problems) + len(draft.unplaced) + len(draft.unfilled)


def _fits_shapes(draft: Draft, then: Draft) -> bool:
    """Whether the rule that leads from one draft to the other fits the shapes of its Params."""
    # A Param that a tensor misfits is not counted as unfilled: that looks like progress.
    return {*then.misfits} <= {*draft.misfits}


def _candidates(draft: Draft) -> Iterator[Rule]:
    if draft.unplaced:
        yield from _ties(draft)
        yield from _cells(draft)
        for stars in (True, False):
            yield from _recurrent(draft, stars)
    if draft.unfilled and draft.constants:
        yield from _buffers(draft)
    if draft.unplaced and draft.unfilled:
        for stars in (True, False):
            yield from _modules(draft, stars)
            yield from _values(draft, stars)


def _buffers(draft: Draft) -> Iterator[Rule]:
    """Yields rules from buffers to statistics of the same shape under another name."""
    for path, name in product(draft.unfilled, draft.constants):
        if may_keep(draft.state[path], draft.sources[name].shape):
            yield Rule(f"{name} -> {path}")


def _ties(draft: Draft) -> Iterator[Rule]:
    """Yields `Rule.tied` for further names of tensors that Flax has once."""
    for name in draft.unplaced:
        first = draft.sources[name].same_as
        if first and first not in draft.unplaced:
            yield Rule.tied(f"{name} -> {first}")


def _cells(draft: Draft) -> Iterator[Rule]:
    """Yields rules from the layers of a GRU, LSTM or RNN to cells, in order."""
    names = [name for name in draft.unplaced if draft.sources[name].kind in RECURRENT]
    cells = list(dict.fromkeys(_owner(_owner(path)) for path in draft.unfilled))
    for name in names:
        left, role, end = name.partition("weight_ih")
        kinds = tuple(PAIRS[f"{draft.sources[name].kind}Cell"])
        cell = next((c for c in cells if isinstance(get_path(draft.module, c), kinds)), None)
        if role and cell is not None:
            yield Rule(f"{left}*{end} -> {cell}.*" if cell else f"{left}*{end} -> *")


def _recurrent(draft: Draft, stars: bool) -> Iterator[Rule]:
    """Yields rules from recurrent weights to a user's own Params, gates in torch's order."""
    for mine in _names((name for name in draft.unplaced if _gates_of(draft, name)), stars):
        of = _placed_of(draft, mine.first)
        made = [path for path in defined(draft.module, nnx.Variable) if path in draft.state]
        placed = {path for targets in of.values() for path in targets}
        free = {*draft.unfilled}
        torch_parts = [
            name
            for name in _names((path for path in made if path in free | placed), stars)
            if name.numbers == mine.numbers
        ]
        options = gates([name.text for name in torch_parts], _gates_of(draft, mine.first))
        sides = {side(each.rest) for each in options}
        ranked = []
        for i, each in enumerate(options):
            targets = [torch_parts[place] for place in each.places]
            paths = [name.first for name in targets]
            layout = _onto_gates(draft, mine.first, paths) if free.issuperset(paths) else None
            rank = _rank(mine.first, each, paths, of, {"ih", "hh"} <= sides)
            if layout is not None and rank is not None:
                names = f"{mine.text} -> {_joined(targets)}"
                ranked.append(((*rank, i), Rule(names, layout[0], **layout[1])))
        yield from (rule for _, rule in sorted(ranked, key=lambda pair: pair[0]))


def _gates_of(draft: Draft, name: str) -> str:
    """Returns "RNN", "GRU" or "LSTM" for a weight or bias of its gates, else ""."""
    source = draft.sources.get(name)
    kind = source.kind.removesuffix("Cell") if source else ""
    return kind if kind in ORDER and role_of(name) else ""


def _placed_of(draft: Draft, name: str) -> dict[str, list[str]]:
    """Returns the targets of the network's tensors placed so far, by "ih" and "hh"."""
    owner, placed = _owner(name), {"ih": [], "hh": []}
    for move in draft.moves:
        for source in move.sources:
            gate_role = role_of(source) if _owner(source) == owner else None
            if gate_role:
                placed[gate_role[1]] += move.targets
    return placed


def _onto_gates(
    draft: Draft, name: str, paths: list[str]
) -> tuple[str | None, dict[str, Size]] | None:
    """Returns the layout from a torch weight to its gates or one Param; None if none fits."""
    rank = len(draft.sources[name].shape)
    if any(len(_shape(draft, path)) != rank for path in paths):
        return None
    if len(paths) > 1:
        return next(_fused(draft, [name], paths, by_heads=False), None)
    one, other = (_Name(text, text, frozenset()) for text in (name, *paths))
    return _layout(draft, [one], [other])


def _rank(
    name: str, each: Gates, paths: list[str], of: dict[str, list[str]], has_side: bool
) -> tuple[float, ...] | None:
    """Returns a sort key, the best match first; None for names of the other of "ih" and "hh"."""
    role, mine = role_of(name) or ("", "")
    other = "hh" if mine == "ih" else "ih"
    own_score, other_score = shared(paths, of[mine]), shared(paths, of[other])
    side_name = side(each.rest) if has_side else ""
    bias_bonus = own_score - other_score if role == "bias" else 0
    if bias_bonus < 0 or (side_name == other and not bias_bonus):
        return None
    owner = _owner(name)
    above = ".".join(paths[0].split(".")[: owner.count(".") + 1])
    return (not each.named, -own_score, -_likeness(owner, above))


def unknown_gates(draft: Draft, rules: Iterable[Rule]) -> list[str]:
    """Returns a sentence for each kind of proposed rules whose names do not indicate gates."""
    unnamed: dict[str, list[str]] = {}
    for rule in rules:
        sources, targets = next(iter(rule.groups(draft.unplaced)), ([""], []))
        kind = _gates_of(draft, sources[0])
        if kind and len(targets) > 1:
            whole = [each for each in gates(targets, kind) if len(each.places) > 1]
            if not any(each.named for each in whole):
                unnamed.setdefault(kind, []).append(rule.sides[1])
    return [
        f"Of {' and '.join(names)} no name tells which gate is which: the rows of torch's {kind} "
        f"are {', '.join(ORDER[kind])}, and the rules take Flax's gates in the order in which they "
        "are defined; check it."
        for kind, names in unnamed.items()
    ]


@dataclass(frozen=True)
class _Name:
    """Names that differ only in numbers: the pattern `h.*.fc`, the first name, all numbers."""

    text: str
    first: str
    numbers: frozenset[tuple[str, ...]]


def _names(names: Iterable[str], stars: bool) -> list[_Name]:
    if not stars:
        return [_Name(name, name, frozenset()) for name in dict.fromkeys(names)][:MAX_NAMES]
    by_pattern: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        by_pattern.setdefault(_NUMBER.sub("*", name), []).append(name)
    return [
        _Name(text, of[0], frozenset(tuple(_NUMBER.findall(name)) for name in of))
        for text, of in by_pattern.items()
    ]


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _likeness(one: str, two: str) -> float:
    def words(name: str) -> str:
        owner, _, leaf = name.rpartition(".")
        return f"{owner}.{SAME_ROLES.get(leaf, leaf)}".lower()

    return SequenceMatcher(None, words(one), words(two), autojunk=False).ratio()


def _likeliest(candidates: Iterable[tuple[float, Rule]]) -> Iterator[Rule]:
    return (rule for _, rule in sorted(candidates, key=lambda pair: -pair[0]))


def _modules(draft: Draft, stars: bool) -> Iterator[Rule]:
    """Yields rules from modules to Flax modules of a matching type that take all their values."""
    likeness = _fitting(draft, stars)
    if stars:  # a module whose numbers the pattern hides may be likelier: a.1 for a
        best: dict[str, float] = {}
        for pair, value in _fitting(draft, False).items():
            if pair not in likeness:
                best[pair[1]] = max(value, best.get(pair[1], 0.0))
        likeness = {pair: x for pair, x in likeness.items() if x >= best.get(pair[1], 0.0)}
    pairs = _in_order(draft, likeness, stars)
    return _likeliest(
        (CERTAIN if pairs.get(mine) == it else value, Rule(f"{mine} -> {it}"))
        for (mine, it), value in likeness.items()
        if pairs.get(mine, it) == it
    )


def _fitting(draft: Draft, stars: bool) -> dict[tuple[str, str], float]:
    """Returns pairs of torch and Flax modules that fit, with their name similarity."""
    owners = [_owner(path) for path in draft.unfilled]
    layers = _names([*owners, *map(_owner, owners)], stars)  # cells and attention contain layers
    roles, torch_roles = _roles(draft.sources), _roles(draft.state)
    begun = {_owner(name) for move in draft.moves for name in move.sources}
    likeness = {}
    for mine in _names((_owner(name) for name in draft.unplaced), stars):
        inside = [name for name in draft.unplaced if _owner(name) == mine.first]
        if mine.first in begun:
            continue  # a part of the module has gone elsewhere, and the rest goes there too
        for it in layers:
            if mine.text and it.text and mine.numbers == it.numbers:
                meet = roles.may_meet(mine.first, torch_roles, it.first)
                if meet and all(_fits(draft, name, it.first) for name in inside):
                    likeness[mine.text, it.text] = _likeness(mine.text, it.text)
    return likeness


def _in_order(draft: Draft, likeness: Likeness, stars: bool) -> dict[str, str]:
    """Pairs layers that names do not distinguish, by their order on both sides."""
    if not likeness:
        return {}
    sides = [*map(_owner, draft.sources)], defined(draft.module)
    names = ([_NUMBER.sub("*", x) if stars else x for x in side] for side in sides)
    return paired_in_order(likeness, *map(dict.fromkeys, names))


def by_order(draft: Draft, rules: Iterable[Rule]) -> list[str]:
    """Returns Flax's names in proposed rules that rely only on the order of the layers."""
    pairs = {}
    for stars in (False, True):
        pairs |= _in_order(draft, _fitting(draft, stars), stars)
    return [it for mine, it in (rule.sides for rule in rules) if pairs.get(mine) == it]


def _roles(names: Iterable[str]) -> Roles:
    """Returns the roles of names and of all their prefixes."""
    pieces = (name.split(".") for name in names)
    return Roles([*dict.fromkeys(".".join(p[:i]) for p in pieces for i in range(len(p) + 1))])


def _fits(draft: Draft, name: str, owner: str) -> bool:
    """Whether a tensor has a known target of its shape in the Flax module at `owner`."""
    source = draft.sources[name]
    known = place(source.kind, name.rpartition(".")[2], get_path(draft.module, owner))
    paths = [f"{owner}.{target}" for target in known.targets] if known else []
    if not paths or not {*paths} <= {*draft.unfilled}:
        return False
    want = _stacked([_shape(draft, path) for path in paths])
    if known is None or known.layout is None or want is None:
        return want == source.shape
    return sizes_both_ways(known.layout, source.shape, want, dict(known.sizes)) is not None


def _values(draft: Draft, stars: bool) -> Iterator[Rule]:
    """Yields rules from one tensor to one or several Params, or from several to one."""
    left = [name for name in draft.unplaced if not _gates_of(draft, name)]
    flax_names, torch_names = _names(left, stars), _names(draft.unfilled, stars)
    roles, others = _roles(draft.sources), _roles(draft.state)
    sides = [
        ([mine], [it])
        for mine in flax_names
        for it in torch_names
        if roles.may_meet(mine.first, others, it.first)
        and not _other_norm(draft, mine, it)
        and (_is_whole(mine) or _same_leaf(mine, it))
    ]
    flax_names = list(filter(_is_whole, flax_names))
    sides += [([mine], group) for mine in flax_names for group in _groups(torch_names, roles, mine)]
    sides += [(group, [it]) for it in torch_names for group in _groups(flax_names, others, it)]
    candidates = []
    for sources, targets in sides:
        if sources[0].numbers == targets[0].numbers and (
            layout := _layout(draft, sources, targets)
        ):
            names = f"{_joined(sources)} -> {_joined(targets)}"
            likeness = max(_likeness(x.text, y.text) for x in sources for y in targets)
            candidates.append((likeness, Rule(names, layout[0], **layout[1])))
    return _likeliest(candidates)


def _is_whole(name: _Name) -> bool:
    """Whether a tensor is not a part from which torch computes a weight."""
    return not_removed(name.first) is None


def _same_leaf(one: _Name, two: _Name) -> bool:
    return one.text.rpartition(".")[2] == two.text.rpartition(".")[2]


def _other_norm(draft: Draft, mine: _Name, it: _Name) -> bool:
    """Whether a norm would map to a different norm of nnx."""
    kind, layer = draft.sources[mine.first].kind, get_path(draft.module, _owner(it.first))
    return kind in NORMS and type(layer).__name__ in NORMS and type(layer).__name__ != kind


def _groups(names: list[_Name], roles: Roles, fused: _Name) -> Iterator[list[_Name]]:
    """Yields groups of names that differ in one component, which `fused` may consist of."""
    whole = roles.whole(fused.first)
    if roles.is_part(fused.first):
        return
    by_pattern: dict[str, list[_Name]] = {}
    for name in names:
        pieces = name.text.split(".")
        for i in range(len(pieces)):
            key = ".".join([*pieces[:i], "{}", *pieces[i + 1 :]])
            by_pattern.setdefault(key, []).append(name)
    for key, group in by_pattern.items():
        if len(group) < 2 or len({name.numbers for name in group}) > 1:
            continue
        at = key.split(".").index("{}")
        pieces = [name.text.split(".")[at] for name in group]
        yield from ([group[i] for i in order] for order in in_order(pieces, whole))
        if not any(map(role, pieces)):
            gated = [
                [n for n, p in zip(group, pieces, strict=True) if re.search(w, p)] for w in GATED
            ]
            if all(len(each) == 1 for each in gated):
                yield [each[0] for each in gated]
            yield group


def _joined(names: list[_Name]) -> str:
    """Joins `a.b.d` and `a.c.d` to `a.{b,c}.d`."""
    pieces = zip(*(name.text.split(".") for name in names), strict=True)
    return ".".join(
        piece[0] if len({*piece}) == 1 else "{" + ",".join(piece) + "}" for piece in pieces
    )


def _layout(
    draft: Draft, sources: list[_Name], targets: list[_Name]
) -> tuple[str | None, dict[str, Size]] | None:
    """Returns the likeliest layout that fits, and the sizes to specify; None if none fits."""
    if len(sources) != len(targets):
        names = [name.first for name in sources], [name.first for name in targets]
        for by_heads in (False, True):
            for layout, sizes in _fused(draft, *names, by_heads):
                return layout, sizes
        return None
    shape, want = draft.sources[sources[0].first].shape, _shape(draft, targets[0].first)
    way = _way(draft, sources[0].first)
    is_transposed = way == "out first" and len(want) > 1 and targets[0].first.endswith("kernel")
    if shape == want and not is_transposed:
        return None, {}
    layer = get_path(draft.module, _owner(targets[0].first))
    return fitting_layout(shape, want, way, is_transposed and isinstance(layer, LAYERS))


def _fused(
    draft: Draft, sources: Sequence[str], targets: Sequence[str], by_heads: bool
) -> Iterator[tuple[str, dict[str, Size]]]:
    """Yields layouts that fit from one tensor to several Params, or from several to one."""
    paths = [flax_path(draft.module, path) for path in targets]
    heads = [*heads_of(draft.module, paths[0]), *draft.sources[sources[0]].heads]
    shapes = [draft.sources[name].shape for name in sources]
    wants = [_shape(draft, path) for path in paths]
    return fits(shapes, wants, _way(draft, sources[0]), by_heads, heads)


def _way(draft: Draft, name: str) -> str:
    kind = draft.sources[name].kind
    inputs_first = ("Conv1D", "ConvTranspose", "Parameter", "buffer")
    is_plain = kind in inputs_first and not_removed(name) is None
    return "in first" if is_plain else "out first"


def _shape(draft: Draft, path: str) -> tuple[int, ...]:
    return tuple(draft.state[path].get_value().shape)


def _stacked(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Returns the shape of the stacked arrays; None if their shapes differ."""
    if len({*shapes}) > 1:
        return None
    return shapes[0] if len(shapes) == 1 else (len(shapes), *shapes[0])
