"""What a running lab is made of: its hosts, and the ranks on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.lab import links
from paceline.lab.namespaces import Popen

if TYPE_CHECKING:
    from paceline.lab.lab import Lab


@dataclass(frozen=True)
class LabHost:
    """One host of a running lab. ``pid`` is its first process: ``nsenter --all --target PID`` leads inside."""

    number: int
    ranks: tuple[int, ...]
    address: str
    address6: str
    pid: int
    lab: Lab = field(repr=False)
    interface: str = links.INTERFACE

    @property
    def name(self) -> str:
        """The host's name, which all hosts can resolve."""
        return f"host{self.number}"

    @property
    def namespace(self) -> str:
        """The file of its network namespace: ``nsenter --net=FILE``."""
        return f"/proc/{self.pid}/ns/net"

    def popen(self, args: Sequence[str], **options: Any) -> Popen:
        """Start a process inside this host, with the environment of the host's first rank; see :class:`LabRank`."""
        return self.lab._popen(self.ranks[0], args, **options)


@dataclass(frozen=True)
class LabRank:
    """One rank of a running lab: a number, and the host on which its process runs."""

    rank: int
    local_rank: int
    host: LabHost

    def popen(self, args: Sequence[str], **options: Any) -> Popen:
        """``subprocess.Popen`` on the rank's host, with :meth:`Lab.environment`; ``env`` adds to that or overrides it.

        It is a child of this process like any other, and is killed when the lab ends.
        """
        return self.host.lab._popen(self.rank, args, **options)
