"""The `flax-attn` command: `parity` compares, `bench` times, `explain` shows backends.

`record` saves torch's results, `identify` names the layer that a torch module is, `check-device`
runs everything on one machine. Slow modules are imported only when needed.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .._internal.versions import does_not_fit
from . import arguments, identify_command
from .options import Parser, Version, missing
from .wrap import wrapped

if TYPE_CHECKING:
    from rich.console import Console

BENCH = "time attention against others, each proven equal first"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      0 if everything is equal, 1 if something differs or nothing is proven, 2 on bad arguments,
      130 after Ctrl-C.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt_once)
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    finally:
        if argv is not None and before is signal.default_int_handler:  # called by a program
            signal.signal(signal.SIGINT, before)


def _interrupt_once(*_: object) -> None:
    """Raises KeyboardInterrupt; later Ctrl-C do not disturb the command as it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _dispatch(argv: Sequence[str]) -> int:
    if not missing() and (conflict := does_not_fit()):
        print(f"flax-attn: {conflict}", file=sys.stderr)
        return 2
    options = _parser(argv).parse_args(argv)
    if missing():
        print(missing(), file=sys.stderr)
        return 2
    from rich.console import Console

    from ..errors import ParityError

    console = Console(soft_wrap=True, emoji=False)
    try:
        return _run_command(options, console)
    except (ValueError, ModuleNotFoundError) as error:
        _say(Console(stderr=True), f"flax-attn {options.command}: {error}")
        return 2
    except ParityError as error:
        _say(console, str(error))
        return 1
    except KeyboardInterrupt:
        done = "measured" if options.command == "bench" else "proven"
        console.print(f"stopped; nothing is {done}")
        return 130


def _say(console: "Console", text: str) -> None:
    """Prints text that is wrapped at words."""
    console.out(wrapped(text, console.width), highlight=False)


def _run_command(options: argparse.Namespace, console: "Console") -> int:
    """Runs the chosen command, of which the modules are imported here."""
    from .._internal.progress import Progress

    match options.command:
        case "bench":
            from .bench_command import bench

            return bench(options, console)
        case "check-device":
            from .check_device_command import check_device

            with Progress("flax-attn check-device", console) as progress:
                return check_device(options, console, progress)
        case "explain":
            from .explain_command import explained

            _say(console, explained(options))
            return 0
        case "identify":
            return identify_command.identify(options, console)
        case "record":
            from ..parity.cases.home import OWN
            from .record_command import recorded

            with Progress("flax-attn record", console) as progress:
                return recorded(OWN, options.names, Path(options.to), progress)
        case _:
            from .parity_command import parity

            return parity(options, console)


def _parser(argv: Sequence[str]) -> Parser:
    parser = Parser(prog="flax-attn", description="Attention in JAX that can be trusted.")
    parser.add_argument("--version", action=Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True)
    parser.commands = commands.choices
    arguments.add_parity(commands)
    arguments.add_record(commands)
    identify_command.add_to(commands)
    arguments.add_explain(commands)
    arguments.add_check_device(commands)
    if "bench" in argv:  # its options are slow to import
        from ..bench.options import add_to

        add_to(commands)
    else:
        commands.add_parser("bench", help=BENCH)
    return parser


if __name__ == "__main__":  # for `python -m flax_attn.command.cli`
    raise SystemExit(main())
