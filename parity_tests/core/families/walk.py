"""Fields of a config changed on both sides: each one after another, or one or two by a seed."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from flax_attn.parity import judge
from parity_tests.families.configs import CONFIGS, Small
from parity_tests.families.eager import config_of, ours, theirs
from parity_tests.families.parts import PARTS, Part

WORDS = (
    "gelu",
    "default",
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear",
    "other",
)


def others(value):
    """What a field may be changed to, the first that transformers takes."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2] if value else [1, 0.25]
    if isinstance(value, str):
        return [word for word in WORDS if word != value]
    return [2, 0.5, True, "other"]


def places(value, path=()):
    """Where numbers, words and nothing stand in a config, each with its path."""
    if isinstance(value, dict):
        for key, inside in value.items():
            yield from places(inside, (*path, key))
    elif isinstance(value, list):
        for key, inside in enumerate(value):
            yield from places(inside, (*path, key))
    elif value is None or isinstance(value, bool | int | float | str):
        yield path, value


def changed(config, path, value):
    new = copy.deepcopy(config)
    at = new
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return new


def plain_defaults(config):
    """Fields that a file may leave out, with numbers and flags that their class gives them."""
    found = fields(config)
    return {x.name: x.default for x in found if isinstance(x.default, bool | int | float)}


def unchanged(got, before):
    return got.shape == before.shape and judge.exact(got, before).ok


def walk(small: Small | Part, spelling: str, passed_over: Sequence[str] = ()) -> None:
    """AssertionError if a change of a field is ignored by one side, or told by another name.

    Args:
      small: the config.
      spelling: "new" or "old".
      passed_over: fields that are not changed.
    """
    given = small.spelt(spelling)
    config = config_of(given, small)
    given = config.to_dict() if spelling == "new" else {**plain_defaults(config), **given}
    layer, before = theirs(given, small)
    assert before is not None, layer
    first = ours(given, small, layer)
    assert not isinstance(first, ValueError), first
    assert judge.same_function(first, before).ok
    for path, value in places({k: v for k, v in given.items() if k not in passed_over}):
        check(given, small, path, value, layer, before, first)


def check(given, small, path, value, layer, before, first):
    where = ".".join(map(str, path))
    for other in others(value):
        new = changed(given, path, other)
        module, want = theirs(new, small)
        if want is not None:
            break
    got = ours(new, small, layer if want is None else module)
    if isinstance(got, ValueError):
        field = [key for key in path if isinstance(key, str)][-1]
        assert want is None or field in str(got), f"{where}={other!r}: {got}"
    elif want is None:
        told = f"{where}={other!r}: transformers refuses it ({module}), and ours changes"
        assert unchanged(got, first), told
    else:
        same = [unchanged(*pair) for pair in ((got, first), (want, before))]
        assert same[0] == same[1], f"{where}={other!r}: a change on one side alone, {same}"
        assert judge.same_function(got, want).ok, f"{where}={other!r}: another change"


EACH: dict[tuple[str, str], list[Small | Part]] = {}
for _small in (*CONFIGS, *PARTS):
    EACH.setdefault((_small.name, getattr(_small, "part", "")), []).append(_small)
# Of every class and no layer, or drawn by itself, or the heads of an indexer, whose scores may tie.
NOT_DRAWN = {"model_type", "architectures", "transformers_version", "dtype", "id2label", "label2id"}
NOT_DRAWN |= {"index_n_heads"}
LENGTH = {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, **LENGTH}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BESIDE = [  # the rotary parameters
    *({"partial_rotary_factor": 0.5}, {"rope_theta": 77.0}, {"truncate": False}, LENGTH),
    *({"rope_scaling": {word: "linear", "factor": 3.0}} for word in ("type", "rope_type")),
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}},
]
INSIDE = [  # them, in addition to what is there
    *({"mystery": 3}, {"type": "linear", "factor": 3.0}, {"partial_rotary_factor": 0.25}),
    *({"mrope_section": [1, 2, 1]}, {"mrope_interleaved": False}, {"alpha": 3.0}, YARN),
    {"rope_type": None, "factor": 2.0},
    *({**YARN, "truncate": x} for x in (None, False, True)),
    *({**YARN, "beta_fast": 1.0, "beta_slow": 1.0}, {**YARN, "mscale": 0.7}),
    *({**YARN, "partial_rotary_factor": 0.5}, {**LLAMA3, **LENGTH}),
    *({"rope_type": kind, "factor": 2.0} for kind in ("linear", "dynamic")),
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
]


def picked(random, values):
    return copy.deepcopy(values[random.integers(len(values))])


def near(random, value):
    """Another value of a field, mostly of its kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return picked(random, [value * 2, value * 2, max(1, value // 2), value + 1, 1, 2, 0])
    if isinstance(value, float):
        return picked(random, [value * 2, value / 2, value + 0.25, 0.5, 1.0, 0.0])
    if isinstance(value, str):
        return picked(random, WORDS)
    return picked(random, [1, 2, 4, 0.5, True, False, [1, 1]])


def with_another_rotary(random, given):
    """The config with something beside its rotary parameters, or in one dict of them."""
    dicts = [key for key in ("rope_parameters", "rope_scaling") if isinstance(given.get(key), dict)]
    if not dicts or random.random() < 0.4:
        return {**given, **picked(random, BESIDE)}
    rope = given[dicts[0]]
    kinds = [key for key, value in rope.items() if isinstance(value, dict)]
    path = (dicts[0], picked(random, kinds)) if kinds else (dicts[0],)
    inside = rope[path[1]] if kinds else rope
    return changed(given, path, {**inside, **picked(random, INSIDE)})


def drawn(seed: int) -> tuple[Small | Part, dict]:
    """A small config of some type, with one change or two of its class's fields."""
    random = np.random.default_rng(seed)
    small = picked(random, EACH[picked(random, [*EACH])])
    spelling = picked(random, ["new", "new", "old"]) if isinstance(small, Small) else "new"
    given = small.spelt(spelling)
    whole = config_of(copy.deepcopy(given), small)
    whole = whole.to_dict() if spelling == "new" else {**plain_defaults(whole), **given}
    for _ in range(picked(random, [1, 1, 2])):
        if any("rope" in key for key in given) and random.random() < 0.4:
            given = with_another_rotary(random, given)
            continue
        # Half of the time a field of the small config, most of which its attention reads.
        found = given if random.random() < 0.5 else {**whole, **given}
        drawable = {k: x for k, x in found.items() if k not in NOT_DRAWN and k[-9:] != "_token_id"}
        path, value = picked(random, [*places(drawable)])
        given = changed({path[0]: found[path[0]], **given}, path, near(random, value))
    return small, given


def compared(small: Small | Part, given: dict) -> str:
    """What became of a config: "equal", "no model", or what is to be read."""
    module, want = theirs(copy.deepcopy(given), small)
    if want is None or not np.isfinite(want).all():
        return "no model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = ours(given, small, module)
    if isinstance(got, ValueError):
        return f"refused: {got}"
    same = got.shape == want.shape and judge.same_function(got, want).ok
    return "equal" if same else "another function"
