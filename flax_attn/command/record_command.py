"""`flax-attn record`: records torch's results for each case in its own file."""

import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from .._internal.progress import Progress
from ..parity.cases.home import file_of, has_torch
from ..parity.cases.prove import jobs, record_one
from ..parity.cases.selection import is_package, select_cases
from ..parity.cases.workers import Failure, Workers
from .options import check_folder, made_folder
from .wrap import wrapped

MAX_NAME_LENGTH = 120  # of a file name, without its extension


def recorded(library: str, names: Sequence[str], folder: Path, progress: Progress) -> int:
    """Records the cases selected by `names`.

    Args:
      library: the package of this library's cases.
      names: the command's arguments.
      folder: the output folder; it is made if there is none.
      progress: reports progress and written files.

    Returns:
      0 if everything was recorded, else 1.

    Raises:
      ValueError: without torch, for a folder that cannot be made, or for an unknown name.
    """
    if not has_torch():
        raise ValueError("record needs torch: pip install 'flax-attn[torch]'.")
    wanted = [piece for name in names for piece in pieces(name)]
    with Workers() as workers:
        selection = select_cases(library, wanted, workers)
        check_folder("--to", made_folder("--to", str(folder)))
        work = [(job, folder / file_name(job.listed.title)) for job in jobs(selection.cases, True)]
        failures = [f"{name}: {failure.text}" for name, failure in selection.failed]
        progress.begin(len(work))
        for (job, _), result in zip(work, workers.map(record_one, work), strict=True):
            progress.advance()
            if isinstance(result, Failure):
                failures.append(f"{job.listed.title}: not recorded: {result.text}")
            else:
                progress.write_line(f"recorded {result}")
    for failure in failures:
        progress.write_line(wrapped(failure, progress.console.width))
    return 1 if failures or not work else 0


def pieces(name: str) -> list[str]:
    """Splits a class's import path into the package that has its cases, and the class name.

    >>> pieces("flax_attn.GroupedQueryAttention"), pieces("grouped_query")
    (['GroupedQueryAttention'], ['grouped_query'])
    """
    package, _, last = name.rpartition(".")
    if not package or file_of(name) is not None or not last[:1].isupper():
        return [name]
    if package.partition(".")[0] == "flax_attn":
        return [last]
    return [package, last] if is_package(package) else [name]


def file_name(title: str) -> str:
    """File name for a case: its title, restricted to portable characters.

    >>> file_name("linear[width=4|x=3x4|torch.nn.Linear]")
    'linear-width=4-x=3x4-torch.nn.Linear.safetensors'
    """
    plain = re.sub(r"[^\w.=,]+", "-", title).strip("-")
    if len(plain) > MAX_NAME_LENGTH:
        plain = f"{plain[:MAX_NAME_LENGTH]}-{zlib.crc32(title.encode()):08x}"
    return f"{plain}.safetensors"
