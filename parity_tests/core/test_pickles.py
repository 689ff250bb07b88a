"""Pickles of earlier releases, which hold the paths of modules."""

import pickle
import warnings
import zipfile
from pathlib import Path

import jax
import numpy as np

import flax_attn
from flax_attn.parity import judge
from parity_tests.core.layers.test_rngs import VARIANTS
from parity_tests.tables import each

# Masks, scores, caches and layers, pickled by the code before any module moved.
KEPT = zipfile.ZipFile(Path(__file__).parents[1] / "data" / "pickles.zip")
NAMES = sorted(name.removesuffix(".pickle") for name in KEPT.namelist())


def numbers_of(tree):
    """Its arrays, those of keys as integers."""
    for x in jax.tree.leaves(tree):
        is_key = jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)
        yield np.asarray(jax.random.key_data(x) if is_key else x)


@each("name", NAMES)
def test_a_pickle_of_the_previous_release_is_read(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = pickle.loads(KEPT.read(f"{name}.pickle"))
    again = pickle.loads(pickle.dumps(kept))
    assert type(kept).__module__.startswith("flax_attn.")
    for one, other in zip(numbers_of(kept), numbers_of(again), strict=True):
        assert judge.exact(one, other).ok


def test_the_pickles_cover_every_layer():
    assert {f"layer {variant}" for variant in VARIANTS} <= {*NAMES}


def test_the_root_has_a_version():
    from importlib.metadata import version

    assert flax_attn.__version__ == version("flax_attn")
