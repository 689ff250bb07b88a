"""Workers: processes that work for the command, so that no case can end it or another case."""

import importlib
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from ...errors import ParityError

A = TypeVar("A")
B = TypeVar("B")
HOME = os.path.dirname(sys.modules[__name__.partition(".")[0]].__file__ or "")
IMPORTS = os.path.dirname(importlib.__file__)
LARGEST = 1.1 * 2**30  # bytes; a larger worker is replaced, since jax keeps all that it compiled
SAFE = "PYTHONSAFEPATH"  # keeps the current folder from the front of a new process's path


@dataclass(frozen=True)
class Failure:
    """What came of a piece of work that raised, exited or killed its process.

    Attributes:
      text: what happened, without a subject.
      about: whose failure it is, where that is not known to who asked.
    """

    text: str
    about: str = ""


@dataclass(frozen=True)
class LastResult:
    """The result of a process that is to do nothing more: a kernel has broken its device, say."""

    result: Any


def attempt(work: Callable[[A], B], item: A) -> B | Failure:
    """The result of `work`, or what it raised, `SystemExit` included."""
    try:
        return work(item)
    except ParityError as error:
        return Failure(str(error))
    except BaseException as error:
        return Failure(_error_text(error))


class Workers:
    """Processes that take work one piece at a time; one that dies is named and replaced.

    Of two modules of one name they import what Python would without them: the folders here and the
    current folder come last. One that has grown large is replaced too.

    Attributes:
      most: how many there may be.
      folders: where they look for modules that are nowhere else, before the current folder.
      settings: environment variables of theirs.
    """

    def __init__(self, most: int = 1, settings: Mapping[str, str] | None = None):
        self.most = most
        self.folders: tuple[str, ...] = ()
        self.settings = dict(settings or {})
        self._idle: list[_Worker] = []
        self._busy: dict[_Worker, int] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in (*self._idle, *self._busy):
            worker.process.kill()
        for worker in (*self._idle, *self._busy):
            worker.end()
        self._idle, self._busy = [], {}

    def add_path(self, folder: str) -> None:
        """Modules are looked for in a folder too, by those who start from now on."""
        self.folders = (folder, *self.folders)
        self._drop_idle()

    def start(self, count: int) -> None:
        """Starts processes that will be wanted soon, so that they are ready by then."""
        while len(self._idle) < count:
            self._idle.append(self._new())

    def call(self, work: Callable[[A], B], item: A) -> B | Failure:
        """One piece of work."""
        return next(self.map(work, [item]))

    def map(self, work: Callable[[A], B], items: Sequence[A]) -> Iterator[B | Failure]:
        """The results in order. `work` and `items` are sent, so they must be picklable."""
        waiting = deque(range(len(items)))
        done: dict[int, B | Failure] = {}
        many = max(1, min(self.most, len(items) // 2))
        for at in range(len(items)):
            while at not in done:
                while waiting and len(self._busy) < many:
                    self._assign(waiting.popleft(), work, items)
                for worker, result in self._results():
                    i = self._busy.pop(worker)
                    if isinstance(result, LastResult):
                        done[i] = result.result
                        worker.end()
                    elif not isinstance(result, _WorkerDied):
                        done[i] = result
                        self._keep(worker)
                    elif worker.served > 1:  # what it did before may have killed it: once more
                        waiting.appendleft(i)
                        self._drop_idle()
                    else:
                        done[i] = Failure(result.text)
            yield done.pop(at)

    def _assign(self, i: int, work: Callable[[A], B], items: Sequence[A]) -> None:
        worker = self._idle.pop() if self._idle else self._new()
        try:
            worker.assign(work, items[i])
        except OSError:  # it died while it waited
            worker.end()
            worker = self._new()
            worker.assign(work, items[i])
        self._busy[worker] = i

    def _new(self) -> "_Worker":
        return _Worker(self.folders, self.settings)

    def _keep(self, worker: "_Worker") -> None:
        """For the next piece of work, unless it has grown large."""
        if worker.size > LARGEST:
            worker.end()
        else:
            self._idle.append(worker)

    def _results(self) -> Iterator[tuple["_Worker", Any]]:
        """What workers have sent, and which of them are dead."""
        ready = wait([worker.pipe for worker in self._busy], timeout=1.0)
        for worker in list(self._busy):
            if worker.pipe in ready or not worker.process.is_alive():
                yield worker, worker.result()

    def _drop_idle(self) -> None:
        """So that the next piece of work gets a new process."""
        for worker in self._idle:
            worker.end()
        self._idle = []


@dataclass(frozen=True)
class _WorkerDied:
    text: str


class _Worker:
    """One process; Ctrl-C does not reach it, whoever started it ends it.

    Attributes:
      served: how many pieces of work it was given.
      size: the largest memory that it has had, in bytes; 0 where that is not told.
    """

    def __init__(self, folders: tuple[str, ...], settings: Mapping[str, str]) -> None:
        context = get_context("spawn")
        self.pipe, child_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(child_end, folders, dict(settings)))
        self.served, self.size = 0, 0
        with _without_interrupts(), _safe_path():
            self.process.start()
        child_end.close()

    def assign(self, work: Callable[..., Any], item: Any) -> None:
        self.pipe.send((work, item))
        self.served += 1

    def result(self) -> Any:
        try:
            if self.pipe.poll():
                result, self.size = self.pipe.recv()
                return result
        except (EOFError, OSError):
            pass
        self.end()
        code = self.process.exitcode or 0
        if code < 0:
            return _WorkerDied(f"its process was killed by {_name_of(-code)}")
        return _WorkerDied(f"it ended its process with exit code {code}")

    def end(self) -> None:
        """Waits for a process that is dead already, and kills one that is not."""
        self.process.join(0.1)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process that is started inside never hears Ctrl-C."""
    blocks = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if blocks else ()
    try:
        yield
    finally:
        if blocks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _safe_path() -> Iterator[None]:
    """A process that is started inside takes none of its own modules from the current folder."""
    before = os.environ.get(SAFE)
    os.environ[SAFE] = "1"
    try:
        yield
    finally:
        os.environ.pop(SAFE) if before is None else os.environ.update({SAFE: before})


def _serve(pipe: Connection, folders: tuple[str, ...], settings: Mapping[str, str]) -> None:
    """Works until nobody asks any more."""
    os.environ.pop(SAFE, None)
    os.environ.update(settings)
    sys.path += [path for path in (*folders, os.getcwd()) if path not in sys.path]
    _one_thread()
    while True:
        try:
            work, item = pipe.recv()
        except (EOFError, OSError):
            return
        result = attempt(lambda request: request[0](request[1]), (work, item))
        try:
            pipe.send((result, _size()))
        except (EOFError, OSError):
            return
        except Exception as error:
            pipe.send((Failure(f"its result cannot be sent: {_error_text(error)}"), _size()))


def _size() -> int:
    """The largest memory that this process has had, in bytes; 0 on systems that do not tell.

    On Linux getrusage would tell the largest of whoever started this process, too.
    """
    status = Path("/proc/self/status")
    if status.exists():
        facts = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(facts["VmHWM"].split()[0]) * 1024
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:
        return 0
    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _one_thread() -> None:
    """One thread a process for torch, so that processes do not fight for processors."""
    os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported, which is later
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _error_text(error: BaseException) -> str:
    """What was raised and where, in one line: the last place that is not of this library."""
    message = " ".join(str(error).split())
    if isinstance(error, SyntaxError) and error.filename:  # which is no place of a traceback
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    if isinstance(error, SystemExit):
        text = f"it exited: sys.exit({error.code!r})"
    else:
        text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not f.filename.startswith((HOME, IMPORTS, "<frozen"))]
    user_frames = [f for f in outside if "site-packages" not in f.filename] or outside
    return text + (
        f" ({user_frames[-1].filename}, line {user_frames[-1].lineno})" if user_frames else ""
    )


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
