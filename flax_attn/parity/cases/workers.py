"""Worker processes, so that a crashing case cannot end the command or other cases."""

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
LARGEST = 1.1 * 2**30  # bytes; larger workers are replaced, since jax keeps all compiled programs
SAFE = "PYTHONSAFEPATH"  # keeps the current folder off the front of a new process's path


@dataclass(frozen=True)
class Failure:
    """Describes work that raised, exited or killed its process.

    Attributes:
      text: what happened, without a subject.
      about: the subject, if the caller does not know it.
    """

    text: str
    about: str = ""


@dataclass(frozen=True)
class LastResult:
    """The result of a process that must not be reused, e.g. because a kernel broke its device."""

    result: Any


def attempt(work: Callable[[A], B], item: A) -> B | Failure:
    """Returns the result of `work`, or a `Failure` for any exception, `SystemExit` included."""
    try:
        return work(item)
    except ParityError as error:
        return Failure(str(error))
    except BaseException as error:
        return Failure(_error_text(error))


class Workers:
    """Process pool whose workers take one item at a time; dead or large workers are replaced.

    If two modules have the same name, workers import the one that plain Python would: `folders` and
    the current folder come last on the path.

    Attributes:
      most: maximum number of processes.
      folders: extra import folders, searched before the current folder.
      settings: environment variables for the processes.
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
        """Adds an import folder for processes started from now on."""
        self.folders = (folder, *self.folders)
        self._drop_idle()

    def start(self, count: int) -> None:
        """Starts processes in advance, so that they are ready when needed."""
        while len(self._idle) < count:
            self._idle.append(self._new())

    def call(self, work: Callable[[A], B], item: A) -> B | Failure:
        """Runs one item."""
        return next(self.map(work, [item]))

    def map(self, work: Callable[[A], B], items: Sequence[A]) -> Iterator[B | Failure]:
        """Yields the results in order. `work` and `items` must be picklable."""
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
                    elif worker.served > 1:  # earlier work may have caused it: retry once
                        waiting.appendleft(i)
                        self._drop_idle()
                    else:
                        done[i] = Failure(result.text)
            yield done.pop(at)

    def _assign(self, i: int, work: Callable[[A], B], items: Sequence[A]) -> None:
        worker = self._idle.pop() if self._idle else self._new()
        try:
            worker.assign(work, items[i])
        except OSError:  # it died while idle
            worker.end()
            worker = self._new()
            worker.assign(work, items[i])
        self._busy[worker] = i

    def _new(self) -> "_Worker":
        return _Worker(self.folders, self.settings)

    def _keep(self, worker: "_Worker") -> None:
        """Keeps an idle worker for the next item, unless it has grown large."""
        if worker.size > LARGEST:
            worker.end()
        else:
            self._idle.append(worker)

    def _results(self) -> Iterator[tuple["_Worker", Any]]:
        """Yields results that workers have sent, and workers that died."""
        ready = wait([worker.pipe for worker in self._busy], timeout=1.0)
        for worker in list(self._busy):
            if worker.pipe in ready or not worker.process.is_alive():
                yield worker, worker.result()

    def _drop_idle(self) -> None:
        """Ends all idle workers, so that the next item gets a new process."""
        for worker in self._idle:
            worker.end()
        self._idle = []


@dataclass(frozen=True)
class _WorkerDied:
    text: str


class _Worker:
    """One process; ignores Ctrl-C, since its parent ends it.

    Attributes:
      served: number of items it has received.
      size: its peak memory in bytes; 0 if unknown.
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
        """Joins the process, killing it if it is still alive."""
        self.process.join(0.1)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Context in which started processes ignore Ctrl-C."""
    blocks = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if blocks else ()
    try:
        yield
    finally:
        if blocks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Context in which started processes do not import from the current folder at startup."""
    before = os.environ.get(SAFE)
    os.environ[SAFE] = "1"
    try:
        yield
    finally:
        os.environ.pop(SAFE) if before is None else os.environ.update({SAFE: before})


def _serve(pipe: Connection, folders: tuple[str, ...], settings: Mapping[str, str]) -> None:
    """Serves requests until the pipe is closed."""
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
    """Peak memory of this process in bytes; 0 on systems that do not report it.

    On Linux, getrusage also includes the parent's peak.
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
    """Limits torch to one thread per process, so that processes do not compete for cores."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, which happens later
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _error_text(error: BaseException) -> str:
    """The exception in one line, with the innermost location outside this library."""
    message = " ".join(str(error).split())
    if isinstance(error, SyntaxError) and error.filename:  # its location is not in the traceback
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
