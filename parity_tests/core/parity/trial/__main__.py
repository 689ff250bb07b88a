"""`python -m parity_tests.core.parity.trial COUNT SEED [BLOCK ...]`: prints each answer."""

import sys
import warnings

from .answer import answered
from .draw_faults import drawn
from .subjects import SUBJECTS


def main() -> None:
    count, seed, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    subjects = [s for s in SUBJECTS if not names or s.name in names]
    for fault, right, wrong in drawn(subjects, int(count), int(seed)):
        print(answered(fault, right, wrong), flush=True)


if __name__ == "__main__":
    main()
