"""Closes sockets in forked processes, such as a DataLoader's workers.

A connection ends when its last copy is closed. A forked process that outlives its parent would keep the connections of
a dead worker open, and the port of a dead service taken.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Protocol


class Closeable(Protocol):
    """A socket, or what has one."""

    def close(self) -> None:
        """Close it."""


class Owner(Protocol):
    """Has sockets that belong to this process."""

    def sockets(self) -> Iterable[Closeable]:
        """Return all that are open."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def close_in_children(owner: Owner) -> None:
    """Close the owner's sockets in each process that is forked from now on."""
    _owners.add(owner)


def _close_all() -> None:
    for owner in list(_owners):
        for each in owner.sockets():
            each.close()
    _owners.clear()


os.register_at_fork(after_in_child=_close_all)
