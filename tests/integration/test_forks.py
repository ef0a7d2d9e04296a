"""Processes that fork beside their collectives: DataLoader's workers, children that exit, children with own groups."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from multiprocessing import current_process
from multiprocessing.connection import Connection, Pipe

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from effort import thorough
from paceline.backend import failure
from ranks import BACKEND, Member, run_ranks

pytestmark = [
    pytest.mark.skipif(BACKEND == "gloo", reason="Gloo does not say what a forked child may do"),
    # Python 3.12 and later warn of any fork in a process with threads, and PyTorch's are there already.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
LIMIT_S = 20.0  # for a child to end


def _fork(child: Callable[[], None]) -> int:
    """A child that runs this, and nothing of the test's."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            child()
            code = 0
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        finally:
            os._exit(code)
    return pid


def _exit_code(pid: int) -> int:
    """How the child has ended; it is killed if it has not within the limit."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child hangs: it had {LIMIT_S:g} s")


def _sum(me: Member, count: int = 1000, group: dist.ProcessGroup | None = None) -> None:
    numbers = torch.full((count,), me.rank + 1.0)
    dist.all_reduce(numbers, group=group)
    assert numbers.eq(me.world_size * (me.world_size + 1) / 2).all()


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100,), float(index))


def load(me: Member, persistent: bool) -> None:
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a daemon may not have children
    loader = DataLoader(
        Numbers(), batch_size=4, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    for _ in range(3):
        seen = 0.0
        works = [dist.all_reduce(torch.ones(200_000), async_op=True)]
        for batch in loader:
            seen += float(batch[:, 0].sum())
            works.append(dist.all_reduce(batch.sum(0), async_op=True))
            _sum(me)
        for work in works:
            assert work is not None
            work.wait()
        assert seen == sum(range(24))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_a_data_loader(persistent: bool) -> None:
    run_ranks(load, 2, persistent)


def _heard(pipe: Connection, call: Callable[[], object]) -> None:
    try:
        call()
        pipe.send("no error")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def use_the_parents_group(me: Member) -> list[str]:
    said = []
    _sum(me)
    for call in (
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.send(torch.ones(3), 1 - me.rank),
        lambda: dist.barrier(),
        lambda: dist.all_reduce(torch.ones(3), async_op=True),
        lambda: failure(),
    ):
        ours, theirs = Pipe(duplex=False)
        child = _fork(lambda call=call, theirs=theirs: _heard(theirs, call))
        _sum(me)
        assert ours.poll(LIMIT_S), "the child says nothing"
        said.append(ours.recv())
        assert _exit_code(child) == 0
        _sum(me, 1_000_000)
    return said


def test_a_child_may_not_use_its_parents_group() -> None:
    for said in run_ranks(use_the_parents_group, 2):
        for text in said:
            assert text.startswith("RuntimeError: "), text
            assert "forked child" in text
            assert "destroy_process_group() and init_process_group()" in text


def exit_at_once(me: Member, how: str) -> None:
    ways: dict[str, Callable[[], None]] = {
        "sys.exit": lambda: sys.exit(3),
        "os._exit": lambda: os._exit(3),
        "destroys": lambda: (dist.destroy_process_group(), sys.exit(3)),  # type: ignore[func-returns-value]
    }
    for turn in range(5):
        work = dist.all_reduce(torch.ones(100_000 * turn + 1), async_op=True)
        child = _fork(ways[how])
        assert work is not None
        work.wait()
        _sum(me)
        assert _exit_code(child) == 3
    _sum(me)


@pytest.mark.parametrize("how", ["sys.exit", "os._exit", "destroys"])
def test_children_that_end_right_after_a_collective(how: str) -> None:
    run_ranks(exit_at_once, 2, how)


ORDINARY = """
import os, sys
import torch, torch.distributed as dist
rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("paceline", store=dist.FileStore(file, 2), rank=rank, world_size=2)
dist.all_reduce(torch.ones(1000))
child = os.fork()
if child == 0:
    sys.exit(5)  # with all that the interpreter does at its end
dist.all_reduce(torch.ones(1000))
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
dist.all_reduce(torch.ones(1000))
if sys.argv[3] == "destroys":
    dist.destroy_process_group()
sys.exit(code)
"""


@pytest.mark.parametrize("end", ["destroys", "does not"])
def test_interpreters_that_end_in_the_ordinary_way(tmp_path: object, end: str) -> None:
    import subprocess

    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ORDINARY, str(rank), f"{tmp_path}/store", end],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [5, 5], said


def _live(me: Member, name: str) -> None:
    """In a child: leave the parent's group, and make one with the other children."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", me.store.port, is_master=False)  # the parent's connection is not the child's
    child = Member(me.rank, me.world_size, me.backend, store)
    child.join(name)
    for count in (1, 1000, 1_000_000):
        _sum(child, count)
    group = dist.new_group()
    _sum(child, 10, group)
    child.meet(f"{name}/end")
    dist.destroy_process_group()


def with_children_of_their_own(me: Member) -> None:
    _sum(me)
    for turn in range(2):
        child = _fork(lambda turn=turn: _live(me, f"children {turn}"))
        for _ in range(50):
            _sum(me)
        assert _exit_code(child) == 0
    _sum(me, 1_000_000)


def test_children_with_a_group_of_their_own() -> None:
    run_ranks(with_children_of_their_own, 2)


def fork_often(me: Member, times: int) -> None:
    children = []
    for turn in range(times):
        work = dist.all_reduce(torch.ones(1 + 997 * (turn % 50)), async_op=True)
        children.append(_fork(lambda: None))
        assert work is not None
        work.wait()
        if len(children) == 10:
            assert [_exit_code(child) for child in children] == [0] * 10
            children = []
    _sum(me)


def test_many_forks() -> None:
    run_ranks(fork_often, 2, thorough(2000, 200))
