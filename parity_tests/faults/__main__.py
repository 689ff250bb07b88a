"""`python -m parity_tests.faults [GROUP ...] [--missed]`: what is said of each listed fault.

Prints a line a fault and amplitude, marked f, p and n where it is found, placed and named, and the
table. `--missed` prints only the lines with a mark missing; `--write` puts the table into
docs/trial.md. `python -m parity_tests.faults.answer` draws faults.
"""

import argparse
import warnings

from .judge import QUESTIONS, judged
from .listed import faults
from .table import text, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="names of lists; all without")
    parser.add_argument("--missed", action="store_true", help="only what is missed")
    parser.add_argument("--write", action="store_true", help="put the table into docs/trial.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    wanted = [name.replace("_", " ") for name in options.groups]
    answers = []
    for fault in faults():
        if fault.is_rewrite or (wanted and fault.group not in wanted):
            continue
        for low in (False, True)[: 1 + bool(fault.low)]:
            answers.append(judged(fault, low))
            wrong = any(answers[-1].of(question) is False for question in QUESTIONS)
            if wrong or not options.missed:
                print(answers[-1], f" [expected {answers[-1].expected}]" * wrong, flush=True)
    print(text(answers))
    if options.write:
        write(answers)


if __name__ == "__main__":
    main()
