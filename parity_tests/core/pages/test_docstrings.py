"""Every public name has an example that runs, its errors, and the source of its arithmetic."""

import inspect

from flax import nnx

import flax_attn
from flax_attn import parity, weights
from flax_attn.parity import ParityError
from parity_tests.tables import each

PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (flax_attn, parity, weights)
    for name in module.__all__
    if callable(getattr(module, name))
}
RESULTS = (parity.Divergence, parity.Plan, parity.Report, parity.Row, ParityError)
RESULTS += (weights.CheckpointError, parity.Identified)
NO_PAPERS = "assume_platform frozen explain use_backend use_device_file Rules Places".split()
OURS = {f"flax_attn.{name}" for name in NO_PAPERS}
OURS |= {"flax_attn.weights.CheckpointError", "flax_attn.weights.Rule"}
ARITHMETIC = [name for name in PUBLIC if not name.startswith("flax_attn.parity") | (name in OURS)]

of_all_public = each("name", PUBLIC)


def _is_layer(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, nnx.Module)


def text_of(name: str) -> str:
    """The docstring; a constant's is its class's."""
    thing = PUBLIC[name]
    of = thing if inspect.isclass(thing) or inspect.isfunction(thing) else type(thing)
    return of.__doc__ or ""


@of_all_public
def test_every_public_docstring_has_an_example(name):  # which pytest runs as a doctest, by its name
    assert ">>> " in text_of(name)


@of_all_public
def test_docstrings_name_the_errors_that_are_raised(name):
    assert "Raises" in text_of(name) or PUBLIC[name] in RESULTS


@each("name", ARITHMETIC)
def test_arithmetic_names_its_source(name):
    assert "Source:" in text_of(name)


@each("name", [n for n in ARITHMETIC if _is_layer(PUBLIC[n])])
def test_every_layer_states_its_shapes(name):
    assert "*B" in text_of(name)
