"""One command for every rank: its output behind the rank, its end, and whose fault it was.

a rank fails          the others go on for ``grace_s``; then SIGTERM, and 2 s later SIGKILL
``timeout_s`` passes  SIGTERM, and 2 s later SIGKILL
interrupted           SIGINT (or SIGTERM, as we got it), and 2 s later the lab ends, and all with it
"""

from __future__ import annotations

import io
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from paceline.errors import LabError, UsageError
from paceline.lab.namespaces import Popen
from paceline.lab.voices import Voice, show_failure, show_timeout

TIMED_OUT = 124  # as timeout(1) says it
_BEFORE_KILLING_S = 2.0
_READ_BYTES = 1 << 16
_PIPE_READS = 16

Due = list[tuple[float, signal.Signals]]


def run_everywhere(
    starters: Sequence[Callable[..., Popen]], args: Sequence[str], *, timeout_s: float | None, grace_s: float
) -> int:
    """Run the command by these ``popen`` functions, one a rank; the worst exit code of any not ended by us."""
    if not args:
        raise UsageError("there is no command to run; write it after --, like paceline lab -- python train.py")
    with selectors.DefaultSelector() as selector:
        crowd = _Crowd(selector, grace_s)
        try:
            for rank, popen in enumerate(starters):
                crowd.start(rank, popen, args)
            if timeout_s is not None:
                crowd.due = _mild_then_harsh(time.monotonic() + timeout_s)
            crowd.watch()
        except (KeyboardInterrupt, SystemExit) as stop:
            crowd.end(signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM)
            crowd.due = [(time.monotonic() + _BEFORE_KILLING_S, signal.SIGKILL)]
            crowd.watch()
            raise
        finally:
            crowd.close()
    if crowd.timed_out and timeout_s is not None:
        show_timeout(crowd.ended_by_us, timeout_s)
    if crowd.first_failed is not None:
        show_failure(crowd.first_failed, _ending(crowd.codes[crowd.first_failed]), crowd.errors[crowd.first_failed])
    return crowd.worst_code()


def _mild_then_harsh(start: float) -> Due:
    return [(start, signal.SIGTERM), (start + _BEFORE_KILLING_S, signal.SIGKILL)]


def _ending(code: int) -> str:
    names = {int(one): one.name for one in signal.Signals}  # real-time signals have none
    return f"by {names.get(-code, f'signal {-code}')}" if code < 0 else f"with exit code {code}"


class _Crowd:
    """The processes of a run. ``due`` says when those that still run get which signal."""

    def __init__(self, selector: selectors.BaseSelector, grace_s: float) -> None:
        self.due: Due = []
        self.codes: dict[int, int] = {}
        self.errors: dict[int, Voice] = {}
        self.first_failed: int | None = None
        self.timed_out = False
        self._selector = selector
        self._grace_s = grace_s
        self._running: dict[int, Popen] = {}
        self.ended_by_us: set[int] = set()

    def start(self, rank: int, popen: Callable[..., Popen], args: Sequence[str]) -> None:
        """Start the command of one rank, in a session of its own: a terminal's Ctrl-C is ours to pass on."""
        try:
            process = popen(
                args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise LabError(f"rank {rank} cannot run {args[0]!r}: {error.strerror}") from None
        self._running[rank] = process
        self.errors[rank] = Voice(rank, sys.stderr)
        for pipe, voice in ((process.stdout, Voice(rank, sys.stdout)), (process.stderr, self.errors[rank])):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, voice)
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)

    def watch(self) -> None:
        """Show what is said and send what is due, until all have ended and all they said is shown."""
        while self._running:
            wait_s = max(0.0, self.due[0][0] - time.monotonic()) if self.due else None
            for key, _ in self._selector.select(wait_s):
                if isinstance(key.data, Voice):
                    self._hear(key)
                else:
                    self._bury(key)
            if self.due and self.due[0][0] <= time.monotonic():
                self.timed_out |= self.first_failed is None
                self.end(self.due.pop(0)[1])
        for key in list(self._selector.get_map().values()):
            for _ in range(_PIPE_READS):  # what is in the pipe, and no more: a daemon may go on writing for ever
                if not self._hear(key):
                    break
            key.data.say(b"")

    def end(self, how: signal.Signals) -> None:
        """Send a signal to those that still run, and to what they have started."""
        for rank, process in self._running.items():
            self.ended_by_us.add(rank)
            os.killpg(process.pid, how)

    def worst_code(self) -> int:
        """The highest exit code, a signal counting as 128 and its number as in a shell."""
        ours = TIMED_OUT if self.timed_out else 0
        codes = [code for rank, code in self.codes.items() if rank not in self.ended_by_us]
        return max([ours, *(128 - code if code < 0 else code for code in codes)])

    def close(self) -> None:
        """Kill what still runs, because we leave in the middle, and let go of all pipes."""
        self.end(signal.SIGKILL)
        for process in self._running.values():
            process.wait()
        for key in list(self._selector.get_map().values()):
            self._forget(key)

    def _hear(self, key: selectors.SelectorKey) -> bool:
        """Whether there was something to hear."""
        try:
            data = os.read(key.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        key.data.say(data)
        if not data:
            self._forget(key)
        return bool(data)

    def _bury(self, key: selectors.SelectorKey) -> None:
        rank: int = key.data
        self._forget(key)
        code = self.codes[rank] = self._running.pop(rank).wait()
        if code != 0 and self.first_failed is None and rank not in self.ended_by_us:
            self.first_failed = rank
            grace = _mild_then_harsh(time.monotonic() + self._grace_s)
            self.due = min(self.due, grace) if self.due else grace

    def _forget(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        if isinstance(key.fileobj, io.IOBase):
            key.fileobj.close()
        else:
            os.close(key.fd)
