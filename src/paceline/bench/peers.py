"""MPI libraries to measure against, each in an environment of its own that is made once and kept.

They live in ``$XDG_CACHE_HOME/paceline/peers/<name>`` (``~/.cache`` by default); remove the folder to have one made
anew.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ContenderError, UsageError

MPI_PEERS = {
    "openmpi": ["mpirun", "--oversubscribe", "-n"],
    "mpich": ["mpiexec", "-launcher", "fork", "-n"],
}
"""How each MPI starts ranks on this host, more of them than cores if need be; the number follows."""

MPI_VARIABLES = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_MOST_INSTALL_S = 900


def folder(name: str) -> Path:
    """Where the environment of a peer is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "paceline" / "peers" / name


def installed(name: str) -> bool:
    """Whether the environment is there, whole, and of this Python."""
    mark = folder(name) / "complete"
    return mark.is_file() and mark.read_text() == platform.python_version()


def launch_command(name: str, num_ranks: int) -> list[str]:
    """The words before the rank's program: the MPI's launcher, and its Python."""
    where = folder(name) / "bin"
    launcher, *options = MPI_PEERS[name]
    return [str(where / launcher), *options, str(num_ranks), str(where / "python")]


def ensure(name: str, *, install: bool, say: Callable[[str], None]) -> None:
    """Have the peer's environment, making it if that is allowed."""
    if installed(name):
        return
    where = folder(name)
    if not install:
        raise UsageError(
            f"{name} is not installed in {where}: leave --no-install out, or leave {name} out of the peers"
        )
    where.parent.mkdir(parents=True, exist_ok=True)
    with open(where.parent / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not installed(name):
            say(f"installing {name}, mpi4py, numpy and msgspec into {where} (once)")
            _make(name, where)


def _make(name: str, where: Path) -> None:
    shutil.rmtree(where, ignore_errors=True)
    packages = [name, "mpi4py", "numpy", "msgspec"]
    try:
        venv.create(where, with_pip=True)
        pip = [str(where / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
        done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=_MOST_INSTALL_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise ContenderError(_cannot(name, str(error))) from None
    if done.returncode != 0:
        raise ContenderError(_cannot(name, (done.stderr.strip().splitlines() or ["pip failed"])[-1]))
    (where / "complete").write_text(platform.python_version())


def _cannot(name: str, reason: str) -> str:
    return f"cannot install {name} with {sys.executable}: {reason}; leave {name} out of the peers to measure without it"
