"""The ranks of a demonstration: started, listened to, and ended, whatever happens.

A rank that dies, or all that fall silent, end the demonstration with a sentence.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any, NoReturn

import msgspec

from paceline.demo.messages import Finished, Job, Message, Step, Strategy
from paceline.demo.places import Stage
from paceline.errors import ContenderError

_SILENCE_S = 90.0
_MORE_DEATHS_S = 0.5  # a rank's death makes others fail: look who was first
_READ_BYTES = 1 << 16
_DECODER = msgspec.json.Decoder(Message)


class Crew:
    """All ranks of one job; use it in a ``with`` statement."""

    def __init__(self, job: Job, stage: Stage) -> None:
        self._job, self._stage = job, stage
        self._processes: list[subprocess.Popen[Any]] = []
        self._logs: list[IO[bytes]] = []
        self._last: dict[int, Message] = {}

    def __enter__(self) -> Crew:
        """Start the ranks, in sessions of their own: a terminal's Ctrl-C is for the controller."""
        text = msgspec.json.encode(self._job).decode()
        try:
            for rank in range(self._job.num_ranks):
                self._logs.append(tempfile.TemporaryFile())  # closed with the crew
                command = [sys.executable, "-m", "paceline.demo.rank", str(rank), text]
                streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._logs[-1]}
                self._processes.append(self._stage.popen(rank, command, start_new_session=True, **streams))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks; killing is safe, as they own nothing but memory."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        for log in self._logs:
            log.close()

    def messages(self) -> Iterator[tuple[int, Message]]:
        """What the ranks say, until all have finished; ContenderError if one does not get there."""
        rests = dict.fromkeys(range(self._job.num_ranks), b"")
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                events = selector.select(_SILENCE_S)
                if not events:
                    self._fail_silent()
                for key, _ in events:
                    data = os.read(key.fd, _READ_BYTES)
                    if not data:
                        selector.unregister(key.fileobj)
                        self._check_end(key.data)
                    *lines, rests[key.data] = (rests[key.data] + data).split(b"\n")
                    for line in lines:
                        self._last[key.data] = message = _DECODER.decode(line)
                        yield key.data, message

    def _check_end(self, rank: int) -> None:
        last = self._last.get(rank)
        done = isinstance(last, Finished) and last.strategy is list(Strategy)[-1]
        if done and self._processes[rank].wait() == 0:
            return
        time.sleep(_MORE_DEATHS_S)
        killed = [other for other, process in enumerate(self._processes) if (process.poll() or 0) < 0]
        self._fail_dead(killed[0] if killed else rank)

    def _fail_dead(self, rank: int) -> NoReturn:
        code = self._processes[rank].wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise ContenderError(f"rank {rank} {how} {self._where(rank)}{self._last_words(rank)}")

    def _fail_silent(self) -> NoReturn:
        behind = min(range(self._job.num_ranks), key=self._progress)
        raise ContenderError(
            f"no rank has said anything for {_SILENCE_S:g} s; rank {behind} is furthest behind, "
            f"{self._where(behind)}{self._last_words(behind)}"
        )

    def _progress(self, rank: int) -> tuple[int, int]:
        last = self._last.get(rank)
        if last is None:
            return (-1, 0)
        return list(Strategy).index(last.strategy), last.number if isinstance(last, Step) else self._job.iterations

    def _where(self, rank: int) -> str:
        last = self._last.get(rank)
        if last is None:
            return "before its first iteration"
        if isinstance(last, Step):
            return f"in {last.strategy.value}, after {last.number + 1} iterations"
        return f"after {last.strategy.value}"

    def _last_words(self, rank: int) -> str:
        log = self._logs[rank]
        log.seek(0)
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return f"; its last words: {lines[-1][:300]}" if lines else ""
