"""`python -m parity_tests.core.faults [--policies]`: the kill table, or what policies catch."""

import sys

import jax


def main(arguments: list[str]) -> None:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if arguments == ["--policies"]:
        from .policies import markdown

        print(markdown())
    else:
        from .table import outcomes, text

        print(text(outcomes()))


if __name__ == "__main__":
    main(sys.argv[1:])
