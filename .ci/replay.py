"""What is installed works without torch: every public name, and a recorded result of each layer.

Run in a folder without a checkout, by the interpreter of an environment that has the wheel alone.
"""

import sys
from importlib import import_module
from pathlib import Path

import flax_attn

PACKAGES = ("flax_attn", "flax_attn.parity", "flax_attn.weights")


def main() -> int:
    """Prints what failed, and how many layers are as recorded."""
    home = Path(flax_attn.__file__)
    assert home.is_relative_to(sys.prefix), f"{home} is not what was installed in {sys.prefix}."
    for package in map(import_module, PACKAGES):
        for name in package.__all__:
            getattr(package, name)
    assert "torch" not in sys.modules, "a public name imports torch"
    reports = [*map(replayed, first_cases())]
    failed = [report for report in reports if not report.certain]
    print(*failed, sep="\n")
    print(f"{len(reports) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def first_cases() -> list:
    """One case of each layer, in float64."""
    from flax_attn.parity.cases.collect import collect

    firsts = {}
    for case in collect("parity_tests"):
        firsts.setdefault(case.variant, case)
    return [*firsts.values()]


def replayed(case):
    """The report of a case against its record."""
    case.dtypes = ("float64",)
    return case.report(live=False, eager=False)


if __name__ == "__main__":
    sys.exit(main())
