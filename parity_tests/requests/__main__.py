"""`python -m parity_tests.requests`: random programs by every backend, over as many sittings.

Each program is one line of the progress file, so a sitting may be stopped and resumed. Ends with 1
if any program differs, and prints the line that runs it again.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .runs import BACKENDS, run
from .worker import outcomes, prepare

Line = dict[str, Any]
REPEAT = "python -m parity_tests.requests --program {seed} --request {request}"


def main(arguments: list[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    given = parsed(arguments)
    prepare()
    if given.program is not None:
        lines = [run(given.program, given.requests, given.request).line()]
        print(json.dumps(lines[0], indent=1))
    else:
        known = read(given.resume)
        wanted = range(given.seed, given.seed + given.programs)
        lines = [known[seed] for seed in wanted if seed in known]
        seeds = [seed for seed in wanted if seed not in known]
        for line in outcomes(seeds, given.requests, given.jobs, given.minutes):
            lines.append(line)
            write(given.resume, line)
            show(line, len(lines), given.programs)
    print(table(lines))
    return report(lines)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m parity_tests.requests")
    parser.add_argument("--programs", type=int, default=100, metavar="M", help="how many programs")
    parser.add_argument("--requests", type=int, metavar="N", help="of each; 11, or 3 if it is long")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first program")
    parser.add_argument("--minutes", type=float, metavar="M", help="begin no program after them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="progress, as JSON lines")
    parser.add_argument("--program", type=int, metavar="SEED", help="this program alone, in full")
    parser.add_argument("--request", type=int, metavar="R", help="of it this request alone")
    given = parser.parse_args(arguments)
    if given.request is not None and given.program is None:
        parser.error("--request R is one of a program: say --program SEED too")
    return given


def read(path: Path | None) -> dict[int, Line]:
    """The programs already run, by seed."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    return {line["seed"]: line for line in lines}


def write(path: Path | None, line: Line) -> None:
    """Adds a program to the progress file."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def show(line: Line, count: int, of: int) -> None:
    """A word on differences at once, and on progress at times."""
    if line["verdict"] == "DIFFERENT":
        print(story(line), flush=True)
    elif count % 50 == 0:
        print(f"{count} of {of}", flush=True)


def story(line: Line) -> str:
    """What differed, where, and the command that runs it again."""
    words, fault = line["words"], line["faults"][0]
    what = fault["note"] or f"error {fault['error']}, limit {fault['limit']}"
    parts = [f"DIFFERENT {line['seed']}: {fault['backend']} {fault['array']}: {what}"]
    parts += [f"    {name}: {words[name]}" for name in ("sizes", "mask", "score", "more")]
    parts += [f"    {words['dtype']}, {words['plan']}"]
    return "\n".join([*parts, "    " + REPEAT.format(seed=line["seed"], **fault)])


def table(lines: list[Line]) -> str:
    """Programs, requests, verdicts and worst errors by dtype, and what it cost."""
    head = ["programs", "requests", "arrays", "equal", "noise", "different", *BACKENDS]
    found = [" ".join(["dtype".ljust(9), *(name.rjust(10) for name in head)])]
    for dtype in [*sorted({line["words"]["dtype"] for line in lines}), "all"]:
        rows = [x for x in lines if dtype in (x["words"]["dtype"], "all")]
        verdicts = [x["verdict"] for x in rows]
        counts = [len(rows), sum(x["requests"] for x in rows), sum(x["arrays"] for x in rows)]
        counts += [verdicts.count(v) for v in ("equal", "equal within noise", "DIFFERENT")]
        worst = [max((x["worst"][b] for x in rows), default=0.0) for b in BACKENDS]
        cells = [str(n) for n in counts] + [f"{x:.2g}" for x in worst]
        found.append(" ".join([dtype.ljust(9), *(cell.rjust(10) for cell in cells)]))
    cpu, many = sum(x["cpu"] for x in lines), max(len(lines), 1)
    first = sum(x["first_cpu"] for x in lines)
    more = max(sum(x["requests"] for x in lines) - len(lines), 1)
    text = (
        f"{cpu / 60:.1f} CPU minutes: {cpu / many:.2f} s a program, of which {first / many:.2f} s"
    )
    found.append(f"{text} for its first request; {(cpu - first) / more:.3f} s for each further one")
    return "\n".join(found)


def report(lines: list[Line]) -> int:
    """Prints every difference again, below the table; the exit status."""
    different = [line for line in lines if line["verdict"] == "DIFFERENT"]
    for line in different:
        print(story(line))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
