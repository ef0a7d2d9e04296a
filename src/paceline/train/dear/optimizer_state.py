"""The optimizer's state, up to date whenever it is read: an update that has not happened happens first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any


class WatchedState(defaultdict[Any, dict[str, Any]]):
    """``optimizer.state`` while updates are deferred. A copy is an ordinary dictionary."""

    def __init__(self, entries: Any, before_reading: Callable[[], None]) -> None:
        super().__init__(dict, entries)
        self._before_reading = before_reading

    def __getitem__(self, key: Any) -> dict[str, Any]:
        self._before_reading()
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As a dictionary's."""
        self._before_reading()
        return super().get(key, default)

    def items(self) -> Any:
        """As a dictionary's."""
        self._before_reading()
        return super().items()

    def values(self) -> Any:
        """As a dictionary's."""
        self._before_reading()
        return super().values()

    def __len__(self) -> int:
        self._before_reading()
        return super().__len__()

    def __reduce__(self) -> Any:
        self._before_reading()
        return defaultdict, (dict, dict(super().items()))
