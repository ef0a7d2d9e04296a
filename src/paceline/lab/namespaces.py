"""Starting processes inside a host: real children of the caller, so that signals, waits and pipes just work.

A process enters a PID namespace by being born there. So a thread of ours goes into the host's namespaces, starts the
process and ends; the rest of this process stays where it is. There is no helper between the caller and the process:
to stop, kill or wait for it means it.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

from paceline.lab.keeper import CLONE_FS, setns, unshare

Popen = subprocess.Popen[Any]


def popen_inside(
    pidfd: int, kinds: int, args: Sequence[str], *, started: Callable[[Popen], None] | None = None, **options: Any
) -> Popen:
    """``subprocess.Popen(args, **options)`` inside the namespaces of these kinds that the process of ``pidfd`` is in.

    ``started`` is called with the process before anything can interrupt the caller, so that none is ever lost.
    """
    born: list[Popen | BaseException] = []
    options.setdefault("cwd", os.getcwd())  # entering a mount namespace leads to its root

    def enter_and_start() -> None:
        try:
            unshare(CLONE_FS)  # or our other threads would have to come along into the mount namespace
            setns(pidfd, kinds)
            process = subprocess.Popen(args, **options)
            if started is not None:
                started(process)
            born.append(process)
        except BaseException as error:
            born.append(error)

    thread = threading.Thread(target=enter_and_start, name="paceline-lab-start", daemon=True)
    thread.start()
    thread.join()
    if isinstance(born[0], BaseException):
        raise born[0]
    return born[0]
