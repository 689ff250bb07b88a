"""What the check found: a screen of text, and a Markdown report from the parts' files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._internal import markdown as _markdown
from ..bench import page as bench_page
from ..bench.reader import read
from ..bench.result import Results, Row, base_of
from ..bench.table import amount_text, tables
from ..bench.task import label
from .part import LEFT_OUT, MACHINE, MODULES, rows_of

BENCHES = ("speed", "decoding", "memory")
WRONG = ("different", "failed")
MAX_WRONG_LINES = 20  # listed in the report; the files contain all
SHARE = (
    "*Share* is the largest error divided by its limit, a few times that of PyTorch, or of the "
    "plain formula, in the same dtype: below 1 passes. Float32 products are IEEE products."
)


def benches(out: Path) -> dict[str, Results]:
    """The results of the benchmarks that have left some."""
    files = {name: out / f"{name}.json" for name in BENCHES}
    return {name: read(file) for name, file in files.items() if file.exists()}


def wrong_lines(out: Path) -> list[str]:
    """A line for each row that differs or failed; in benchmarks, of this library's rows."""
    lines = []
    for part in (*MODULES, *BENCHES):
        for row in rows_of(out, part):
            if row.get("verdict") in WRONG:
                names = ("case", "words", "backend", "dtype", "what")
                what = ", ".join(dict.fromkeys(str(row[name]) for name in names if name in row))
                text = " ".join(str(row.get("text", "")).split())[:400]
                lines.append(f"{part}: {what} {row['verdict']}: {text}")
    for part, results in benches(out).items():
        mine = [row for row in results.rows if row.family == "flax_attn" and row.status == "wrong"]
        lines += [f"{part}: {row.competitor}, {row.table} different: {row.reason}" for row in mine]
    return lines


def left_out(out: Path) -> list[str]:
    """A line for all that was not run, and why."""
    rows = [row for part in (*MODULES, *BENCHES) for row in rows_of(out, part)]
    lines = [f"{r['what']}: {r['reason']}" for r in rows if r.get("verdict") == LEFT_OUT]
    for part, results in benches(out).items():
        if results.missing:
            lines.append(f"{part}: {len(results.missing)} tasks: no time was left")
    return lines


def summary(out: Path, names: Sequence[str]) -> list[tuple[str, str]]:
    """A sentence for each of these parts: what it had of all, and what that gave."""
    return [(name, _summary(out, name) or "nothing was tried") for name in names]


def _summary(out: Path, name: str) -> str:
    results = benches(out).get(name)
    if results is not None:
        races = {row.race: [x for x in results.rows if x.race == row.race] for row in results.rows}
        shown = [race for race in races.values() if base_of(race)]
        text = f"{len(shown)} of {results.wanted} tasks"
        return f"{text}; {_last(shown[-1])}" if shown else text
    one, total = {"layers": ("layer", "all"), "requests": ("request", "of")}.get(name, ("", ""))
    rows = [row for row in rows_of(out, name) if one in row]
    count = len({row[one] for row in rows})
    return f"{count} of {rows[0][total]} {name}: {_verdicts(rows)}" if rows else ""


def _verdicts(rows: Sequence[dict[str, Any]]) -> str:
    """Numbers of results by verdict, and the largest share of a limit."""
    words = {
        "equal": "equal",
        "different": "different",
        "failed": "failed",
        "refuses": "not served",
    }
    counts = {word: sum(row["verdict"] == name for row in rows) for name, word in words.items()}
    text = ", ".join(f"{n} {word}" for word, n in counts.items() if n or word == "equal")
    share = max((row["share"] for row in rows if "share" in row), default=0.0)
    return f"{text}; largest error {share:.2f} of its limit"


def _last(race: Sequence[Row]) -> str:
    """The amounts of a race in words: this library's, and the ratios of others."""
    of = base_of(race)
    assert of is not None
    (table,) = tables(Results("", "", {"peak_flops": {}}, [*race]))
    ratios = {line[0]: " ".join(line[2:4]).strip() for line in table.races[0].lines}
    others = [f"{name} {text}" for name, text in ratios.items() if name != of.competitor and text]
    where = label(of.cells)
    return f"{where}: {of.competitor} {amount_text(of, of.amount)}, {', '.join(others)}"


def heading(out: Path) -> str:
    """The device and its versions in a line."""
    machine = next((row for row in rows_of(out, MACHINE) if "platform" in row), None)
    machine = machine or next((x.machine for x in benches(out).values()), None)
    if machine is None:
        return "a device of which nothing is known: the first part broke, or had no time"
    count = f"{machine['devices']} x " if machine.get("devices", 1) > 1 else ""
    memory = machine.get("memory")
    size = f", {memory / 2**30:.0f} GiB of memory" if memory else ""
    versions = ", ".join(f"{name} {x}" for name, x in machine["versions"].items())
    return (
        f"{count}{bench_page.name_of_device(machine)}{size}; Python {machine['python']}, {versions}"
    )


def markdown(out: Path, names: Sequence[str], verdict: str) -> str:
    """The report: device, versions and verdict, then what each part found."""
    parts = [f"## {heading(out)}", f"**{verdict}**"]
    parts.append(_markdown.table(["part", "what it had"], summary(out, names)).rstrip())
    wrong = wrong_lines(out)
    if wrong:
        more = [f"* and {len(wrong) - MAX_WRONG_LINES} more, in the files"]
        parts.append(
            "### What is wrong\n\nEach of these is a fault of this library or of a kernel that it "
            "calls: please open an issue with this folder. Until it is mended, `backend=` or "
            "`use_backend` names another."
        )
        lines = [f"* {line}" for line in wrong[:MAX_WRONG_LINES]]
        parts.append("\n".join(lines + more * (len(wrong) > MAX_WRONG_LINES)))
    for part, by in (("layers", ("dtype",)), ("requests", ("backend", "dtype"))):
        counts = _counts(rows_of(out, part), by)
        if counts:
            parts.append(f"### {part.capitalize()}\n\n{SHARE}\n\n{counts}")
    for name, results in benches(out).items():
        parts += [f"### {name.capitalize()}", bench_page.machine_of(results)]
        parts += bench_page.body(results)
    lines = left_out(out)
    parts += ["### Left out", "\n".join(f"* {line}" for line in lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def _counts(rows: Sequence[dict[str, Any]], by: tuple[str, ...]) -> str:
    """A table of the numbers of rows by verdict, and the largest share."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        if "verdict" in row and all(name in row for name in by):
            groups.setdefault(tuple(row[name] for name in by), []).append(row)
    verdicts = ("equal", "different", "failed", "refuses")
    lines = []
    for key, group in sorted(groups.items()):
        share = max((row.get("share", 0.0) for row in group), default=0.0)
        counts = [str(sum(row["verdict"] == verdict for row in group)) for verdict in verdicts]
        lines.append([*key, *counts, f"{share:.2f}"])
    return _markdown.table([*by, *verdicts, "share"], lines).rstrip() if lines else ""
