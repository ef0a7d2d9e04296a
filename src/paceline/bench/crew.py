"""The processes of the contenders: started, kept waiting, given orders, and ended whatever happens.

Each rank of a contender connects to one Unix socket. A rank that dies is seen by the end of its connection, one that
hangs by its silence. A rank sees in the same way that we are gone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from paceline.bench.contenders import RANK_PROGRAM, Contender, free_port
from paceline.bench.line import Line
from paceline.bench.rank_process.messages import Failed, Hello, Order, Ping, Pong, Ready, Stop
from paceline.errors import ContenderError

if TYPE_CHECKING:
    from paceline.lab import Lab

GRACE_S = 5.0
"""How long a rank may take to leave when told to."""

_LONGEST_FOLDER = 70  # an address has at most 107 bytes
_AnswerT = TypeVar("_AnswerT", bound=msgspec.Struct)


@dataclass(eq=False)
class Crew:
    """All ranks of one contender."""

    contender: Contender
    num_ranks: int
    timeout_s: float
    log: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    shared_memory: set[Path] = field(default_factory=set)

    def ask(self, order: Order, answer: type[_AnswerT], doing: str, *, expected_s: float = 0.0) -> list[_AnswerT]:
        """Give all ranks the order and return their answers in rank order; they hang if much later than expected."""
        for line in self.lines:
            line.send(order)
        return self._answers(answer, doing, self.timeout_s + 2 * expected_s)

    def accept(self, listener: socket.socket) -> None:
        """Wait for the ranks to connect, and put them in rank order."""
        listener.settimeout(0.2)
        deadline = time.monotonic() + self.timeout_s
        while len(self.lines) < self.num_ranks:
            try:
                self.lines.append(Line(listener.accept()[0]))
            except TimeoutError:
                ended = [process for process in self.processes if process.poll() is not None]
                if ended:
                    rank = "a rank" if self.contender.is_mpi else f"rank {self.processes.index(ended[0])}"
                    self._fail(f"{rank} ended while starting{self._how_it_ended(ended[0])}")
                if time.monotonic() > deadline:
                    self._fail(f"{self.num_ranks - len(self.lines)} ranks did not start in {self.timeout_s:g} s")
        for line, hello in zip(self.lines, self._answers(Hello, "starting", self.timeout_s), strict=True):
            line.rank = hello.rank
        self.lines.sort(key=lambda line: line.rank)

    def join(self, port: int, lab: Lab | None) -> None:
        """Have the ranks form their group."""
        for line in self.lines:
            line.send(self.contender.setup(line.rank, self.num_ranks, port, lab))
        readies = self._answers(Ready, "joining its group", self.timeout_s)
        if [(ready.rank, ready.num_ranks) for ready in readies] != [(r, self.num_ranks) for r in range(self.num_ranks)]:
            self._fail(f"its ranks say they are {[ready.rank for ready in readies]} of {self.num_ranks}")
        self.versions = readies[0].versions
        if self.contender.is_mpi:
            self.shared_memory = {path for line in self.lines for path in line.shared_memory()}

    def _answers(self, answer: type[_AnswerT], doing: str, patience_s: float) -> list[_AnswerT]:
        answers: dict[Line, _AnswerT] = {}
        failed: dict[Line, str] = {}
        deadline = time.monotonic() + patience_s
        with selectors.DefaultSelector() as selector:
            for line in self.lines:
                selector.register(line.socket, selectors.EVENT_READ, line)
            while len(answers) + len(failed) < self.num_ranks:
                events = selector.select(max(deadline - time.monotonic(), 0))
                if not events:
                    break
                for key, _ in events:
                    line = key.data
                    try:
                        message = line.read()
                    except EOFError:
                        self._fail(f"{line} died while {doing}{self._how_rank_ended(line)}")
                    if isinstance(message, answer):
                        answers[line] = message
                    elif isinstance(message, Failed):
                        # Its reason is often that another rank died: leave that one a moment to be found dead.
                        failed[line] = message.reason
                        deadline = min(deadline, time.monotonic() + 1.0)
        for line, reason in failed.items():
            self._fail(f"{line} failed while {doing}: {reason}")
        if len(answers) < self.num_ranks:
            self._fail(f"no answer for {patience_s:.0f} s while {doing}: {self._who_hangs()}; --timeout waits longer")
        return [answers[line] for line in self.lines]

    def _who_hangs(self) -> str:
        """A rank that is stopped says nothing at all; of those that wait for another, it is the one behind."""
        iterations: dict[Line, int] = {}
        for line in self.lines:
            line.send(Ping())
            line.socket.settimeout(1.0)
            with contextlib.suppress(OSError, EOFError):
                message = line.read()
                iterations[line] = message.iterations if isinstance(message, Pong) else sys.maxsize
        dumb = [str(line) for line in self.lines if line not in iterations]
        if dumb:
            return f"{', '.join(dumb)} is stopped or stuck"
        behind = [str(line) for line in self.lines if iterations[line] == min(iterations.values())]
        return f"{', '.join(behind)} hangs in iteration {min(iterations.values())}"

    def _how_rank_ended(self, line: Line) -> str:
        return self._how_it_ended(self.processes[line.rank]) if not self.contender.is_mpi else self._last_words()

    def _how_it_ended(self, process: subprocess.Popen[bytes]) -> str:
        try:
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            return self._last_words()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f" ({how}){self._last_words()}"

    def _last_words(self) -> str:
        start = max(os.fstat(self.log.fileno()).st_size - 4096, 0)
        text = os.pread(self.log.fileno(), 4096, start).decode(errors="replace")  # without moving where ranks write
        lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
        return f"; its last words: {lines[-1][:300]}" if lines else ""

    def _fail(self, what: str) -> NoReturn:
        raise ContenderError(f"{self.contender.name}: {what}")

    def end(self, *, orderly: bool) -> None:
        """End all processes: by order if the run went well, else by hanging up; what then remains is killed."""
        for line in self.lines:
            if orderly:
                line.send(Stop())
            else:
                line.hang_up()
        deadline = time.monotonic() + (GRACE_S if orderly else 1.0)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))
        for line in self.lines:
            line.end()
        for process in self.processes:
            try:
                process.wait(1.0)  # a launcher needs a moment to notice that its ranks are gone
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for path in self.shared_memory:  # an MPI that is killed does not clean up after itself
            path.unlink(missing_ok=True)
        self.log.close()


@contextlib.contextmanager
def crews(
    contenders: Sequence[Contender],
    num_ranks: int,
    *,
    program: Path = RANK_PROGRAM,
    lab: Lab | None = None,
    timeout_s: float = 120.0,
) -> Iterator[list[Crew]]:
    """All contenders started and joined; on leaving, by whatever way, nothing of them is left."""
    started: list[Crew] = []
    orderly = False
    with _terminable():
        try:
            for index, contender in enumerate(contenders):
                crew = Crew(contender, num_ranks, timeout_s)
                started.append(crew)
                with _listener(num_ranks) as (listener, address):
                    for process in contender.start(num_ranks, program, address, crew.log, lab):
                        crew.processes.append(process)
                    crew.accept(listener)
                crew.join(free_port(index, lab), lab)
            yield started
            orderly = True
        finally:
            for crew in started:
                crew.end(orderly=orderly)


@contextlib.contextmanager
def _listener(num_ranks: int) -> Iterator[tuple[socket.socket, Path]]:
    """A socket to connect to, and its address, in a folder that only we can enter and that is gone afterwards."""
    usual = tempfile.gettempdir()
    with (
        tempfile.TemporaryDirectory(
            prefix="paceline-", dir=usual if len(usual) <= _LONGEST_FOLDER else "/tmp"
        ) as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        address = Path(folder) / "socket"
        listener.bind(str(address))
        listener.listen(num_ranks)
        yield listener, address


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack, as Ctrl-C does, so that the processes are ended."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        del frame
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
