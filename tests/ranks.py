"""Real ranks for tests: a process each, in a process group of the backend under test, and never one left behind.

    assert run_ranks(add_up, 3, 10) == [33, 33, 33]

    def add_up(me: Member, start: int) -> int:      # at module level, as it runs in the rank's process
        number = torch.tensor(start + me.rank)
        dist.all_reduce(number)
        return int(number)

Processes are forked from a server that has imported torch and nothing else, so a rank starts in milliseconds and yet
knows nothing of the tests before it. The rendezvous store lives in the test's process, and outlives any rank.
Warnings are errors in the ranks as they are in the tests, except for those of PyTorch named in ``EXPECTED_WARNINGS``.

``PACELINE_TEST_BACKEND`` names the backend (default ``paceline``); with ``gloo`` the tests test themselves.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

BACKEND = os.environ.get("PACELINE_TEST_BACKEND", "paceline")
EXPECTED_WARNINGS = (
    r"`torch\.distributed\.all_gather_into_tensor` is deprecated",
    r"`torch\.distributed\.reduce_scatter_tensor` is deprecated",
    r"`torch\.distributed\.all_(reduce|gather)_coalesced` will be deprecated",
    r"`torch\.distributed\._(all_gather|reduce_scatter)_base` is a private function",
    r"`torch\.jit\.(script|interface)` is deprecated",
    r"You are using a Backend .* as a ProcessGroup",
)
GRACE_S = 3.0  # what the other ranks get to say their part after one has failed
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
_PR_SET_PDEATHSIG = 1

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    [
        "pytest",
        "torch._dynamo",  # the first step of any optimizer imports it
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "torch.distributed.tensor.parallel",
    ]
)


@dataclass(frozen=True)
class Member:
    """What a rank's function is told: who it is, and a store to talk to the test and to make further groups."""

    rank: int
    world_size: int
    backend: str
    store: dist.Store

    def join(self, name: str = "world", timeout_s: float = 60.0) -> None:
        """Enter the process group of all ranks, rendezvousing under this name."""
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore(name, self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
        )

    def meet(self, name: str) -> None:
        """Wait for all ranks to come here, by the store alone. Each name serves once."""
        if self.store.add(f"{name}/arrived", 1) == self.world_size:
            self.store.set(f"{name}/complete", "")
        self.store.wait([f"{name}/complete"])


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: with a value, with an error (its traceback), or killed (neither)."""

    rank: int
    value: Any = None
    error: str | None = None
    killed: bool = False


class RankError(AssertionError):
    """At least one rank failed; the message has the tracebacks, the first failure first."""


class Ranks:
    """Ranks the test holds in its hands: ``pids`` to stop and kill them, ``outcomes()`` to hear of them.

    With ``join=False`` the function itself enters (and leaves) its process groups. Leaving the ``with`` block kills
    whatever still runs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        backend: str = BACKEND,
        group_timeout_s: float = 60.0,
        join: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: dict[Connection, int] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._failures: list[int] = []
        self._processes = []
        timeout_s = group_timeout_s if join else None
        for rank in range(world_size):
            ours, theirs = _processes.Pipe(duplex=False)
            settings = (rank, world_size, backend, self.store.port, timeout_s, {**_LOOPBACK, **(environment or {})})
            process = _processes.Process(target=_live, args=(theirs, settings, function, args), daemon=True)
            process.start()
            theirs.close()
            self._pipes[ours] = rank
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank, unless it has ended already."""
        if self._processes[rank].is_alive():
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, number)

    def outcomes(self, timeout_s: float, ranks: Sequence[int] | None = None) -> list[Outcome]:
        """Wait until these ranks (by default all) have ended; TimeoutError says which have not."""
        awaited = set(range(len(self._processes)) if ranks is None else ranks)
        self._collect(awaited, time.monotonic() + timeout_s)
        if silent := sorted(awaited - self._outcomes.keys()):
            raise TimeoutError(f"after {timeout_s:g} s, nothing from ranks {silent}; heard of {self._outcomes}")
        return [self._outcomes[rank] for rank in sorted(awaited)]

    def ended(self) -> list[Outcome]:
        """Those that have ended so far."""
        self._collect(set(range(len(self._processes))), time.monotonic())
        return [self._outcomes[rank] for rank in sorted(self._outcomes)]

    def results(self, timeout_s: float = 60.0) -> list[Any]:
        """The values of all ranks; RankError if one failed, died or said nothing in time."""
        everyone = set(range(len(self._processes)))
        self._collect(everyone, time.monotonic() + timeout_s, until_failure=True)
        if self._failures:
            self._collect(everyone, time.monotonic() + GRACE_S)
        silent = sorted(everyone - self._outcomes.keys())
        if self._failures or silent:
            said = [self._outcomes[rank].error or f"rank {rank} died" for rank in self._failures]
            if silent:
                said.append(f"nothing from ranks {silent} (the limit was {timeout_s:g} s)")
            raise RankError("\n".join(said))
        return [self._outcomes[rank].value for rank in sorted(everyone)]

    def stop(self) -> None:
        """Kill every rank that still runs, and wait for its end."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(GRACE_S)
            if process.is_alive():
                raise RankError(
                    f"process {process.pid} outlives SIGKILL: look at it with `ps -o stat,wchan {process.pid}`"
                )
        for pipe in self._pipes:
            pipe.close()

    def _collect(self, awaited: set[int], deadline_s: float, until_failure: bool = False) -> None:
        while awaited - self._outcomes.keys() and not (until_failure and self._failures):
            pending = [pipe for pipe, rank in self._pipes.items() if rank in awaited and rank not in self._outcomes]
            ready = wait(pending, max(0.0, deadline_s - time.monotonic()))
            if not ready:
                return
            for pipe in ready:
                rank = self._pipes[pipe]
                try:
                    self._outcomes[rank] = outcome = pipe.recv()
                except EOFError:
                    self._outcomes[rank] = outcome = Outcome(rank, killed=True)
                if outcome.error is not None or outcome.killed:
                    self._failures.append(rank)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    backend: str = BACKEND,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``function(member, *args)`` on every rank and return the values by rank; RankError tells what went wrong."""
    with Ranks(function, world_size, *args, backend=backend, environment=environment) as ranks:
        return ranks.results(timeout_s)


def _live(pipe: Connection, settings: tuple[Any, ...], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """A rank's life."""
    rank, world_size, backend, port, timeout_s, environment = settings
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the server ends with the test: so do we
    os.environ.update(environment)
    warnings.simplefilter("error")
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    torch.set_num_threads(1)
    try:
        member = Member(rank, world_size, backend, dist.TCPStore("127.0.0.1", port, is_master=False))
        torch.manual_seed(rank)
        if timeout_s is not None:
            member.join(timeout_s=timeout_s)
        value = function(member, *args)
        if timeout_s is not None:
            member.meet("end")  # leaving while others still communicate is a test of its own
            dist.destroy_process_group()
        pipe.send(Outcome(rank, value))
    except BaseException:
        pipe.send(Outcome(rank, error=f"rank {rank} of {world_size} on {backend}:\n{traceback.format_exc()}"))
        os._exit(1)  # a broken process group may not be able to say goodbye
