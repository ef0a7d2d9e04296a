"""The optimizer's state, up to date whenever it is read: an update that has not happened happens first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any


class WatchedState(MutableMapping[Any, dict[str, Any]]):
    """``optimizer.state`` while updates are deferred; the updates themselves use ``raw``. A copy is a dictionary."""

    def __init__(self, entries: Mapping[Any, dict[str, Any]], before_reading: Callable[[], None]) -> None:
        self.raw: defaultdict[Any, dict[str, Any]] = defaultdict(dict, entries)
        self._before_reading = before_reading

    def __getitem__(self, key: Any) -> dict[str, Any]:
        self._before_reading()
        return self.raw[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """As a dictionary's: it makes no entry."""
        self._before_reading()
        return self.raw.get(key, default)

    def __contains__(self, key: object) -> bool:
        self._before_reading()
        return key in self.raw

    def __iter__(self) -> Iterator[Any]:
        self._before_reading()
        return iter(self.raw)

    def __len__(self) -> int:
        self._before_reading()
        return len(self.raw)

    def __setitem__(self, key: Any, entries: dict[str, Any]) -> None:
        self._before_reading()
        self.raw[key] = entries

    def __delitem__(self, key: Any) -> None:
        self._before_reading()
        del self.raw[key]

    def __reduce__(self) -> Any:
        self._before_reading()
        return defaultdict, (dict, dict(self.raw))


def raw_state(state: Any) -> Any:
    """The dictionary itself, for who knows what is outstanding."""
    return state.raw if isinstance(state, WatchedState) else state
