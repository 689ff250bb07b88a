"""Strict in tests: promotion of ranks and dtypes raises; `case` runs over a module's CASES."""

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames and hasattr(metafunc.module, "CASES"):
        metafunc.parametrize("case", metafunc.module.CASES, ids=str)
