"""`python -m parity_tests.core.parity.faults [--markdown | --policies]`: the kill table, as text or
as the README shows it, or what other policies catch."""

import sys


def main(arguments: list[str]) -> None:
    if arguments == ["--policies"]:
        from .policies import markdown

        print(markdown())
    elif arguments in ([], ["--markdown"]):
        from .table import markdown as across
        from .table import outcomes, text

        found = outcomes()
        print(across(found) if arguments else text(found))
    else:
        sys.exit(f"--markdown or --policies, or nothing; got {' '.join(arguments)}.")


if __name__ == "__main__":
    main(sys.argv[1:])
