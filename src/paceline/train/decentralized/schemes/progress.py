"""Who has finished, how many steps all have made and who was lost: worker 0 keeps the books."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from paceline.errors import MessageError
from paceline.train.decentralized.schemes.channels import Channels
from paceline.train.decentralized.schemes.scheme import Scheme
from paceline.train.decentralized.schemes.synchronous import group_mesh

# Messages to worker 0.
_STEPS = 1  # steps, rounds: made so far by the sender
_MEET = 2  # whether it is the last meeting, rounds
# Messages of worker 0 to all.
_DONE = 3
_LOST = 4  # a worker
_FRONT = 5  # rounds: the most that any worker has begun; to those in a meeting
_MET = 6  # rounds: as before
_VERDICT_S = 2.0
"""How long a worker with an error waits to hear from worker 0 who was lost."""

FIRST_KIND = 16
"""Kinds of a scheme's own messages begin here."""


class Progress:
    """What workers without a common clock know of each other, and the messages they send each other.

    Worker 0 adds up the steps, hears first of a worker that dies, and calls meetings: a worker that has ended its
    training, or wants an average of all, waits in ``meet`` until all others do. Meanwhile its background threads answer
    those who still train. Worker 0 is needed: the scheme ends with an error if it is lost.

    ``condition`` guards what background threads share with the training thread; it may be entered again by its owner.
    Handlers are called with the condition held: ``receive`` for messages of kinds from ``FIRST_KIND`` on, ``lost`` when
    a worker is lost, ``books_changed`` on worker 0 when somebody joins a meeting. Without ``lost`` a loss is a failure
    of the scheme.
    """

    def __init__(
        self,
        scheme: Scheme,
        *,
        peers: Iterable[int] = (),
        receive: Callable[[int, int, int, int], None] | None = None,
        lost: Callable[[int], None] | None = None,
        books_changed: Callable[[], None] | None = None,
        count_rounds: bool = False,
    ) -> None:
        self._scheme = scheme
        mesh = group_mesh(scheme.mesh)
        self._worker, self._total_steps = mesh.worker, scheme.worker.total_steps
        self._on_receive, self._on_lost, self._books_changed = receive, lost, books_changed
        self._counts = count_rounds or self._total_steps is not None
        self.condition = threading.Condition()
        self.failure = ""
        """Why the scheme cannot go on."""
        self._loss = ""  # the same, if worker 0 says so or is lost
        self.live = list(range(mesh.num_workers))
        """Workers that worker 0 has not called lost: the same on all when a meeting ends."""
        self.front = 0
        self._num_met = 0
        self.over = False
        """The last meeting has ended: whoever leaves now may do so."""
        # The books, of worker 0 alone.
        self._steps = [0] * mesh.num_workers
        self._attended = [0] * mesh.num_workers
        others = set(range(mesh.num_workers)) if self._worker == 0 else {0}
        self._channels = Channels(mesh, (others | set(peers)) - {self._worker}, self._receive, self._lose)

    def start(self) -> None:
        """Start to listen, when the handlers are ready."""
        self._channels.start()

    # For the training thread.

    def report(self, steps: int, rounds: int = 0) -> None:
        """Tell worker 0 how many steps this worker has made; raise an error if the scheme has failed."""
        self.check()
        if self._counts:
            self._tell_books(_STEPS, steps, rounds)

    def check(self) -> None:
        """Raise an error if the scheme cannot go on."""
        if self.failure:
            with self.condition:  # others may leave because of the same loss: name the first to be lost, not them
                self.condition.wait_for(lambda: bool(self._loss), _VERDICT_S)
            known = self._loss and self._loss != self.failure
            raise MessageError(f"{self._loss}; {self.failure}" if known else self.failure)

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until something is true that is signalled by ``condition``; raise an error if the scheme fails."""
        within_s = self._scheme.worker.timeout_s
        with self._scheme.waiting(), self.condition:
            if not self.condition.wait_for(lambda: ready() or bool(self.failure), within_s):
                self.failure = (
                    f"rank {self._worker} has waited {within_s:g} s for {what}: raise timeout_s if that is normal"
                )
        if not ready():
            self.check()

    def meet(self, *, last: bool, rounds: int = 0, serve: Callable[[], None] | None = None) -> list[int]:
        """Wait until all live workers have called this as often as this one; return them.

        ``serve`` is called by this thread now and then while it waits, whenever ``condition`` was signalled.
        """
        self.check()
        target = self._num_met + 1
        deadline_s = time.monotonic() + self._scheme.worker.timeout_s
        self._tell_books(_MEET, int(last), rounds)
        while True:
            if serve is not None:
                serve()
            with self._scheme.waiting(), self.condition:
                if self._num_met >= target:
                    live = list(self.live)
                    break
                if not self.failure and not self.condition.wait(max(0.0, deadline_s - time.monotonic())):
                    self.failure = (
                        f"rank {self._worker} has waited {self._scheme.worker.timeout_s:g} s for the others to finish: "
                        "raise timeout_s if they need longer"
                    )
            self.check()
        if serve is not None:
            serve()
        return live

    # For any thread.

    def fail(self, reason: str) -> None:
        """Note why the scheme cannot go on: the training thread raises it."""
        with self.condition:
            self.failure = self.failure or reason
            self.condition.notify_all()

    def send(self, peer: int, kind: int, a: int = 0, b: int = 0) -> None:
        """Send one of the scheme's own messages, to itself, too."""
        if peer == self._worker:
            self._receive(peer, kind, a, b)
        else:
            self._channels.send(peer, kind, a, b)

    def training(self) -> list[int]:
        """Return the live workers that are in no meeting. On worker 0 alone."""
        return [one for one in self.live if self._attended[one] <= self._num_met]

    def close(self) -> None:
        """Leave the others."""
        self.over = True
        self._channels.close()

    # Messages.

    def _tell_books(self, kind: int, a: int, b: int) -> None:
        if self._worker == 0:
            self._receive(0, kind, a, b)
        else:
            self._channels.send(0, kind, a, b)

    def _tell(self, workers: Iterable[int], kind: int, a: int = 0) -> None:
        for worker in workers:
            self.send(worker, kind, a)

    def _receive(self, peer: int, kind: int, a: int, b: int) -> None:
        with self.condition:
            if kind in (_STEPS, _MEET):
                self._enter(peer, kind, a, b)
            elif kind == _DONE:
                self._scheme.done.set()
            elif kind == _LOST:
                self._strike_off(a)
            elif kind in (_FRONT, _MET):
                self.front = max(self.front, a)
                self._num_met += kind == _MET
                self.over = self.over or bool(kind == _MET and b)
            elif self._on_receive is not None:
                self._on_receive(peer, kind, a, b)
            self.condition.notify_all()

    def _strike_off(self, worker: int) -> None:
        if self.over or worker not in self.live:
            return
        self.live.remove(worker)
        if self._on_lost is None or worker == 0:
            needed = "it counts the steps of all" if worker == 0 else "this scheme needs all of them"
            self._note_loss(f"rank {worker} is lost or has left the training, and {needed}: start anew")
        else:
            self._on_lost(worker)

    def _lose(self, peer: int, reason: str) -> None:
        with self.condition:
            if self.over:
                return
            if self._worker == 0:
                self._tell(list(self.live), _LOST, peer)
                self._call_meeting()
                if self._books_changed is not None:
                    self._books_changed()
            elif peer == 0:
                self._note_loss(f"rank 0, which counts the steps of all, is lost: {reason}")
            self.condition.notify_all()

    def _note_loss(self, loss: str) -> None:
        self._loss = self._loss or loss
        self.fail(self._loss)

    # The books.

    def _enter(self, worker: int, kind: int, a: int, rounds: int) -> None:
        known = self.front
        self.front = max(self.front, rounds)
        if kind == _STEPS:
            self._steps[worker] = a
            if (
                self._total_steps is not None
                and sum(self._steps) >= self._total_steps
                and not self._scheme.done.is_set()
            ):
                self._tell(self.live, _DONE)
        else:
            self._attended[worker] = self._num_met + 1
            self._last = bool(a)
        if self._counts and self.front > known:
            self._tell([one for one in self.live if self._attended[one] > self._num_met], _FRONT, self.front)
        elif self._counts and kind == _MEET:
            self.send(worker, _FRONT, self.front)
        if kind == _MEET:
            self._call_meeting()
        if self._books_changed is not None:
            self._books_changed()

    _last = False

    def _call_meeting(self) -> None:
        if not self.training():
            for worker in (*(one for one in self.live if one != 0), 0):  # itself last: that changes the books
                self.send(worker, _MET, self.front, int(self._last))
