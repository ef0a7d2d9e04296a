"""Paceline installed beside Gloo: Gloo stays as it is, and Paceline's names with a device are as good as its own."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from paceline.backend import arrivals, chosen_algorithms, failure
from ranks import Member, Ranks

CALLS = Path(__file__).with_name("gloo_calls.py")
NAMES = ("paceline", "PACELINE", "cpu:paceline", "CPU:Paceline")


def _start(file: Path, autoload: str) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(CALLS)]
    return [
        subprocess.Popen(
            [*command, str(rank), str(file)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]


def test_gloo_does_not_notice(tmp_path: Path) -> None:
    without, beside = _start(tmp_path / "without", "0"), _start(tmp_path / "with", "1")
    try:
        said = [process.communicate(timeout=100) for process in (*without, *beside)]
    finally:
        for process in (*without, *beside):
            process.kill()
            process.wait()
    for process, (lines, errors) in zip((*without, *beside), said, strict=True):
        assert process.returncode == 0, lines + errors
        assert "sum in new_group(cpu:gloo): [3.0]" in lines
    for rank in range(2):
        assert said[rank][0].splitlines() == said[2 + rank][0].splitlines()


def _collectives(group: dist.ProcessGroup | None, size: int) -> None:
    rank = dist.get_rank(group)
    ones = torch.ones(size)
    dist.all_reduce(ones, group=group)
    assert ones.tolist() == [float(size)] * size
    dist.broadcast(ones, group_src=0, group=group)
    gathered = torch.zeros(size)
    dist.all_gather_single(gathered, torch.tensor([float(rank)]), group=group)
    assert gathered.tolist() == list(range(size))
    dist.reduce(ones, group_dst=0, group=group)
    part = torch.zeros(1)
    dist.reduce_scatter_single(part, torch.ones(size), group=group)
    assert part.item() == size
    exchanged = torch.zeros(size)
    dist.all_to_all_single(exchanged, torch.full((size,), float(rank)), group=group)
    assert exchanged.tolist() == list(range(size))
    dist.scatter(part, list(torch.ones(size).split(1)) if rank == 0 else None, group_src=0, group=group)
    dist.gather(part, [torch.zeros(1) for _ in range(size)] if rank == 0 else None, group_dst=0, group=group)
    if rank == 0:
        dist.send(part, group_dst=1, group=group)
    elif rank == 1:
        dist.recv(part, group_src=0, group=group)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, rank, group=group)
    assert objects == list(range(size))
    dist.barrier(group)


def _facts(group: dist.ProcessGroup | None) -> list[object]:
    chosen = group or c10d._get_default_group()
    lines = chosen_algorithms(group)
    assert lines
    assert failure(group) == ""
    assert arrivals(group) == []
    cpu = torch.device("cpu")
    with pytest.raises(RuntimeError, match="custom does not yet support sequence numbers"):
        chosen._get_sequence_number_for_group()  # torch has them for its own backends only
    return [
        dist.get_backend(group),
        dist.get_backend_config(group),
        chosen.name(),
        type(chosen._get_backend(cpu)).__name__,
        chosen._get_backend(cpu)._get_sequence_number_for_group(),
        chosen._has_hooks(),
        len(lines),
    ]


def _forget_the_fake_backend() -> None:
    """torch._dynamo registers it, and beside it torch itself has no default backend for "cpu:gloo"."""
    dist.Backend._plugins.pop("FAKE", None)


def use(me: Member, name: str) -> list[list[object]]:
    dist.set_debug_level_from_env()
    _forget_the_fake_backend()
    facts = []
    limit = timedelta(seconds=60)
    store = dist.PrefixStore("world", me.store)
    dist.init_process_group(name, store=store, rank=me.rank, world_size=me.world_size, timeout=limit)
    for group in (None, dist.new_group(), dist.new_group(backend=name, timeout=timedelta(seconds=50))):
        _collectives(group, me.world_size)
        facts.append(_facts(group))
    mesh = init_device_mesh("cpu", (me.world_size,))
    _collectives(mesh.get_group(), me.world_size)
    gloo = dist.new_group(backend="cpu:gloo")
    dist.barrier(gloo)
    facts.append([gloo.name(), gloo._get_sequence_number_for_group() > 0])
    hasty = dist.new_group(backend=name, timeout=timedelta(seconds=1))
    if me.rank == 0:
        with pytest.raises(RuntimeError, match=r"Timed out after 1\.0 s|failed to pass monitoredBarrier in 1000 ms"):
            dist.barrier(hasty)
    me.meet("end")
    dist.destroy_process_group()
    return facts


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_a_name_with_a_device_is_as_good(debug: str) -> None:
    facts = []
    for name in NAMES:
        with Ranks(use, 2, name, join=False, environment={"TORCH_DISTRIBUTED_DEBUG": debug}) as ranks:
            both = ranks.results(60)
        assert both[0] == both[1]
        facts.append(both[0])
    assert facts == [facts[0]] * len(NAMES)
    kind = "_ProcessGroupWrapper" if debug == "DETAIL" else "Backend"
    assert facts[0][0][:4] == ["paceline", "cpu:paceline", "custom", kind]
    assert facts[0][3] == ["gloo", True]


def make_for_cuda(me: Member, cpu: str) -> str:
    store = dist.PrefixStore(cpu, me.store)
    try:
        dist.init_process_group(f"cpu:{cpu},cuda:nccl", store=store, rank=me.rank, world_size=me.world_size)
    except RuntimeError as error:
        return str(error)
    return "made"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_a_map_with_cuda_says_what_it_says_with_gloo() -> None:
    said = []
    for cpu in ("gloo", "paceline"):
        with Ranks(make_for_cuda, 1, cpu, join=False) as ranks:  # two would race: Gloo hears that the other gave up
            said.append(ranks.results(60))
    assert said[0] == said[1]


def mix(me: Member) -> object:
    _forget_the_fake_backend()
    store = dist.PrefixStore("world", me.store)
    dist.init_process_group("cpu:paceline,cuda:gloo", store=store, rank=me.rank, world_size=me.world_size)
    _collectives(None, me.world_size)
    group = dist.new_group()
    _collectives(group, me.world_size)
    assert chosen_algorithms(group)
    assert isinstance(c10d._get_default_group()._get_sequence_number_for_group(), int)
    me.meet("end")
    dist.destroy_process_group()
    return dist.is_initialized()


def test_another_backend_for_another_device() -> None:
    with Ranks(mix, 2, join=False) as ranks:
        assert ranks.results(60) == [False, False]
