"""A rank of an MPI, through mpi4py on numpy buffers."""

from __future__ import annotations

import re
from collections.abc import Callable

import mpi4py  # type: ignore[import-not-found]
import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from . import pattern
from .messages import Prepare, Ready, Setup

Buffer = npt.NDArray[np.generic]


class MpiRank:
    """Buffers and calls of one rank of COMM_WORLD."""

    def __init__(self, setup: Setup) -> None:
        self.world = MPI.COMM_WORLD
        self.rank, self.num_ranks = self.world.Get_rank(), self.world.Get_size()
        if self.num_ranks != setup.num_ranks:
            raise RuntimeError(
                f"MPI says {self.num_ranks} ranks where {setup.num_ranks} were started: mpirun and mpi4py are of "
                "different MPIs; remove the peer's folder in the cache, so that it is installed anew"
            )
        number = re.search(r"[0-9]+(\.[0-9]+)+", MPI.Get_library_version())
        versions = {"MPI": number.group() if number else "?", "mpi4py": mpi4py.__version__, "numpy": np.__version__}
        self.ready = Ready(self.rank, self.num_ranks, versions)
        self.run: Callable[[], None] = self.world.Barrier
        self.barrier: Callable[[], None] = self.world.Barrier

    def prepare(self, order: Prepare) -> int:
        """Make the buffers, and check one run on real data."""
        if order.operation == "barrier":
            self.run = self.world.Barrier
            return 0
        question = (order.operation, self.rank, self.num_ranks, order.count)
        given: Buffer = pattern.given(*question).astype(order.dtype)
        expected: Buffer = pattern.expected(*question).astype(order.dtype)
        in_place = order.operation in ("allreduce", "broadcast")
        result = given if in_place else np.full_like(expected, pattern.POISON)
        self.run = self._call(order.operation, given, result)
        self.run()
        wrong = int(np.count_nonzero(result != expected))
        given.fill(0)  # sums of zeros stay zeros, however many iterations follow
        return wrong

    def _call(self, operation: str, given: Buffer, result: Buffer) -> Callable[[], None]:
        world = self.world
        if operation == "allreduce":
            return lambda: world.Allreduce(MPI.IN_PLACE, result)
        if operation == "broadcast":
            return lambda: world.Bcast(result, 0)
        if operation == "allgather":
            return lambda: world.Allgather(given, result)
        if operation == "reducescatter":
            return lambda: world.Reduce_scatter_block(given, result)
        if operation == "alltoall":
            return lambda: world.Alltoall(given, result)
        after, before = (self.rank + 1) % self.num_ranks, (self.rank - 1) % self.num_ranks
        return lambda: world.Sendrecv(given, after, recvbuf=result, source=before)

    def close(self) -> None:
        """Leave the group."""
        MPI.Finalize()
