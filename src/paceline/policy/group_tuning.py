"""What a running job teaches about its groups: the best group size, and the rates of hosts' links. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from paceline.policy.grouping import LinkClass, choose_group_size, link_classes

_WINDOW = 64
"""So many recent steps and averages are looked at."""

_EVERY = 16
"""After so many requests the size is considered anew."""

_IN_A_ROW = 3
"""So often in a row another size must be better, so that noise does not make the size jump."""

_RATES_OF_A_HOST = 8


class GroupSizeSearch:
    """Finds the group size whose averages hide behind a step, from what workers report with their requests.

    >>> search = GroupSizeSearch()
    >>> for _ in range(100):
    ...     search.observe(step_s=0.060, average_s=0.023, group_size=2)
    ...     size = search.choose(current=2, num_workers=8)
    >>> size
    4
    """

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=_WINDOW)
        self._all_reduces_s: deque[float] = deque(maxlen=_WINDOW)
        self._requests = 0
        self._candidate = 0
        self._agreed = 0

    def observe(self, step_s: float | None, average_s: float, group_size: int) -> None:
        """Note a request: the worker's last step, and its last average in a group, if there was one."""
        self._requests += 1
        if step_s is not None:
            self._steps_s.append(step_s)
        if average_s > 0 and group_size > 1:
            self._all_reduces_s.append(average_s * group_size / (group_size - 1))

    @property
    def is_due(self) -> bool:
        """Whether :meth:`choose` would look again."""
        return self._requests >= _EVERY

    def choose(self, current: int, num_workers: int) -> int:
        """Return the group size to use from now on: ``current``, unless another one was better for some time."""
        if not (self.is_due and self._steps_s and self._all_reduces_s) or num_workers < 2:
            return current
        self._requests = 0
        best = choose_group_size(median(self._steps_s), median(self._all_reduces_s), num_workers)
        self._agreed = self._agreed + 1 if best == self._candidate else 1
        self._candidate = best
        return best if self._agreed >= _IN_A_ROW else current


class LinkRates:
    """Estimates the rates of hosts' links: as told, or the best of what the last averages have reached.

    In a group of g workers each moves 2 (g - 1) / g times the bytes through its link. The slowest link sets the pace:
    so that rate is a lower bound for the links of all members, and the highest one of several groups is closest.

    >>> rates = LinkRates()
    >>> rates.observe("a", average_s=0.5, average_bytes=1e9, group_size=2)
    >>> rates.rate_bytes_per_s
    {'a': 2000000000.0}
    """

    def __init__(self) -> None:
        self._told: dict[str, float] = {}
        self._seen: dict[str, deque[float]] = {}
        self._observations = 0
        self._classes: dict[str, LinkClass] = {}

    def tell(self, host: str, rate_bytes_per_s: float) -> None:
        """The rate of a host is known."""
        self._told[host] = rate_bytes_per_s
        self._observations += 1

    def observe(self, host: str, average_s: float, average_bytes: float, group_size: int) -> None:
        """A worker of this host has averaged with workers of other hosts."""
        if average_s > 0 and average_bytes > 0 and group_size > 1 and host not in self._told:
            rate = 2 * (group_size - 1) / group_size * average_bytes / average_s
            self._seen.setdefault(host, deque(maxlen=_RATES_OF_A_HOST)).append(rate)
            self._observations += 1

    def forget(self, host: str) -> None:
        """No worker of this host is left."""
        self._told.pop(host, None)
        self._seen.pop(host, None)

    @property
    def rate_bytes_per_s(self) -> dict[str, float]:
        """The rates that are known. A host is learnt when it has averaged a few times."""
        learnt = {host: max(rates) for host, rates in self._seen.items()}
        return {**learnt, **self._told}

    def changed(self, group_size: int) -> Mapping[str, float] | None:
        """Return all rates if hosts have changed their class since the last time, else None.

        That is looked at once for as many observations as can replace what is known of all hosts.
        """
        known = len(self._told) + _RATES_OF_A_HOST * len(self._seen)
        if not known or self._observations < known:
            return None
        self._observations = 0
        rates = self.rate_bytes_per_s
        classes = link_classes(rates, group_size)
        if classes == self._classes:
            return None
        self._classes = classes
        return rates
