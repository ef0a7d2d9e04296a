"""The lab without root: a user namespace in which the caller is root, where the kernel allows that.

The namespace has processes of its own as well, since the lab makes a PID namespace for each host inside of it. Its
first process is the command; with it everything in there ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

_INTO = (
    *("setpriv", "--pdeathsig", "KILL"),  # end when we do, however we do
    *("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"),
)
_TRY = "from paceline.lab import Lab\nwith Lab(hosts=2): pass"
_PATIENCE_S = 30.0
_TO_LEAVE_S = 5.0


def works() -> bool:
    """Whether a lab can be made that way, by making one."""
    if not all(shutil.which(name) for name in ("setpriv", "unshare")):
        return False
    command = [*_INTO, sys.executable, "-c", _TRY]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def run_as_root_of_its_own(command: Sequence[str]) -> int:
    """Run a command in there, with our standard streams; its exit code. It ends when we do, however we do."""
    before = signal.signal(signal.SIGTERM, _leave)
    process = subprocess.Popen([*_INTO, *command])
    try:
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # the terminal has told the command as well
                return process.wait()
    finally:
        _end(process)
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the command to leave, so that it can clean up; unshare itself does not pass signals on."""
    if process.poll() is not None:
        return
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # it has ended, or does not want to
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGTERM)
        process.wait(_TO_LEAVE_S)
    process.kill()
    process.wait()


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(128 + number)
