"""Whether this machine can run a lab, and the sentence to say where it cannot."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from paceline.errors import LabError

_NET_ADMIN, _SYS_ADMIN = 12, 21
_MORE_PLACES = "/usr/sbin:/sbin"  # not everybody's PATH has them


def tool(name: str) -> str:
    """Where a command of iproute2 is; its bare name when it is nowhere."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_MORE_PLACES}") or name


def unavailable() -> str | None:
    """Why there can be no lab here, and what to do about it; None where there can be one."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return "the lab needs Linux 5.8 or newer, as its hosts are network namespaces; run it there or in a VM"
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    held = int(capabilities.group(1), 16) if capabilities else 0
    if not held >> _NET_ADMIN & held >> _SYS_ADMIN & 1:
        return (
            "the lab needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN) to make network namespaces; "
            'run it with sudo env PATH="$PATH", or as root in a VM or a privileged container'
        )
    missing = [name for name in ("ip", "tc") if not os.path.isabs(tool(name))]
    if missing:
        return f"the lab needs the command {missing[0]!r}; install iproute2"
    return None


def require() -> None:
    """Raise the sentence of :func:`unavailable` if there is one."""
    reason = unavailable()
    if reason is not None:
        raise LabError(reason)
