"""`flax-attn check-device`: runs each part within its time limit, and writes a report."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .._internal.nearest import did_you_mean
from ..device_check.part import PARTS
from ..device_check.task import Task, rows_of
from .options import check_folder, made_folder
from .wrap import wrapped

if TYPE_CHECKING:
    from rich.console import Console

    from .._internal.progress import Progress

MINUTES = {False: 8.0, True: 2.0}  # default duration, keyed by `small`
RESERVED = 5.0  # seconds reserved for the report
GRACE_SECONDS = 5.0  # seconds that a part may exceed its limit before it is killed
FIRST = "machine"
WORDS = {"refuses": "not served"}
REPORT, LOG = "report.md", "check-device.log"
# Several processes share one GPU, so none may preallocate its memory.
SETTINGS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
# Otherwise XLA autotunes every matrix product, which takes longer than everything else.
QUICK = {"layers": "--xla_gpu_autotune_level=0", "requests": "--xla_gpu_autotune_level=0"}


def check_device(options: argparse.Namespace, console: "Console", progress: "Progress") -> int:
    """Runs every part.

    Returns:
      0 if everything that was tried is equal, 1 if something differs or failed, 2 if too little was
      tried: nothing is proven, fewer than half of the layers ran, or no request did.

    Raises:
      ValueError: for a duration that is not positive, or an unwritable or non-empty folder.
    """
    minutes = MINUTES[options.small] if options.minutes is None else options.minutes
    if not minutes > 0:
        raise ValueError(f"--minutes takes a number above 0; got {minutes:g}.")
    parts = _chosen(options.only)
    out = _folder(options.out)
    until = time.time() + 60 * minutes - RESERVED
    progress.begin(len(parts))
    for task in _tasks(parts, out, until, options.small):
        progress.at(task.part)
        _run(task)
        _write_page(out)
        progress.write_line(_summary(task))
        progress.advance()
    text, wrong = _write_page(out)
    missing = too_little(out, parts)
    last = f"wrote {out}: to share these results, send the folder"
    if missing:
        last = f"wrote {out}. Too little was tried: {missing}; give it more time by --minutes"
    console.out(f"\n{text}\n{wrapped(last, console.width)}", highlight=False)
    return 1 if wrong else 2 if missing else 0


def too_little(out: Path, parts: Sequence[str]) -> str:
    """What of these parts had no time, if their results say little about the device; "" if not."""
    from ..device_check.page import timed_rows

    rows = [row for part in PARTS for row in (*rows_of(out, part), *timed_rows(out, part))]
    layers = {row["layer"]: row["of"] for row in rows if "layer" in row}
    if "layers" in parts and not layers:
        return "no layer"
    if layers and len(layers) < max(layers.values()) / 2:
        return f"{len(layers)} of {max(layers.values())} layers"
    if "requests" in parts and not any("request" in row for row in rows):
        return "no request"
    proven = any(row.get("verdict") in ("equal", "timed") for row in rows)
    return "" if proven else "nothing was proven"


def _write_page(out: Path) -> tuple[str, int]:
    """Rewrites the report; returns its text and the number of wrong rows."""
    from ..device_check import page

    text, wrong = page.markdown(out), page.count_wrong(out)
    (out / REPORT).write_text(text, "utf-8")
    return text, wrong


def _folder(name: str) -> Path:
    """Creates the folder of `--out` if needed; raises ValueError if it is not empty."""
    out = made_folder("--out", name)
    check_folder("--out", out)
    if any(out.iterdir()):
        raise ValueError(f"--out {name} is not empty: name a new folder.")
    return out


def _chosen(only: str | None) -> list[str]:
    """The requested parts, and the first one, which describes the machine to the others.

    Raises:
      ValueError: for an unknown part.
    """
    names = [*PARTS] if only is None else only.split(",")
    for name in names:
        if name not in PARTS:
            raise ValueError(
                f"--only has no part {name!r}: {did_you_mean(name, PARTS, 'they are')}"
            )
    return [name for name in PARTS if name in names or name == FIRST]


def _tasks(parts: Sequence[str], out: Path, until: float, small: bool) -> Iterator[Task]:
    """Yields the parts, each with its share of the time left when it starts."""
    shares = {name: PARTS[name][1] for name in parts}
    for name in parts:
        share = shares[name] / sum(shares.values())
        del shares[name]
        now = time.time()
        yield Task(out, name, now + share * max(0.0, until - now), small)


def _run(task: Task) -> None:
    """Runs a part in a process, and kills it if it exceeds its time."""
    from ..device_check.page import timed_rows  # imports JAX, as in the functions below

    arguments = [task.part, str(task.out), str(task.until), *(["small"] if task.small else [])]
    command = [sys.executable, "-m", "flax_attn.device_check.part", *arguments]
    with (task.out / LOG).open("a", encoding="utf-8") as log:
        log.write(f"== {task.part}\n")
        log.flush()
        settings = _settings(task.part)
        process = subprocess.Popen(
            command, env=settings, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(task.seconds_left + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            begun = rows_of(task.out, task.part) or timed_rows(task.out, task.part)
            what = f"the rest of {task.part}" if begun else f"{task.part}, all of it"
            task.leave_out(what, "it was still at work when its time was over")
            return
        finally:
            _end(process)
    if code:
        text = f"its process ended with exit code {code}; {LOG} has what it printed"
        task.write(verdict="failed", what=task.part, text=text)


def _end(process: subprocess.Popen) -> None:
    """Kills a process and its children."""
    import signal

    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    else:
        process.kill()
    process.wait()


def _settings(part: str) -> Mapping[str, str]:
    """Environment variables of a part's process."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICK.get(part, '')}".strip()
    return {**SETTINGS, **os.environ, **({"XLA_FLAGS": flags} if flags else {})}


def _summary(task: Task) -> str:
    """One line about a finished part."""
    from ..device_check.page import timed_rows

    counts: dict[str, int] = {}
    for row in [*rows_of(task.out, task.part), *timed_rows(task.out, task.part)]:
        verdict = str(row.get("verdict", "measured"))
        verdict = WORDS.get(verdict, verdict)
        counts[verdict] = counts.get(verdict, 0) + 1
    return f"{task.part}: " + (", ".join(f"{n} {word}" for word, n in counts.items()) or "nothing")
