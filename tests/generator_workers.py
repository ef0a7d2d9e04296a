"""Workers of a decentralised job without tensors: a weight is a number, and averaging is adding in one process."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from paceline.train.decentralized.generator import GeneratorClient
from paceline.train.decentralized.generator.messages import (
    Abort,
    Average,
    Commit,
    Detached,
    Enough,
    Evicted,
    Join,
    Joined,
    Left,
    Refused,
    Solo,
    Start,
    ToService,
    ToWorker,
    decode_from_service,
    encode,
)
from paceline.train.decentralized.generator.wire import (
    MAX_FRAME_TO_WORKER,
    FrameReader,
    Session,
    WorkerHandshake,
    parse_address,
)

SECRET = b"the secret of the tests' job"
LIMIT_S = 60.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Fail after a time that no machine needs."""
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, f"waited {LIMIT_S:.0f} s until {what}"
        time.sleep(0.005)


class RawWorker:
    """A worker that says what a test wants, byte by byte if need be. :meth:`crash_all` ends all of them."""

    all: ClassVar[list[RawWorker]] = []

    def __init__(self, address: str, secret: bytes = SECRET) -> None:
        self.all.append(self)
        self.socket = socket.create_connection(parse_address(address), timeout=LIMIT_S)
        self.frames = FrameReader(MAX_FRAME_TO_WORKER)
        handshake = WorkerHandshake(secret, address)
        self.socket.sendall(handshake.answer(self.frame()))
        self.session: Session = handshake.finish(self.frame())

    def frame(self) -> bytes:
        """The next frame's body, or EOFError if the service has closed the connection."""
        while (body := self.frames.next()) is None:
            try:
                data = self.socket.recv(65536)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            self.frames.feed(data)
        return body

    def say(self, message: ToService) -> RawWorker:
        self.socket.sendall(self.session.seal(encode(message)))
        return self

    def hear(self, kind: type[Any] | None = None) -> Any:
        """The next message, or the next of a kind."""
        while True:
            message: ToWorker = decode_from_service(self.session.open(self.frame()))
            if kind is None or isinstance(message, kind):
                return message

    def join(self, worker: int | None, **changes: Any) -> Joined:
        fields: dict[str, Any] = {
            "worker": worker, "host": "raw", "address": "nowhere", "previous": None, "stale": False, "fresh": False,
            "rate_bytes_per_s": None, "process": id(self),
        }  # fmt: skip
        self.say(Join(**{**fields, **changes}))
        joined: Joined = self.hear(Joined)
        return joined

    def is_closed_by_the_service(self) -> bool:
        try:
            while True:
                self.hear()
        except EOFError:
            return True

    def crash(self) -> None:
        self.socket.close()

    @classmethod
    def crash_all(cls) -> None:
        while cls.all:
            cls.all.pop().crash()


class Mesh:
    """Adds the weights of an operation's members when all have come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[int, list[tuple[float, Callable[[float], None]]]] = {}

    def add(self, serial: int, count: int, weight: float, done: Callable[[float], None]) -> None:
        with self._lock:
            parts = self._parts.setdefault(serial, [])
            parts.append((weight, done))
            if len(parts) < count:
                return
            del self._parts[serial]
        for _, told in parts:
            told(sum(part for part, _ in parts))


class SimulatedWorker(threading.Thread):
    """Makes steps, averages, drains when it is enough, and ends after the final average.

    ``crash_in`` names a phase in which it dies as if killed: compute, arrived, in_group, averaging, copying or left.
    """

    def __init__(
        self,
        mesh: Mesh,
        addresses: Sequence[str],
        *,
        worker: int | None = None,
        fresh: bool = False,
        weight: float = 0.0,
        step_s: float = 0.002,
        host: str = "host",
        lease_s: float = 30.0,
        crash_in: str = "",
        max_steps: int | None = None,
        secret: bytes = SECRET,
    ) -> None:
        super().__init__(daemon=True, name=f"worker {worker}")
        self.weight, self.step_s, self.crash_in, self.max_steps = weight, step_s, crash_in, max_steps
        self.heard: list[object] = []
        self.steps = self.commits = self.copies = 0
        self.refused = ""
        self.has_crashed = self.has_ended = False
        self.mesh = mesh
        self._inbox: queue.Queue[object] = queue.Queue()
        self._phase = "joining"
        self._enough = False
        self._group: int | None = None
        self._sums: dict[int, float] = {}
        self._averages: dict[int, Average] = {}
        self.client = GeneratorClient(
            addresses,
            secret,
            worker=worker,
            host=host,
            address="in this process",
            on_message=self._inbox.put,
            fresh=fresh,
            lease_s=lease_s,
        )
        self.start()

    def run(self) -> None:
        while not (self.has_crashed or self.has_ended or self.refused):
            try:
                message = self._inbox.get(timeout=LIMIT_S)
            except queue.Empty:
                return
            self.heard.append(message)
            self._serve(message)
        if not self.has_crashed:
            self.client.close()

    def crash(self) -> None:
        """End as a killed process does: without a word."""
        self.has_crashed = True
        self.client._ended = True
        self.client._wake()

    def _serve(self, message: object) -> None:
        if isinstance(message, Joined):
            if message.copy:
                self._enter("copying")
            elif self._phase in ("joining", "copying"):
                self._go_on()
        elif isinstance(message, Solo):
            self._go_on()
        elif isinstance(message, Start):
            self._group = message.serial
            self._enter("in_group")
            self._add(message.serial, len(message.members), self.weight, self.client.finished)
        elif isinstance(message, Average):
            self._average(message)
        elif isinstance(message, (Commit, Abort)):
            self._ended(message.serial, isinstance(message, Commit))
        elif isinstance(message, (Evicted, Detached)):
            if self._group is not None:
                self._group = None
                self._go_on()
        elif isinstance(message, Enough):
            self._enough = True
        elif isinstance(message, Left):
            self._enter("left")
        elif isinstance(message, Refused):
            self.refused = message.reason

    def _enter(self, phase: str) -> None:
        self._phase = phase
        if phase == self.crash_in:
            self.crash()

    def _go_on(self) -> None:
        """Make a step and ask for a group, or drain."""
        if self._enough or (self.max_steps is not None and self.steps >= self.max_steps):
            self._enter("draining")
            self.client.drain()
            return
        self._enter("compute")
        time.sleep(self.step_s)
        self.weight += 1.0
        self.steps += 1
        self.client.request(steps=1, step_s=self.step_s, average_s=0.001, average_bytes=1e6, group_size=2)
        self._enter("arrived")

    def _add(self, serial: int, count: int, weight: float, say: Callable[[int, bool], None]) -> None:
        def done(total: float) -> None:
            self._sums[serial] = total
            say(serial, True)

        if not self.has_crashed:
            self.mesh.add(serial, count, weight, done)

    def _average(self, average: Average) -> None:
        self._averages[average.serial] = average
        phase = self._phase
        self._enter("averaging")
        self._phase = phase
        weight = self.weight if self.client.worker in average.contributors else 0.0
        self._add(average.serial, len(average.members), weight, self.client.average_finished)

    def _ended(self, serial: int, is_commit: bool) -> None:
        if serial == self._group:
            self._group = None
            if is_commit:
                self.weight = self._sums[serial] / len(self._start(serial).members)
                self.commits += 1
            self._go_on()
        average = self._averages.get(serial)
        if average is None:
            return
        if is_commit and self.client.worker in average.receivers:
            self.weight = self._sums[serial] / len(average.contributors)
        if average.final:
            self.has_ended = True
        elif self._phase == "copying" and self.client.worker in average.receivers:
            if is_commit:
                self.copies += 1
                self.client.ready()
                self._go_on()
            else:
                self.client.ask_average()

    def _start(self, serial: int) -> Start:
        return next(one for one in reversed(self.heard) if isinstance(one, Start) and one.serial == serial)
