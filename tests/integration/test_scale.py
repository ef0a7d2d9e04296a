"""Much of everything: groups, ranks, bytes, jobs; and a kernel that forbids ranks to read each other's memory.

``make test`` runs small numbers; EFFORT=1 and more, the whole ones (``tests/effort.py``).
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from effort import THOROUGH, thorough
from ranks import BACKEND, Member, Ranks, run_ranks

GB = 10**9
NUM_GROUPS = thorough(2000, 100)


def _all_collectives(me: Member, count: int, group: dist.ProcessGroup | None = None) -> None:
    """Each collective once, with numbers that say who they come from."""
    rank, size = me.rank, me.world_size
    numbers = torch.arange(count, dtype=torch.float64) + rank
    total = torch.arange(count, dtype=torch.float64) * size + size * (size - 1) / 2
    dist.all_reduce(numbers, group=group)
    assert torch.equal(numbers, total)
    for root in (0, size - 1):
        numbers = torch.full((count,), float(rank))
        dist.broadcast(numbers, root, group=group)
        assert numbers.eq(root).all()
        numbers = torch.full((count,), float(rank))
        dist.reduce(numbers, root, group=group)
        assert rank != root or numbers.eq(size * (size - 1) / 2).all()
        gathered = [torch.zeros(count) for _ in range(size)] if rank == root else None
        dist.gather(torch.full((count,), float(rank)), gathered, root, group=group)
        assert gathered is None or all(part.eq(source).all() for source, part in enumerate(gathered))
        parts = [torch.full((count,), float(target)) for target in range(size)] if rank == root else None
        part = torch.zeros(count)
        dist.scatter(part, parts, root, group=group)
        assert part.eq(rank).all()
    everything = torch.zeros(size * count)
    dist.all_gather_single(everything, torch.full((count,), float(rank)), group=group)
    assert torch.equal(everything, torch.arange(size).float().repeat_interleave(count))
    part = torch.zeros(count)
    dist.reduce_scatter_single(part, torch.arange(size).float().repeat_interleave(count), group=group)
    assert part.eq(rank * size).all()
    exchanged = torch.zeros(size * count)
    dist.all_to_all_single(exchanged, torch.full((size * count,), float(rank)), group=group)
    assert torch.equal(exchanged, torch.arange(size).float().repeat_interleave(count))
    received = torch.zeros(count)
    requests = [dist.isend(torch.full((count,), float(rank)), (rank + 1) % size, group=group)]
    requests.append(dist.irecv(received, (rank - 1) % size, group=group))
    for request in requests:
        assert request is not None
        request.wait()
    assert received.eq((rank - 1) % size).all()
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, (rank, "x" * rank), group=group)
    assert objects == [(source, "x" * source) for source in range(size)]
    dist.barrier(group)


def _held() -> tuple[int, int, int]:
    """Descriptors, threads, and kilobytes in memory of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), int(status["Threads"]), int(status["VmRSS"].split()[0])


def make_and_destroy(me: Member, num_groups: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    before = _held()
    for turn in range(num_groups + 20):
        if turn == 20:
            me.meet("warm")
            before = _held()
        group = dist.new_group()
        numbers = torch.ones(1000)
        dist.all_reduce(numbers, group=group)
        assert numbers.eq(me.world_size).all()
        if turn % 10 == 0:
            _all_collectives(me, 10, group)
        dist.destroy_process_group(group)
    me.meet("done")
    return before, _held()


@pytest.mark.timeout(60 + NUM_GROUPS)
def test_groups_leave_nothing_behind() -> None:
    for before, after in run_ranks(make_and_destroy, 2, NUM_GROUPS, timeout_s=50 + NUM_GROUPS):
        assert after[0] <= before[0], "descriptors"
        assert after[1] <= before[1], "threads"
        assert after[2] - before[2] < 10_000 + 10 * NUM_GROUPS, "kilobytes"


def collectives(me: Member, counts: list[int]) -> None:
    for count in counts:
        _all_collectives(me, count)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("num_ranks", thorough([16, 32], [16]))
def test_many_ranks_on_one_host(num_ranks: int, transport: str) -> None:
    run_ranks(collectives, num_ranks, [1, 3000], timeout_s=240, environment={"PACELINE_TRANSPORT": transport})


def move_much(me: Member, size_bytes: int, dtype: torch.dtype) -> None:
    """Values differ from place to place, and are checked at both ends, in the middle and around powers of two."""
    count = size_bytes // torch.empty(0, dtype=dtype).element_size()
    places = {0, 1, count // 2, count - 2, count - 1}
    places |= {bound + step for bound in (2**29, 2**30, 2**31, 2**32) for step in (-1, 0, 1) if bound + step < count}

    def value(place: int, rank: int) -> int:
        return (place % 7 + rank) % 50

    def fill(rank: int) -> None:
        data.fill_(rank)
        for place in places:
            data[place] = value(place, rank)

    def check(wanted: list[int], elsewhere: int) -> None:
        assert [int(data[place]) for place in sorted(places)] == wanted
        step = 1 << 20
        for start in (5, count // 3, count - step - 5):
            assert int((data[start : start + step] != elsewhere).sum()) <= len(places)

    data = torch.empty(count, dtype=dtype)
    fill(me.rank)
    dist.all_reduce(data)
    check([value(place, 0) + value(place, 1) for place in sorted(places)], 1)
    fill(3 + me.rank)
    dist.broadcast(data, 1)
    check([value(place, 4) for place in sorted(places)], 4)
    fill(5 + me.rank)
    if me.rank == 0:
        dist.send(data, 1)
    else:
        dist.recv(data, 0)
        check([value(place, 5) for place in sorted(places)], 5)


def _free_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@pytest.mark.timeout(900)
@pytest.mark.skipif(not THOROUGH, reason="takes gigabytes: EFFORT=1")
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("size_bytes", [3 * GB, 5 * GB], ids=["3GB", "5GB"])
def test_tensors_of_gigabytes(size_bytes: int, dtype: torch.dtype, transport: str) -> None:
    if _free_bytes() < 3 * size_bytes:
        pytest.skip(f"needs {3 * size_bytes / GB:g} GB of memory")
    run_ranks(move_much, 2, size_bytes, dtype, timeout_s=800, environment={"PACELINE_TRANSPORT": transport})


def test_two_jobs_on_one_host() -> None:
    counts = [1, 1000, 200_000]
    with Ranks(collectives, 3, counts) as first, Ranks(collectives, 3, counts) as second:
        first.results(60)
        second.results(60)


_PROCESS_VM_READV = {"x86_64": 310, "aarch64": 270}.get(platform.machine())


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def _forbid(number: int) -> None:
    """Let the kernel answer EPERM to a system call of this thread, and of those it starts, as containers do."""
    instructions = (_Instruction * 4)(
        _Instruction(0x20, 0, 0, 0),  # load the number of the call
        _Instruction(0x15, 0, 1, number),  # skip the next one unless it is this one
        _Instruction(0x06, 0, 0, 0x00050001),  # return EPERM
        _Instruction(0x06, 0, 0, 0x7FFF0000),  # allow
    )
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS"
    program = _Filter(4, instructions)
    if libc.prctl(22, 2, ctypes.byref(program), 0, 0) != 0:
        raise NotImplementedError("the kernel has no seccomp filters")


def without_reading_memory(me: Member, forbidden: list[int]) -> str:
    assert _PROCESS_VM_READV is not None
    try:
        if me.rank in forbidden:
            _forbid(_PROCESS_VM_READV)
    except NotImplementedError as error:
        return str(error)
    me.join()
    for _ in range(2):
        numbers = torch.from_numpy(np.full(5 << 20, me.rank + 1, dtype=np.float32))  # in huge pages, which are pulled
        dist.all_reduce(numbers)
        assert numbers.eq(me.world_size * (me.world_size + 1) / 2).all()
        numbers = torch.from_numpy(np.full(5 << 20, me.rank, dtype=np.float32))
        dist.broadcast(numbers, 1)
        assert numbers.eq(1).all()
    _all_collectives(me, 300_000)
    me.meet("end")
    dist.destroy_process_group()
    return ""


@pytest.mark.skipif(_PROCESS_VM_READV is None, reason="the number of process_vm_readv is not known here")
@pytest.mark.parametrize("forbidden", [[0, 1, 2], [1]], ids=["all", "one"])
def test_a_kernel_that_forbids_reading_memory(forbidden: list[int]) -> None:
    with Ranks(without_reading_memory, 3, forbidden, join=False) as ranks:
        for said in ranks.results(100):
            if said:
                pytest.skip(said)


def in_threads(me: Member) -> None:
    groups = [dist.new_group() for _ in range(4)]
    errors: list[BaseException] = []

    def work(group: dist.ProcessGroup) -> None:
        try:
            for _ in range(10):
                _all_collectives(me, 500, group)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors


@pytest.mark.skipif(BACKEND == "gloo", reason="Gloo's object collectives are not for many threads")
def test_groups_in_threads() -> None:
    run_ranks(in_threads, 2)
