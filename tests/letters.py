"""Ranks in threads that exchange tensors through memory, by rendezvous: a send is done when it has been received.

So whatever a real backend does by buffering is missing here, and a program that needs buffering deadlocks.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

PATIENCE_S = 20.0


class Letter:
    """A message of which one side, or both, has been posted."""

    def __init__(self) -> None:
        self.data: torch.Tensor | None = None
        self.done = threading.Event()

    def wait(self) -> None:
        if not self.done.wait(PATIENCE_S):
            raise AssertionError("a message was never taken: deadlock")


class Mailbox:
    """Letters by sender and receiver, matched in the order they are posted."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sent: dict[tuple[int, int], deque[Letter]] = defaultdict(deque)
        self.wanted: dict[tuple[int, int], deque[Letter]] = defaultdict(deque)
        self.num_messages = 0

    def post(self, pair: tuple[int, int], data: torch.Tensor, mine: Any, theirs: Any, sends: bool) -> Letter:
        with self.lock:
            self.num_messages += sends
            letter = Letter()
            letter.data = data
            if not theirs[pair]:
                mine[pair].append(letter)
                return letter
            other = theirs[pair].popleft()
            source, target = (data, other.data) if sends else (other.data, data)
            assert source.numel() == target.numel(), f"{pair}: {source.numel()} bytes sent, {target.numel()} wanted"
            target.copy_(source)
            other.done.set()
            letter.done.set()
            return letter


class MailWire:
    """A rank's wire."""

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self.mailbox, self.rank = mailbox, rank

    def send(self, data: torch.Tensor, peer: int) -> Letter:
        return self.mailbox.post((self.rank, peer), data, self.mailbox.sent, self.mailbox.wanted, True)

    def receive(self, data: torch.Tensor, peer: int) -> Letter:
        return self.mailbox.post((peer, self.rank), data, self.mailbox.wanted, self.mailbox.sent, False)

    def batch(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> Any:
        works = [self.send(*one) for one in sends] + [self.receive(*one) for one in receives]

        class Batch:
            def wait(self) -> None:
                for work in works:
                    work.wait()

        return Batch()


def run_threads(function: Callable[[int], None], num_ranks: int) -> None:
    """Call the function for every rank, each in a thread; raise what one of them raised."""
    errors: list[BaseException] = []

    def live(rank: int) -> None:
        try:
            function(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    if errors:
        raise errors[0]
