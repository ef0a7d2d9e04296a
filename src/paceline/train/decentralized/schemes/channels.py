"""Tiny messages between workers, read by background threads: announcements, requests, counts."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline import backend, partial
from paceline.train.decentralized.mesh import GroupMesh, twin

_WORDS = 3
_BYE = 0
_TAG = 1
_NO_LIMIT = timedelta(days=30)
_CLOSE_S = 5.0
"""How long ``close`` waits for a peer that neither answers nor dies."""


class Channels:
    """Messages of three whole numbers, ``(kind, a, b)`` with a kind above 0, to and from some of the other workers.

    ``receive(peer, kind, a, b)`` is called for each message, and ``lost(peer, reason)`` once if the peer dies or
    leaves. One thread reads each peer's messages, in the order they were sent. Being a peer is mutual.

    On Paceline a message is a partial all-reduce of the two workers, to which the receiver adds zeros: thus the loss of
    a worker ends its own channels and no others. On other backends it is a send and a receive.
    """

    def __init__(
        self,
        mesh: GroupMesh,
        peers: Iterable[int],
        receive: Callable[[int, int, int, int], None],
        lost: Callable[[int, str], None],
    ) -> None:
        self._worker, self._num_workers = mesh.worker, mesh.num_workers
        self._group = twin(mesh.parent, "messages of workers")
        self._ours = backend.is_paceline(self._group)
        self._on_receive, self._on_lost = receive, lost
        self._lock = threading.Lock()
        self._closing = False
        self._open = set(peers)  # peers that have not been told goodbye
        self._num_sent = dict.fromkeys(self._open, 0)
        self._num_received = dict.fromkeys(self._open, 0)
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()
        self._readers = {
            peer: threading.Thread(target=self._read, args=(peer,), name=f"paceline messages of {peer}", daemon=True)
            for peer in sorted(self._open)
        }

    def start(self) -> None:
        """Start to read."""
        for reader in self._readers.values():
            reader.start()

    def send(self, peer: int, kind: int, a: int = 0, b: int = 0) -> None:
        """Send a message without waiting. One to a peer that is gone has no effect."""
        with self._lock:
            if peer in self._open:
                self._send(peer, kind, a, b)

    def close(self) -> None:
        """Say goodbye to the peers, whose readers answer at once, and end the threads."""
        self._closing = True
        for peer in list(self._readers):
            self._say_goodbye(peer)
        deadline_s = time.monotonic() + _CLOSE_S
        for peer, reader in self._readers.items():
            reader.join(max(0.0, deadline_s - time.monotonic()))
            if reader.is_alive() and self._ours:
                number = self._number(peer, self._worker, self._num_received[peer])
                partial.give_up(number, f"rank {self._worker} has left the training", self._group)
                reader.join(_CLOSE_S)
        for work, _ in self._under_way:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=1))
        dist.destroy_process_group(self._group)

    def _say_goodbye(self, peer: int) -> None:
        with self._lock:
            if peer in self._open:
                self._send(peer, _BYE, 0, 0)
                self._open.remove(peer)

    def _send(self, peer: int, *words: int) -> None:
        message = torch.tensor(words, dtype=torch.int64)
        with suppress(RuntimeError):  # the reader of this peer hears why
            if self._ours:
                number = self._number(self._worker, peer, self._num_sent[peer])
                self._num_sent[peer] += 1
                pair = (self._worker, peer)
                op = dist.ReduceOp.SUM
                work = partial.partial_all_reduce(
                    message, pair, op, self._group, number=number, timeout=_NO_LIMIT, async_op=True
                )
            else:
                work = dist.isend(message, group=self._group, group_dst=peer, tag=_TAG)
            self._under_way.append((work, message))
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()

    def _read(self, peer: int) -> None:
        reason = "it has left the training"
        while True:
            try:
                kind, a, b = self._next(peer)
            except RuntimeError as error:
                reason = str(error).strip().partition("\n")[0]
                break
            if kind == _BYE:
                break
            self._on_receive(peer, kind, a, b)
        self._say_goodbye(peer)
        if not self._closing:
            self._on_lost(peer, reason)

    def _next(self, peer: int) -> list[int]:
        message = torch.zeros(_WORDS, dtype=torch.int64)
        if self._ours:
            number = self._number(peer, self._worker, self._num_received[peer])
            pair = (peer, self._worker)
            partial.partial_all_reduce(message, pair, dist.ReduceOp.SUM, self._group, number=number, timeout=_NO_LIMIT)
            self._num_received[peer] += 1
        else:
            dist.recv(message, group=self._group, group_src=peer, tag=_TAG)
        return [int(word) for word in message.tolist()]

    def _number(self, sender: int, receiver: int, count: int) -> int:
        return (sender * self._num_workers + receiver << 36) + count
