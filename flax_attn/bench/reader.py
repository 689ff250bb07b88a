"""Reads results from JSON: of this format, and of the first, which 0.3.0 wrote.

The first goes with 0.6.0.
"""

import json
from pathlib import Path
from typing import Any

from .attention import Attention
from .book import Book
from .decode import Step
from .linear import Recurrence
from .published import MODELS, PublishedLayer
from .result import FORMAT, Results, Row
from .scale import Sharded
from .task import Task
from .twins import Twin

FORMAT_1 = "flax-attn bench, format 1"
KINDS = {None: Attention, "multi_head": Book, "gated delta rule": Recurrence}
FIGURES = ("compile_seconds", "first_seconds", "temporary")


def read(path: Path) -> Results:
    """Reads results written by `Results.write`, of this release or the last.

    Raises:
      ValueError: if there is no such file, or it has other contents.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file that flax-attn bench wrote.") from error
    readers = {FORMAT: _row, FORMAT_1: _row_1}
    reader = readers.get(str(document.get("format"))) if isinstance(document, dict) else None
    if reader is None:
        raise ValueError(f"{path} was not written by flax-attn bench ({FORMAT!r} is missing).")
    try:
        results = Results(document["title"], document["command"], document["machine"])
        results.rows = [reader(row) for row in document["rows"]]
        results.absent, results.complete = dict(document["absent"]), bool(document["complete"])
        results.missing = [*document.get("missing", ())]  # files of 0.2.0 have none
        results.wanted = document.get("wanted", 0)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has rows that flax-attn bench did not write.") from error
    return results


def _row(fields: dict[str, Any]) -> Row:
    return Row(**{name: fields[name] for name in Row.__dataclass_fields__ if name in fields})


def _row_1(fields: dict[str, Any]) -> Row:
    """Converts a row, whose task was a workload with a field for every kind."""
    workload, name = fields["workload"], fields["competitor"]
    task = task_of(workload, fields["which"])
    if workload.get("devices"):
        name = name if workload["devices"] == 1 else f"{workload['devices']} x {name}"
    row = Row.of(task, name, fields["family"])
    row.backend, row.status, row.reason = (fields[x] for x in ("backend", "status", "reason"))
    row.seconds = fields["seconds"]
    counts = {x: n for x, n in fields.get("counts", {}).items() if x != "sent" or n}
    hops = workload["devices"] - 1 if "sent" in counts else None
    row.note(**{x: fields[x] for x in FIGURES}, **(fields["proof"] or {}), **counts, hops=hops)
    return row


def task_of(workload: dict[str, Any], which: str) -> Task:
    """The task that a workload was, by the fields that were set."""
    shared = ("length", "width", "heads", "batch", "dtype", "seed")
    sizes = {**{name: workload[name] for name in shared}, "which": which}
    layer, window = workload["layer"], workload["window"]
    if workload["stored"]:
        more = {name: workload[name] for name in ("stored", "kv_heads", "store")}
        return Step(**sizes, **more, window=window)
    if workload.get("devices"):
        return Sharded(**sizes)
    if layer in MODELS:
        return PublishedLayer(**sizes, model=layer)
    if layer not in KINDS:
        return Twin(**sizes, layer=layer)
    more = {name: workload[name] for name in ("mask", "extra", "window") if layer is None}
    return KINDS[layer](**sizes, **more)
