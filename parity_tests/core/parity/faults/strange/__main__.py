"""`python -m parity_tests.core.parity.faults.strange`: the table, and what was missed."""

from . import REWRITES, run_all, text
from .table import verdict


def main() -> None:
    print(text(run_all()))
    print("\nfaithful pairs, all to be equal")
    for rewrite in REWRITES:
        print(f"  {rewrite.name}: {verdict(rewrite.pair)}")


if __name__ == "__main__":
    main()
