"""`python -m parity_tests.core.parity.trial`: makes faults, and prints what is said of each.

`--count N --seed S [--lacking SHARE] [--part I/N] [BLOCK ...]` draws and answers, a line each, and
appends them to `--to FILE`; a part has each N-th block. `--write FILE ...` puts the table of such
files into docs/trial.md.
"""

import argparse
import json
import warnings
from pathlib import Path

from .answer import answered
from .draw_faults import drawn
from .page import write
from .subjects import SUBJECTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lacking", type=float, default=0.0)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--write", type=Path, nargs="+")
    parser.add_argument("blocks", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.write:
        write([json.loads(line) for file in options.write for line in file.open()])
        return
    part, parts = map(int, options.part.split("/"))
    subjects = [s for s in SUBJECTS[part::parts] if not options.blocks or s.name in options.blocks]
    for each in drawn(subjects, options.count, options.seed, options.lacking):
        answer = answered(*each)
        print(answer, flush=True)
        if options.to:
            with options.to.open("a") as file:
                file.write(json.dumps(answer.facts()) + "\n")


if __name__ == "__main__":
    main()
