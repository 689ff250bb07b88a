"""One case of each layer, and one in train mode, recorded with torch and proven elsewhere without.

`two_machines.py record FOLDER` runs where torch is, `two_machines.py prove FOLDER` where it is not,
in a folder without a checkout, by the interpreter of an environment that has the wheel alone. There
each port is also proven wrong, its outputs changed by one part in a million.
"""

import sys
from copy import copy
from importlib.util import find_spec
from pathlib import Path

import jax

from flax_attn.command.record_command import file_name
from flax_attn.parity import Recording
from flax_attn.parity.cases.collect import collect


def main(what: str, folder: Path) -> int:
    """Prints what failed, and how many cases are recorded or proven."""
    cases = first_cases()
    if what == "record":
        folder.mkdir(exist_ok=True)
        sizes = [case.record(folder / file_name(str(case))).stat().st_size for case in cases]
        print(f"{len(sizes)} recorded, {sum(sizes) / 2**20:.0f} MiB")
        return 0
    assert find_spec("torch") is None, "torch is installed here"
    failed = [fault for case in cases if (fault := fault_of(case, folder))]
    assert "torch" not in sys.modules, "a recording imports torch"
    print(*failed, sep="\n")
    print(f"{len(cases) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def first_cases() -> list:
    """Of each layer the first case, and the first in train mode, in float64 and float32."""
    firsts = {}
    for case in collect("parity_tests"):
        case.dtypes = tuple(dtype for dtype in case.dtypes if dtype != "bfloat16")
        firsts.setdefault((case.variant, case.train), case)
    return [*firsts.values()]


def fault_of(case, folder: Path) -> str:
    """What is wrong with the proof of a case, or ""."""
    recording = Recording(folder / file_name(str(case)))
    report = case.report(recording=recording, eager=False)
    if not report.certain:
        return str(report)
    changed = copy(case)
    changed.flax_call = lambda module, **inputs: jax.tree.map(
        lambda x: x * (1 + 1e-6) if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) else x,
        case.flax_call(module, **inputs),
    )
    changed.dtypes = case.dtypes[:1]
    wrong = changed.report(recording=recording, eager=False)
    return f"{case}: outputs that are changed pass" if wrong.ok else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
