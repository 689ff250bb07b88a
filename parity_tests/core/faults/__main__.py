"""`python -m parity_tests.core.faults [--policies]`: the kill table, or what policies catch."""

import sys


def main(arguments: list[str]) -> None:
    if arguments == ["--policies"]:
        from .policies import markdown

        print(markdown())
    else:
        from .table import outcomes, text

        print(text(outcomes()))


if __name__ == "__main__":
    main(sys.argv[1:])
