"""`python -m parity_tests.core.parity.faults.ported`: what is said of each, and the totals.

`--write` puts what is said into docs/mistakes.md.
"""

import sys

from . import run_all, text
from .page import write


def main() -> None:
    rows = run_all()
    for row in rows:
        print(row)
    print(f"\n{text(rows)}")
    if "--write" in sys.argv[1:]:
        write(rows)


if __name__ == "__main__":
    main()
