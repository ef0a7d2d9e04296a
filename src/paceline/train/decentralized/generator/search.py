"""Where a worker looks for its generator, and when. Pure: no sockets, no clock."""

from __future__ import annotations

import random
from collections.abc import Sequence

_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class ServiceSearch:
    """Goes through addresses in their order, again and again, with a pause that grows up to a second.

    While a service is in use, only those whose addresses come before it are tried, a round of them after each
    ``again_s``.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)
        self._used: str | None = None
        self._place = 0  # of the next attempt
        self._next_s = 0.0
        self._pause_s = _SHORTEST_PAUSE_S

    @property
    def next_s(self) -> float:
        """When the next attempt is due."""
        return self._next_s

    def next_address(self) -> str | None:
        """Return the address to try next, or None if the one in use is the first."""
        return self._addresses[self._place] if self._place < self._end else None

    @property
    def _end(self) -> int:
        return len(self._addresses) if self._used is None else self._addresses.index(self._used)

    def found(self, address: str, now_s: float, again_s: float) -> None:
        """The service at this address is in use from now on."""
        self._used = address
        self._pause_s = _SHORTEST_PAUSE_S
        self.wait(now_s, again_s)

    def wait(self, now_s: float, again_s: float) -> None:
        """Begin the next round after some time."""
        self._place, self._next_s = 0, now_s + again_s

    def lost(self, now_s: float) -> None:
        """No service is in use any more: begin with the first address, now."""
        self._used = None
        self.wait(now_s, 0.0)

    def failed(self, now_s: float, again_s: float) -> bool:
        """The attempt has failed. Return whether this was the last address of a round."""
        self._place += 1
        return self._end_of_round(now_s, again_s)

    def refused(self, now_s: float, again_s: float) -> bool:
        """The service of the attempt belongs to another job: leave its address out from now on."""
        del self._addresses[self._place]
        return self._end_of_round(now_s, again_s)

    @property
    def is_hopeless(self) -> bool:
        """Whether no address is left."""
        return not self._addresses

    def _end_of_round(self, now_s: float, again_s: float) -> bool:
        if self._place < self._end:
            return False
        if self._used is None:
            again_s = self._pause_s * random.uniform(0.5, 1.0)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self.wait(now_s, again_s)
        return True
