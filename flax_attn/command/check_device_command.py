"""`flax-attn check-device`: three commands in a row, each in its time, and a report.

PyTorch's recorded results, requests to every backend, and `flax-attn bench`: each is a process of
its own that leaves what it has found, so that a crash or the end of its time loses nothing. The
command itself computes nothing, so that each can use the whole device.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .._internal.nearest import did_you_mean
from ..device_check.part import MACHINE, MODULES, Part, rows_of
from .options import check_folder, made_folder
from .wrap import wrapped

if TYPE_CHECKING:
    from rich.console import Console

    from .._internal.progress import Progress

MINUTES = {False: 8.0, True: 2.0}  # default duration, keyed by `small`
RESERVED = 5.0  # seconds reserved for the report
GRACE_SECONDS = 10.0  # seconds that a part may exceed its time before it is killed
REPORT, LOG = "report.md", "check-device.log"
DEVICE_FILE = "device.json"
# The parts in order, each with its share of the time.
SHARES = {"layers": 0.28, "requests": 0.22, "speed": 0.25, "decoding": 0.15, "memory": 0.10}
# The options of `flax-attn bench`, in full and in small.
BENCH = {
    "speed": (
        "--preset flash --causal --width 128 --heads 8 --batch 1 --seq 1k,4k,16k --dtype bf16 "
        "--backend auto,blockwise,tokamax --against jax.nn,torch --rounds 7 --seconds 2",
        "--causal --width 32 --heads 2 --batch 1 --seq 128,256 --backend auto,blockwise "
        "--against jax.nn,torch --rounds 7 --seconds 1",
    ),
    "decoding": (
        "--preset decode --seq 1k,8k,32k --heads 16 --width 128 --against torch --rounds 7",
        "--preset decode --seq 128,512 --heads 4 --width 16 --against torch --rounds 7 --seconds 1",
    ),
    "memory": (
        "--preset memory --seq 8k,16k --heads 4 --width 128 --dtype bf16 "
        "--backend auto,blockwise,reference --against jax.nn",
        "--preset memory --seq 1k,2k --heads 4 --width 16 --against jax.nn",
    ),
}
# Several processes share one GPU, so none may preallocate its memory.
SETTINGS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
# Otherwise XLA autotunes every matrix product, which takes longer than everything else.
QUICK = "--xla_gpu_autotune_level=0"


def check_device(options: argparse.Namespace, console: "Console", progress: "Progress") -> int:
    """Runs every part.

    Returns:
      0 if everything that was tried is equal, 1 if something differs or failed, 2 if too little was
      tried: nothing is proven, fewer than half of the layers ran, or no request did.

    Raises:
      ValueError: for a duration that is not positive, or an unwritable or non-empty folder.
    """
    from ..device_check import page

    minutes = MINUTES[options.small] if options.minutes is None else options.minutes
    if not minutes > 0:
        raise ValueError(f"--minutes takes a number above 0; got {minutes:g}.")
    names = _chosen(options.only)
    out = _folder(options.out)
    until = time.time() + 60 * minutes - RESERVED
    progress.begin(len(names))
    for part in _parts(names, out, until, options.small):
        progress.at(part.name)
        _run(part)
        (out / REPORT).write_text(page.markdown(out, names, verdict(out, names)), "utf-8")
        _leave_device_file(out)
        ((name, text),) = page.summary(out, [part.name])
        progress.write_line(wrapped(f"{name}: {text}", console.width))
        progress.advance()
    lines = [f"\n{page.heading(out)}", verdict(out, names), ""]
    lines += [f"{name:10}{text}" for name, text in page.summary(out, names)]
    lines += [f"wrong     {line}" for line in page.wrong_lines(out)[:5]]
    lines += [f"left out  {line}" for line in page.left_out(out)]
    lines.append(f"\nwrote {out / REPORT}: to share these results, send the folder")
    if (out / DEVICE_FILE).exists():
        lines.append(f"wrote {out / DEVICE_FILE}: for flax_attn.use_device_file on this device")
    for line in lines:
        console.out(wrapped(line, console.width), highlight=False)
    return 1 if page.wrong_lines(out) else 2 if too_little(out, names) else 0


def verdict(out: Path, names: Sequence[str]) -> str:
    """What is known of this device after these parts, in a sentence."""
    from ..device_check import page

    count, missing = len(page.wrong_lines(out)), too_little(out, names)
    if count:
        return f"Not right on this device: {count} results differ or failed."
    if missing:
        return f"Too little was tried: {missing}; give it more time by --minutes."
    return "Everything that was tried is equal."


def too_little(out: Path, names: Sequence[str]) -> str:
    """What of these parts had no time, if their results say little about the device; "" if not."""
    from ..device_check import page

    rows = [row for part in MODULES for row in rows_of(out, part)]
    layers = {row["layer"]: row["of"] for row in rows if "layer" in row}
    if "layers" in names and not layers:
        return "no layer"
    if layers and len(layers) < max(layers.values()) / 2:
        return f"{len(layers)} of {max(layers.values())} layers"
    if "requests" in names and not any("request" in row for row in rows):
        return "no request"
    verdicts = {row.get("verdict") for row in rows}
    verdicts |= {row.status for results in page.benches(out).values() for row in results.rows}
    return "" if verdicts & {"equal", "timed", "measured"} else "nothing was proven"


def _leave_device_file(out: Path) -> None:
    """Writes what the requests have proven so far, if anything, for `use_device_file`."""
    from ..backends import device_file

    machine = next((row for row in rows_of(out, MACHINE) if "device" in row), None)
    names = ("kind", "words", "backend", "forward", "backward")
    rows, proven = rows_of(out, "requests"), []
    times = {(row["timed"], row["backend"]): row["times"] for row in rows if "timed" in row}
    for row in rows:
        if "request" in row and "kind" in row and row["verdict"] != "refuses":
            proven.append({name: row[name] for name in names if name in row})
            proven[-1]["times"] = times.get((row["request"], row["backend"]), {})
    if machine is not None and proven:
        device_file.write(out / DEVICE_FILE, machine["device"], machine["capability"], proven)


def _folder(name: str) -> Path:
    """Creates the folder of `--out` if needed; raises ValueError if it is not empty."""
    out = made_folder("--out", name)
    check_folder("--out", out)
    if any(out.iterdir()):
        raise ValueError(f"--out {name} is not empty: name a new folder.")
    return out


def _chosen(only: str | None) -> list[str]:
    """The requested parts, in order; raises ValueError for one that is unknown."""
    names = [*SHARES] if only is None else only.split(",")
    for name in names:
        if name not in SHARES:
            known = did_you_mean(name, SHARES, "they are")
            raise ValueError(f"--only has no part {name!r}: {known}")
    return [name for name in SHARES if name in names]


def _parts(names: Sequence[str], out: Path, until: float, small: bool) -> Iterator[Part]:
    """Yields the parts, each with its share of the time left when it starts."""
    for i, name in enumerate(names):
        now, rest = time.time(), sum(SHARES[x] for x in names[i:])
        yield Part(out, name, now + SHARES[name] / rest * max(0.0, until - now), small)


def _run(part: Part) -> None:
    """Runs a part in a process; when its time is over it gets Ctrl-C, and is killed if late."""
    results = part.out / f"{part.name}.json"
    if part.name in BENCH:
        options = BENCH[part.name][part.small].split()
        command = ["flax_attn", "bench", *options, "--json", str(results)]
    else:
        small = ["small"] if part.small else []
        command = ["flax_attn.device_check.part", part.name, part.out, part.until, *small]
    with (part.out / LOG).open("a", encoding="utf-8") as log:
        log.write(f"== {part.name}\n")
        log.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", *map(str, command)],
            env=_settings(part.name),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = _code(process, part)
        finally:
            _end(process)
    if code is None:
        part.leave_out(f"the rest of {part.name}", "it was still at work when its time was over")
    elif code == 130 and not results.exists():
        part.leave_out(f"all of {part.name}")
    elif code not in (0, 130) and not (part.name in BENCH and code == 1):
        text = f"its process ended with exit code {code}; {LOG} has what it printed"
        part.write(verdict="failed", what=part.name, text=text)


def _code(process: subprocess.Popen, part: Part) -> int | None:
    """The exit code of a part's process; None if it did not end in time."""
    for seconds in (max(0.0, part.seconds_left), GRACE_SECONDS):
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            if part.name in BENCH:
                process.send_signal(signal.SIGINT)  # it keeps what was measured
    return None


def _end(process: subprocess.Popen) -> None:
    """Kills a process and its children."""
    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    else:
        process.kill()
    process.wait()


def _settings(name: str) -> Mapping[str, str]:
    """Environment variables of a part's process."""
    quick = QUICK if name in MODULES else ""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {quick}".strip()
    return {**SETTINGS, **os.environ, **({"XLA_FLAGS": flags} if flags else {})}
