"""`flax-attn bench`: reads the options, runs the benchmark, shows and writes the results."""

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from .._internal.nearest import did_you_mean
from .._internal.progress import Progress
from ..bench import decode, functions, layers, linear, page, plot, published, scale, twins
from ..bench.brief import BriefStream
from ..bench.competitor import FAMILIES, Competitor
from ..bench.machine import machine
from ..bench.options import BenchOptions, read_options
from ..bench.presets import Preset, presets
from ..bench.race import Race
from ..bench.result import Results, read, together
from ..bench.settings import Settings
from ..bench.stream import Stream
from ..bench.table import Table, compared, remarks, unfinished
from ..bench.workload import DELTA, FORWARD, LAYER, Workload
from .bench_show import Screen
from .options import check_file, made_folder


def bench(options: argparse.Namespace, console: Console) -> int:
    """Runs `flax-attn bench`: 0 if all competitors were equal, 1 if not, 130 if interrupted.

    Raises:
      ValueError: for invalid options.
    """
    want = read_options(options)
    preset = _preset(want)
    if preset.devices:
        code = scale.rerun_on_devices(_arguments(options), max(preset.devices))
        if code is not None:
            return code
    competitors, absent = _competitors(want, preset)
    old = None if options.compare is None else read(Path(options.compare))
    files = _files(options)
    works = preset.workloads(
        want.lengths, want.widths, want.masks, want.dtypes, want.heads, want.batch, want.extras
    )
    command = f"flax-attn bench {shlex.join(_without_files(sys.argv[2:]))}".strip()
    race, screen = _race(want, preset, competitors), Screen(console, options.all_figures)
    with Progress("flax-attn bench", console) as progress:
        results = Results(preset.title, command, machine(want.dtypes), absent=absent)
        earlier = _earlier(options.together, results)
        screen.print_text(page.machine_of(results))
        stream = screen.stream(results)
        run(works, _timed_passes(want, preset), race, stream, progress)
    comparison = [] if old is None else [compared(results, old)]
    if comparison and not comparison[0].rows:
        screen.print_text(f"nothing in {options.compare} was run here too")
        comparison = []
    whole = together([*earlier, results])
    screen.print_tables(comparison, whole, several=bool(earlier))
    screen.print_wide(stream.rest())
    screen.print_legend(results)
    for sentence in remarks(results):
        screen.print_text(sentence)
    for path in write(results, whole, files, want.preset, comparison):
        screen.print_text(f"wrote {path}")
    if not results.complete:
        screen.print_text("stopped; what was measured before is shown and written")
        return 130
    return 1 if any(row.status == "wrong" for row in results.rows) else 0


def _earlier(names: str | None, results: Results) -> list[Results]:
    """Reads the runs to show together with this one, and checks them before measuring."""
    earlier = [read(Path(name)) for name in (names or "").split(",") if name]
    together([*earlier, results])
    return earlier


def _without_files(args: Sequence[str]) -> list[str]:
    """The arguments without options that name files or choose tables, which change no result."""
    options, files = [], ("--json", "--markdown", "--png", "--out", "--together", "--compare")
    for before, arg in zip(["", *args], args, strict=False):
        if before not in files and arg.split("=")[0] not in (*files, "--all-figures"):
            options.append(arg)
    return options


def run(
    works: Sequence[Workload],
    passes: Sequence[str],
    race: Race | scale.CountRace,
    stream: Stream | BriefStream,
    progress: Progress,
) -> None:
    """Runs every workload and pass, adding rows to the results of `stream` and showing them.

    After Ctrl-C the results hold what was measured until then, and what was not.
    """
    results, wanted = stream.results, [(w, which) for w in works for which in passes]
    progress.begin(len(wanted))
    try:
        for w, which in wanted:
            race.run(w, which, results.rows, partial(_say_step, progress, w))
            stream.update()
            progress.advance()
        results.complete = True
    except KeyboardInterrupt:
        unfinished(results)
        results.missing = [f"{w}, {which}" for w, which in wanted[progress.done :]]
    stream.update()


def _say_step(progress: Progress, w: Workload, step: str) -> None:
    progress.at(f"T {w.length}: {step}")


def write(
    results: Results, whole: Results, files: dict[str, Path], preset: str, more: Sequence[Table]
) -> list[Path]:
    """Writes the requested files and returns their paths; the page shows all runs of `whole`."""
    written = []
    if "json" in files:
        results.write(files["json"])
        written.append(files["json"])
    if "markdown" in files:
        text = page.markdown(whole, list(more))
        page.write(files["markdown"], text, page.marks(results, preset))
        written.append(files["markdown"])
    if "png" in files:
        written += plot.plots(results, files["png"])
    return written


def _files(options: argparse.Namespace) -> dict[str, Path]:
    """Output files by kind; checks in advance that they can be written."""
    named = {k: v for k in ("json", "markdown", "png") if (v := getattr(options, k)) is not None}
    for name, file in named.items():
        check_file(f"--{name}", file)
    files = {name: Path(file) for name, file in named.items()}
    if options.out is not None:
        files = {**_in_folder(options.out), **files}
    if options.png and (reason := plot.absent()):
        raise ValueError(f"--png cannot be had: {reason}.")
    return files


def _in_folder(name: str) -> dict[str, Path]:
    """Creates the folder of `--out` and returns its files."""
    out = made_folder("--out", name)
    files = {"json": out / "bench.json", "markdown": out / "bench.md"}
    if plot.absent() is None:
        files["png"] = out / "bench.png"
    for path in files.values():
        check_file("--out", str(path))
    return files


def _preset(want: BenchOptions) -> Preset:
    known = presets()
    if want.preset not in known:
        raise ValueError(_no_such("preset", want.preset, [name for name in known if name]))
    preset = known[want.preset]
    if preset.steps is not None:
        _check_steps(want)
    if preset.models is not None:
        _check_models(want)
    if preset.devices:
        return replace(preset, devices=_device_counts(want) or preset.devices)
    if want.devices is not None:
        raise ValueError("--devices is for --preset scale.")
    if want.variant is None:
        return preset
    if preset.layer == DELTA:
        raise ValueError("--preset linear times one recurrence; --variant is for layers.")
    names = twins.variants()
    if want.variant not in names:
        raise ValueError(_no_such("variant", want.variant, names))
    layer = LAYER if want.variant in layers.OWN else want.variant
    book = replace(known["book"], layer=layer)
    if want.preset in ("", "book"):
        return book
    return replace(preset, layer=layer, against=book.against, masks=book.masks, window=None)


def _no_such(option: str, name: str, known: Iterable[str]) -> str:
    return f"--{option} does not take {name!r}: {did_you_mean(name, known, 'it takes')}"


def _check_steps(want: BenchOptions) -> None:
    """Raises ValueError for options that do not apply to decoding steps."""
    forward = want.passes[0] == FORWARD
    _check_only(
        replace(want, passes=BenchOptions.passes if forward else want.passes),
        ("lengths", "heads", "widths", "against", "rounds", "seconds"),
        "a step of decoding is causal, forward alone and in float32: --preset decode takes "
        "--seq, --heads, --width, --against, --rounds and --seconds.",
    )
    _check_one_width(want)


def _check_models(want: BenchOptions) -> None:
    """Raises ValueError for options that would change published layers."""
    _check_only(
        want,
        ("lengths", "passes", "against", "rounds", "seconds"),
        "a published layer has its own heads, widths and mask, and is run in float32: --preset "
        "layers takes --seq, --grad, --no-grad, --against, --rounds and --seconds.",
    )


def _device_counts(want: BenchOptions) -> tuple[int, ...] | None:
    """Numbers of devices; raises ValueError for options that do not apply without timing."""
    _check_only(
        want,
        ("lengths", "heads", "widths", "passes", "devices"),
        "nothing is timed over several devices, and attention is causal and in float32: "
        "--preset scale takes --seq, --heads, --width, --devices, --grad and --no-grad.",
    )
    _check_one_width(want)
    if want.devices is not None and min(want.devices) < 2:
        raise ValueError("--devices takes numbers from 2 on; one device is always there.")
    return want.devices


def _check_only(want: BenchOptions, allowed: Sequence[str], sentence: str) -> None:
    """Raises ValueError if other options than the preset and `allowed` are set."""
    if want != BenchOptions(**{name: getattr(want, name) for name in ("preset", *allowed)}):
        raise ValueError(sentence)


def _check_one_width(want: BenchOptions) -> None:
    if want.widths is not None and len(want.widths) > 1:
        raise ValueError(f"--preset {want.preset} takes one width; got {len(want.widths)}.")


def _arguments(options: argparse.Namespace) -> list[str]:
    """Converts parsed options back to command-line arguments."""
    values = {n.replace("_", "-"): x for n, x in vars(options).items() if n != "command"}
    arguments = []
    for name, value in values.items():
        if isinstance(value, bool):
            arguments += [f"--{name}"] if value else ["--no-grad"] if name == "grad" else []
        elif value is not None:
            arguments += [f"--{name}={value}"]
    return arguments


def _timed_passes(want: BenchOptions, preset: Preset) -> tuple[str, ...]:
    if preset.steps is not None:
        return (FORWARD,)
    return want.passes if preset.forward else want.passes[-1:]


def _race(
    want: BenchOptions, preset: Preset, competitors: Sequence[Competitor]
) -> Race | scale.CountRace:
    if preset.devices:
        return scale.CountRace()
    return Race(competitors, _race_settings(want, preset))


def _race_settings(want: BenchOptions, preset: Preset) -> Settings:
    budget = {"rounds": want.rounds, "seconds": want.seconds}
    return replace(preset.settings, **{k: v for k, v in budget.items() if v is not None})


def _competitors(want: BenchOptions, preset: Preset) -> tuple[list[Competitor], dict[str, str]]:
    """Available competitors, with this library's first, and why others are absent."""
    families = preset.against if want.against is None else want.against
    families = FAMILIES if families is None else () if families == ("none",) else families
    unknown = [name for name in families if name not in FAMILIES]
    if unknown:
        raise ValueError(_no_such("against", unknown[0], [*FAMILIES, "none"]))
    if preset.devices:
        every = []
    elif preset.steps is not None:
        every = decode.competitors()
    elif preset.models is not None:
        every = published.competitors()
    elif preset.layer:
        if want.backends != ("auto",):
            raise ValueError(
                "--backend is for attention alone; whole layers choose for themselves."
            )
        if want.extras != ("plain",):
            raise ValueError(
                "the layers that are compared are plain; --with is for attention alone."
            )
        if want.masks == ("full",):
            raise ValueError(
                "the layers that are compared are causal; --full is for attention alone."
            )
        if preset.layer == DELTA:
            every = linear.competitors()
        elif preset.layer == LAYER:
            every = [c for c in layers.book() if not c.is_ours or _wanted(c, want.variant)]
        else:
            every = twins.competitors(preset.layer)
    else:
        every = [
            *functions.flax_attn_competitors(_known_backends(want.backends)),
            *functions.others(),
        ]
    every = [c for c in every if c.is_ours or c.family in families]
    reasons = {c.family: reason for c in every if (reason := c.absent())}
    return [c for c in every if c.family not in reasons], reasons


def _wanted(competitor: Competitor, variant: str | None) -> bool:
    return variant is None or competitor.name == f"flax_attn.{layers.OWN[variant][0]}"


def _known_backends(names: Sequence[str]) -> tuple[str, ...]:
    known = functions.names_of_backends()
    for name in names:
        if name not in (*known, "all"):
            raise ValueError(_no_such("backend", name, [*known, "all"]))
    return known if "all" in names else tuple(names)
