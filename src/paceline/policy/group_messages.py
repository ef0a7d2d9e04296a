"""What the group generator (``groups.py``) tells workers. ``to`` names the workers that must be told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class _ToWorker:
    worker: int

    @property
    def to(self) -> tuple[int, ...]:
        """The worker that must be told."""
        return (self.worker,)


@dataclass(frozen=True)
class Joined(_ToWorker):
    """The worker is a member: all it says from now on names this epoch. It first copies weights of a live worker."""

    epoch: int
    copy_from: int | None


@dataclass(frozen=True)
class Solo(_ToWorker):
    """No group this time: the worker goes on alone."""


@dataclass(frozen=True)
class Left(_ToWorker):
    """The worker has drained. It may go."""


@dataclass(frozen=True)
class Evicted(_ToWorker):
    """The worker is not, or no longer, a member: it must join again. Its weights are stale."""

    epoch: int


@dataclass(frozen=True)
class _ToMembers:
    serial: int
    epoch: int
    members: tuple[int, ...]

    @property
    def to(self) -> tuple[int, ...]:
        """The workers that must be told."""
        return self.members


@dataclass(frozen=True)
class Start(_ToMembers):
    """These workers average now. Serial and epoch are the same for all of them."""


@dataclass(frozen=True)
class Commit(_ToMembers):
    """All members have averaged: each applies the result."""


@dataclass(frozen=True)
class Abort(_ToMembers):
    """The average is void: no member applies it. A member that was evicted is not among ``members``."""

    reason: str


Message = Joined | Solo | Left | Evicted | Start | Commit | Abort


@dataclass(frozen=True)
class Wait:
    """A group that waits: for these members, since the first one arrived. What a watchdog reports."""

    serial: int
    members: tuple[int, ...]
    missing: tuple[int, ...]
    waited_s: float
