"""Which flax imports under which jax; docs/limits.md has the versions that were tried."""

import re
from importlib.metadata import PackageNotFoundError, version

# Under a jax from the first version on, flax imports from the second on.
OLDEST_FLAX = {"0.11.2": "0.12.10", "0.11.1": "0.12.9", "0.10.0": "0.12.8"}


def does_not_fit() -> str:
    """One sentence if the installed flax is known not to import under the installed jax, or ""."""
    try:
        jax, flax = version("jax"), version("flax")
    except PackageNotFoundError:  # its import says that it is missing
        return ""
    for since, oldest in OLDEST_FLAX.items():
        if _numbers(jax) >= _numbers(since):
            if _numbers(flax) >= _numbers(oldest):
                return ""
            return (
                f"flax {flax} does not import under jax {jax}, which needs flax {oldest} or newer: "
                "pip install -U flax"
            )
    return f"flax_attn needs jax 0.10 or newer, and jax {jax} is installed: pip install -U jax flax"


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)[:3]]
