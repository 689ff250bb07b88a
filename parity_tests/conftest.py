"""Strict in tests: promotion of ranks and dtypes raises.

Of each variant and witness the first case runs eagerly and under jit, the others under jit, as the
command does: an eager run compiles every operation by itself, and its function is the same.
"""

import jax
import pytest

from flax_attn.parity import Case

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = set()
    for item in items:
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")
        if isinstance(case, Case):
            case.eager = (case.variant, case.witness) not in seen
            seen.add((case.variant, case.witness))
