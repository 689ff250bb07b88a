"""`python -m parity_tests.core.parity.faults`: the kill table as text, or the tables of a page.

`--write [TABLE ...]` makes these tables of docs/trial.md anew: planted, strange, ported, policies.
"""

import argparse


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parity_tests.core.parity.faults")
    tables = "tables of docs/trial.md to make anew; all of them if none is named"
    parser.add_argument("--write", nargs="*", metavar="TABLE", help=tables)
    given = parser.parse_args()
    if given.write is not None:
        from .page import write

        write(given.write)
    else:
        from .table import outcomes, text

        print(text(outcomes()))


if __name__ == "__main__":
    main()
