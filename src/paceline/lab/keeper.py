"""The process that keeps a lab's namespaces: as long as it lives they do, and it dies with its owner.

Nothing has a name and nothing is on disk, so nothing can be left behind, whatever dies and however::

    owner ends, or closes our standard input -> the keeper ends -> the end of the lifeline reaches each host's
    first process -> it ends -> the kernel kills all other processes of that host -> the namespaces are gone

Each host has a PID namespace, whose first process waits here; that is what makes the kernel kill even daemons. The
other namespaces (network, mounts, host name, IPC) make a host look like one to every library that looks: own
``/sys`` and ``/proc``, own shared memory, own host name and boot id, so that nobody takes two hosts for one and
talks past the network. The keeper itself lives in the network namespace of the switch.

This file runs as a script, with the standard library alone: a lab should not wait for the package to be imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import uuid
from pathlib import Path
from typing import NoReturn

CLONE_FS = 0x00000200
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
HOST_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET

_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000

# A lab's figures should not depend on how this machine happens to be tuned: these are Linux's defaults, but for
# metrics, where one connection's losses would slow the next one down. Where cubic is not open to all, reno is: on
# links this short the two behave alike.
_SETTINGS = {
    "ipv4/tcp_congestion_control": ("cubic", "reno"),
    "ipv4/tcp_rmem": ("4096 131072 6291456",),
    "ipv4/tcp_wmem": ("4096 16384 4194304",),
    "ipv4/tcp_no_metrics_save": ("1",),
    "ipv6/conf/all/accept_dad": ("0",),
    "ipv6/conf/default/accept_dad": ("0",),
}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(kinds: int) -> None:
    """Move the calling thread into new namespaces of these kinds."""
    _check(_libc.unshare(kinds), "unshare")


def setns(descriptor: int, kinds: int) -> None:
    """Move the calling thread into namespaces that exist: of a namespace file or of a process (pidfd)."""
    _check(_libc.setns(descriptor, kinds), "setns")


def _mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    arguments = (source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), None)
    _check(_libc.mount(*arguments), f"mount {source} on {target}")


def _become_host(number: int, names: str) -> None:
    """Give the calling process a machine of its own, without a network interface so far."""
    unshare(HOST_NAMESPACES & ~CLONE_NEWPID)
    _mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    socket.sethostname(f"host{number}")
    _mount("proc", "/proc", "proc")
    _mount("sysfs", "/sys", "sysfs")
    _mount("tmpfs", "/dev/shm", "tmpfs")
    _replace("/etc/hosts", names)
    _replace("/proc/sys/kernel/random/boot_id", f"{uuid.uuid4()}\n")
    _mount("tmpfs", "/dev/shm", "tmpfs")  # empty, and above the files that were just used
    for setting, values in _SETTINGS.items():
        for value in values:
            with contextlib.suppress(OSError):  # a kernel without IPv6 or without cubic will do
                (Path("/proc/sys/net") / setting).write_text(value)
                break


def _replace(path: str, text: str) -> None:
    """Let a file say something else on this host."""
    if os.path.exists(path):
        source = Path("/dev/shm") / Path(path).name
        source.write_text(text)
        _mount(str(source), path, flags=_MS_BIND)


def _live_as_host(number: int, names: str, lifeline: int, ready: int) -> NoReturn:
    """The first process of a host: it reaps orphans and waits for the end of the lifeline."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        _become_host(number, names)
        os.write(ready, b".")
    except OSError as error:
        os.write(ready, f"{error.strerror}\n".encode())
    os.close(ready)
    os.read(lifeline, 1)
    os._exit(0)


def keep(owner: int, num_hosts: int, names: str) -> None:
    """Make a switch and hosts, which know these names; report their process ids, or what went wrong; then stay."""
    unshare(CLONE_NEWNET)
    own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
    lifeline, lifeline_held = os.pipe()
    ready, ready_to_write = os.pipe()
    pids = []
    for number in range(num_hosts):
        unshare(CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            os.close(lifeline_held)
            _live_as_host(number, names, lifeline, ready_to_write)
        setns(own_pids, CLONE_NEWPID)
        pids.append(pid)
    os.close(ready_to_write)
    with os.fdopen(ready) as reports:
        problem = reports.read().strip(".\n").partition("\n")[0]
    print(f"error {problem}" if problem else " ".join(map(str, pids)), flush=True)  # noqa: T201
    select.select([owner, sys.stdin], [], [])
    os.close(lifeline_held)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        keep(os.pidfd_open(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
    except OSError as failure:
        print(f"error {failure.strerror}", flush=True)  # noqa: T201
