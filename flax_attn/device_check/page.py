"""The report: a Markdown section built from the files that the parts wrote."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._internal import markdown as _markdown
from ..bench import page as bench_page
from ..bench.result import Results, read
from .part import PARTS
from .task import LEFT_OUT, rows_of

Row = dict[str, Any]
WRONG = ("different", "failed")
BENCHES = ("flash", "decode")
MAX_WRONG_LINES = 20  # listed in the report; the files contain all


def markdown(out: Path) -> str:
    """Formats the section of one device: correctness, speed, memory and what was left out."""
    parts = [_heading(out), _right(out), _wrong(out), _fast(out), _memory(out), _left_out(out)]
    return "\n\n".join(filter(None, parts)) + "\n"


def count_wrong(out: Path) -> int:
    """Number of rows that differ or failed; in benchmarks, only this library's rows."""
    wrong = sum(row.get("verdict") in WRONG for part in PARTS for row in rows_of(out, part))
    return wrong + sum(row.status == "wrong" and row.family == "flax_attn" for row in _timed(out))


def _timed(out: Path) -> list[Any]:
    return [row for results in _benches(out) for row in results.rows]


def timed_rows(out: Path, part: str) -> list[Row]:
    """Verdicts of the benchmarks, which have separate files, if `part` is "speed"."""
    return [{"verdict": row.status} for row in _timed(out)] if part == "speed" else []


def _benches(out: Path) -> list[Results]:
    files = (out / f"{name}.json" for name in BENCHES)
    return [read(file) for file in files if file.exists()]


def _heading(out: Path) -> str:
    rows = [row for row in rows_of(out, "machine") if "platform" in row]
    if not rows:
        return "## A device of which nothing is known\n\nThe first part broke, or had no time."
    facts = rows[0]
    results = Results("", "flax-attn check-device", facts)
    count = f"{facts['devices']} x " if facts["devices"] > 1 else ""
    free = (
        f" JAX may use {facts['memory'] / 2**30:.0f} GiB of its memory." if facts["memory"] else ""
    )
    return f"## {count}{name_of(facts)}\n\n{bench_page.machine_of(results)}{free}"


def name_of(facts: Row) -> str:
    """The accelerator's name, or the processor's."""
    return facts["device"] if facts["platform"] != "cpu" else facts["processor"]


def _right(out: Path) -> str:
    """Formats the tables of the compared layers and requests."""
    layers = _counts(rows_of(out, "layers"), ("dtype",))
    backends = _counts(rows_of(out, "requests"), ("backend", "dtype"))
    text = ["### Is it right?"]
    if layers:
        count = len({row["layer"] for row in rows_of(out, "layers") if "layer" in row})
        text.append(
            f"**{count} layers** against what PyTorch gave for them when it was recorded: outputs, "
            "intermediate values and gradients. Float32 products are IEEE products. *Share* is the "
            "largest error divided by its limit, a few times PyTorch's own error: below 1 passes."
        )
        text.append(_table(("dtype",), layers))
    if backends:
        count = len({row["request"] for row in rows_of(out, "requests") if "request" in row})
        text.append(
            f"**{count} requests** to every backend: masks, scores, sinks, dropout and sizes drawn "
            "by a seed, outputs and gradients against the plain formula in float64. *Share* is the "
            "largest error divided by its limit, a few times the error of the plain formula in the "
            "same dtype: below 1 passes. What a backend refuses, another one serves."
        )
        served = {row[0] for row, entry in backends.items() if set(entry) - {"share", "refuses"}}
        shown = {key: entry for key, entry in backends.items() if key[0] in served}
        text.append(_table(("backend", "dtype"), shown))
        others = dict.fromkeys(name for name, _ in backends if name not in served)
        if others:
            text.append(f"Not for this device or its packages: {', '.join(others)}.")
    return "\n\n".join(text) if len(text) > 1 else ""


def _counts(rows: Sequence[Row], by: tuple[str, ...]) -> dict[tuple, Row]:
    """Number of rows per verdict, and the largest share, grouped by these fields."""
    counts: dict[tuple, Row] = {}
    for row in rows:
        if row.get("verdict") == LEFT_OUT or any(name not in row for name in by):
            continue
        key = tuple(row[name] for name in by)
        entry = counts.setdefault(key, {"share": 0.0})
        entry[row["verdict"]] = entry.get(row["verdict"], 0) + 1
        entry["share"] = max(entry["share"], row.get("share", 0.0))
    return counts


def _table(by: Sequence[str], counts: dict[tuple, Row]) -> str:
    verdicts = ("equal", *WRONG, "refuses")
    always = ("equal", "different")
    shown = [v for v in verdicts if v in always or any(v in entry for entry in counts.values())]
    rows = [
        [*key, *(str(entry.get(v, 0)) for v in shown), f"{entry['share']:.2f}"]
        for key, entry in sorted(counts.items())
    ]
    return _markdown.table([*by, *shown, "share"], rows).rstrip("\n")


def _wrong(out: Path) -> str:
    """Lists the rows that differ or failed."""
    lines = []
    for part in PARTS:
        for row in rows_of(out, part):
            if row.get("verdict") in WRONG:
                text = " ".join(str(row.get("text", "")).split())[:400]
                lines.append(f"* {part}: {_subject(row)} {row['verdict']}: {text}")
    more = (
        [f"* ... and {len(lines) - MAX_WRONG_LINES} more, in the files"]
        if len(lines) > MAX_WRONG_LINES
        else []
    )
    advice = (
        "Each of these is a fault of this library or of a kernel that it calls: please open an "
        "issue with this folder. Until it is mended, `backend=` or `use_backend` names another."
    )
    return (
        "\n".join(["**What is wrong**", "", advice, "", *lines[:MAX_WRONG_LINES], *more])
        if lines
        else ""
    )


def _subject(row: Row) -> str:
    names = ("case", "words", "backend", "dtype", "way", "T", "what")
    return ", ".join(dict.fromkeys(str(row[name]) for name in names if name in row))


def _fast(out: Path) -> str:
    """The tables of `flax-attn bench`: ratios, then every figure."""
    parts = [part for results in _benches(out) for part in bench_page.body(results)]
    ratio = (
        "A ratio is a competitor's time over that of flax_attn: 2x takes twice as long. *Of peak* "
        "is the share of the rate that a large matrix product reaches here, *of limit* and *of "
        "bandwidth* that of what the vendor publishes, and *limit / time* compares with the time "
        "that it takes to read the cache once."
    )
    return "\n\n".join(["### Is it fast?", ratio, *parts]) if parts else ""


def _memory(out: Path) -> str:
    """Formats temporary bytes at T and 2T; linear growth is 2x, quadratic 4x."""
    rows = [row for row in rows_of(out, "memory") if "temporary" in row]
    if not rows:
        return ""
    cells = []
    for way in dict.fromkeys(row["way"] for row in rows):
        measured = sorted((row for row in rows if row["way"] == way), key=lambda row: row["T"])
        growth = "-"
        if len(measured) > 1 and measured[0]["temporary"] and measured[1]["temporary"]:
            growth = f"{measured[1]['temporary'] / measured[0]['temporary']:.1f}x"
        sizes = [_mebibytes(row["temporary"]) for row in measured]
        peaks = [_mebibytes(row["peak"]) for row in measured]
        cells.append([way, " / ".join(sizes), growth, " / ".join(peaks)])
    lengths = " / ".join(f"{n}" for n in sorted({row["T"] for row in rows}))
    text = (
        f"Causal attention of four heads of width {rows[0]['H']} in {rows[0]['dtype']}, both "
        f"passes, for {lengths} tokens, in MiB: temporary memory of the compiled program, how it "
        "grows, and the most that the device has held."
    )
    table = _markdown.table(["backend", "temporary", "growth", "most held"], cells)
    return f"### Memory\n\n{text}\n\n{table}".rstrip("\n")


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.4g}"


def _left_out(out: Path) -> str:
    """Lists what was not run, and why."""
    rows = [row for part in PARTS for row in rows_of(out, part)]
    lines = [f"* {r['what']}: {r['reason']}" for r in rows if r.get("verdict") == LEFT_OUT]
    return "\n".join(["### Left out", "", *lines]) if lines else ""
