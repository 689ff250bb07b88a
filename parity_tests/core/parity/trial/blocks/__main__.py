"""`python -m parity_tests.core.parity.trial.blocks [names]`: each right port's report."""

import sys
import time

from . import BLOCKS


def main() -> None:
    for block in BLOCKS:
        if not sys.argv[1:] or block.name in sys.argv[1:]:
            start = time.perf_counter()
            report = block.report()
            print(f"{block.name}, {time.perf_counter() - start:.1f} s: {report.verdict}")
            print(report)
            for kind in ("tap", "output", "gradient", "state"):
                names = [row.name for row in report.rows if row.kind == kind]
                print(f"  {len(names)} {kind}: {' '.join(names)}")


if __name__ == "__main__":
    main()
