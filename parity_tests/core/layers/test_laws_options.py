"""Options of layers: each reaches the arithmetic as its formula says, or is refused by its name.

Values are drawn and judged by numpy_layers.py. For all other options, programs are compared and
never compiled: an option that is ignored leaves the program as it was.
"""

import inspect
from typing import Any, Literal, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import Case, judge
from parity_tests.core.backends.refusal import refused
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.layer_facts import (
    BESIDE,
    OPTIONS,
    REFUSED,
    REFUSED_TOGETHER,
    SPELLINGS,
)
from parity_tests.tables import each, with_nightly

from .numpy_layers import CLASSES, CLIMB, WORDS, D, H, K, T, arguments, drawn, output
from .test_rngs import VARIANTS, first_cases, inputs_of

SEEDS = [(name, seed) for name in CLASSES for seed in range(4 if name in CLIMB else 24)]
AT_COMMIT = [(name, seed) for name, seed in SEEDS if seed < (1 if name in CLIMB else 2)]


@pytest.mark.parametrize(("name", "seed"), with_nightly(SEEDS, commit=AT_COMMIT))
def test_outputs_under_drawn_options_are_the_formula(name, seed, float64):
    """By odd seeds the mask is an argument of the call and replaces the layer's."""
    given, random, more = drawn(name, seed), np.random.RandomState(seed), {}
    of_layer = given
    if seed % 2 and "mask" in given:
        more, of_layer = {"mask": WORDS["mask"][given["mask"]]}, {**given, "mask": "prefix"}

    def build():
        config = arguments(name, of_layer)
        return CLASSES[name](**config, param_dtype=jnp.float64, rngs=nnx.Rngs(0))

    @jax.jit
    def run(state, x):
        layer = build()
        nnx.update(layer, state)
        return layer(x, **more)

    state = nnx.state(nnx.eval_shape(build), nnx.Param)
    state = jax.tree.map(lambda x: jnp.asarray(random.standard_normal(x.shape) / 2), state)
    x, values = random.standard_normal((2, T, D)), random.standard_normal((2, T, K, H))
    x = abs(x) if given.get("normalise") == "sum" else x  # whose sums are far from zero
    more |= {"values": values} if name == "residual" else {}
    params = nnx.to_flat_state(state)
    p = {".".join(map(str, path)): np.asarray(param[...]) for path, param in params}
    got = run(state, x)
    assert judge.same_function(np.asarray(got), output(name, p, given, x, values)).ok, given


def config_of(case: Case) -> dict[str, Any]:
    return dict(case.config() if callable(case.config) else case.config)


def parameters(case: Case) -> dict[str, inspect.Parameter]:
    """The constructor's arguments, but for those that every layer takes."""
    common = ("self", "kernel_init", "bias_init", "rngs", "dtype", "param_dtype")
    found = inspect.signature(case.flax_class.__init__).parameters
    return {name: x for name, x in found.items() if name not in common}


def program(case: Case, config: dict[str, Any]) -> tuple[str, list[bytes]]:
    """What the layer's construction and call compute: the program and its constants."""

    def run(inputs: Any) -> Any:
        return case.flax_call(case.flax_class(**config, rngs=nnx.Rngs(0)), **inputs)

    traced = jax.make_jaxpr(run)(inputs_of(case))
    return str(traced), [np.asarray(x).tobytes() for x in traced.consts]


def words_of(parameter: inspect.Parameter) -> tuple[Any, ...]:
    """The values of an argument that is one of a few; empty for others."""
    kinds = (parameter.annotation, *get_args(parameter.annotation))
    return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())


def value_in(table: dict[str, Any], name: str, config: dict[str, Any]) -> Any:
    return table[name](config) if inspect.isfunction(table[name]) else table[name]


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_option_changes_the_program_or_is_refused_by_its_name(variant):
    case, programs = first_cases()[variant], {}
    for name, parameter in parameters(case).items():
        if parameter.annotation in (int, int | None):
            continue
        config = config_of(case)
        beside = {x: value_in(BESIDE[name], x, config) for x in BESIDE.get(name, {})}
        config |= {x: value for x, value in beside.items() if x in parameters(case)}
        if parameter.annotation == bool | None:
            config[name] = False
        before = config.get(name, parameter.default)
        values = [x for x in words_of(parameter) if x != before]
        if isinstance(before, bool):
            values = [not before]
        key = str(config)
        programs[key] = programs[key] if key in programs else program(case, config)
        for value in values or [value_in(OPTIONS, name, config)]:
            try:
                changed = program(case, {**config, name: value})
            except ValueError as error:
                assert name in str(error), error
            else:
                assert changed != programs[key], (name, value)


@each("variant, one, other", SPELLINGS)
def test_two_spellings_are_one_program(variant, one, other):
    case = first_cases()[variant]
    assert program(case, config_of(case) | one) == program(case, config_of(case) | other)


def wrong_values(case: Case) -> list[tuple[str, Any, type[Exception], str]]:
    """Values that a layer's constructor must refuse, and what the error says."""
    rows = [
        (name, value, kind, words)
        for name in parameters(case).keys() & REFUSED.keys()
        for value, kind, words in REFUSED[name]
        if not (name == "qkv_bias" and parameters(case)[name].annotation is bool)
    ]
    for name, parameter in parameters(case).items():
        optional = parameter.annotation == int | None and config_of(case).get(name) is not None
        if parameter.annotation is int or optional:
            counts = (0, -1, 2.5, True)[name == "depth" :]  # which counts layers from zero
            rows += [(name, x, ValueError, repr(x)) for x in counts]
        if "dropout" in name:
            words = f"{name} is the share dropped, from 0 to 1; got "
            rows += [(name, x, ValueError, f"{words}{x!r}") for x in (-0.1, 1.5, np.nan, "0.1")]
        if words_of(parameter):
            rows += [(name, "other", ValueError, f"{name} must be one of ")]
    return rows


@pytest.mark.parametrize("variant", with_nightly(VARIANTS, commit=3))
def test_a_wrong_value_is_refused_by_its_name(variant):
    case = first_cases()[variant]
    for name, value, kind, words in wrong_values(case):
        config = config_of(case) | {name: value}
        with refused(kind, name, words):
            nnx.eval_shape(lambda: case.flax_class(**config, rngs=nnx.Rngs(0)))  # noqa: B023


@each("variant, given, words", REFUSED_TOGETHER)
def test_arguments_that_exclude_each_other_are_refused(variant, given, words):
    case = first_cases()[variant]
    with refused(ValueError, words):
        nnx.eval_shape(lambda: case.flax_class(**config_of(case) | given, rngs=nnx.Rngs(0)))
