"""A walk over the fields of a config: each is changed on both sides, one after another."""

import copy
from collections.abc import Sequence
from dataclasses import fields

from flax_attn.parity import judge
from parity_tests.families.configs import Small
from parity_tests.families.eager import config_of, ours, theirs
from parity_tests.families.parts import Part

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
