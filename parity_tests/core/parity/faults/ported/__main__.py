"""`python -m parity_tests.core.parity.faults.ported`: what is said of each, and the totals."""

from . import run_all, text


def main() -> None:
    rows = run_all()
    for row in rows:
        print(row)
    print(f"\n{text(rows)}")


if __name__ == "__main__":
    main()
