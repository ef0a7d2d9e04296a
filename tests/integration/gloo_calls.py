"""What test_installed.py runs with and without Paceline's entry point: calls of Gloo, whose results are printed.

    python gloo_calls.py RANK STORE_FILE

Two ranks print the same lines, and the lines must not depend on what is installed beside torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

RANK, FILE = int(sys.argv[1]), sys.argv[2]
NAMES = ("gloo", "GLOO", "cpu:gloo", None, "cpu:gloo,cuda:gloo", "cpu:nothing", "fake")


def _group_facts(group: dist.ProcessGroup | None) -> object:
    chosen = group or c10d._get_default_group()
    return (
        dist.get_backend(group),
        dist.get_backend_config(group),
        chosen.name(),
        chosen._get_backend(torch.device("cpu")).name(),
        c10d._get_sequence_number_for_group(group) if hasattr(c10d, "_get_sequence_number_for_group") else None,
        chosen._get_sequence_number_for_group(),
        chosen._has_hooks(),
        dist.get_world_size(group),
    )


def _sum(group: dist.ProcessGroup | None) -> object:
    number = torch.tensor([RANK + 1.0])
    dist.all_reduce(number, group=group)
    return number.tolist()


def _messages() -> object:
    number = torch.tensor([7.0 * (RANK == 0)])
    if RANK == 0:
        dist.send(number, 1)
    else:
        dist.recv(number, 0)
    return number.tolist()


def _objects() -> object:
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, {"rank": RANK})
    told: list[object] = [RANK]
    dist.broadcast_object_list(told, 0)
    return gathered, told


def _train() -> object:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.full((4, 3), RANK + 1.0)).sum().backward()
    return [parameter.grad.tolist() for parameter in model.parameters()]


def _mesh() -> object:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    return mesh.shape, dist.get_backend(mesh.get_group("b")), mesh.get_group("b").name(), _sum(mesh.get_group("b"))


def _try(what: str, call: Callable[[], object]) -> None:
    try:
        print(f"  {what}: {call()}", flush=True)
    except Exception as error:
        print(f"  {what}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)


def _use() -> None:
    _try("facts", lambda: _group_facts(None))
    _try("sum", lambda: _sum(None))
    _try("facts after a sum", lambda: _group_facts(None))
    _try("barrier", dist.barrier)
    _try("monitored barrier", dist.monitored_barrier)
    _try("messages", _messages)
    _try("objects", _objects)
    for other in (None, "gloo", "cpu:gloo"):
        group = dist.new_group(backend=other)
        _try(f"facts of new_group({other})", lambda group=group: _group_facts(group))
        _try(f"sum in new_group({other})", lambda group=group: _sum(group))
    _try("DDP", _train)
    _try("device mesh", _mesh)
    _try("split_group", lambda: dist.split_group(split_ranks=[[0, 1]]))
    _try("subgroups", lambda: _group_facts(dist.new_subgroups(2)[0]))


def main() -> None:
    print("default_device_backend_map", dist.Backend.default_device_backend_map)
    print("plugins that torch asks for", list(dist.Backend._plugins.keys()))
    for device in ("cpu", "cuda"):
        print("default backend", device, dist.get_default_backend_for_device(device))
    for turn, name in enumerate(NAMES):
        print(f"init_process_group({name!r})", flush=True)
        store = dist.PrefixStore(f"turn{turn}", dist.FileStore(FILE, 2))
        try:
            limit = timedelta(seconds=60)
            dist.init_process_group(name, store=store, rank=RANK, world_size=2, timeout=limit)
        except Exception as error:
            print(f"  {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            if dist.is_initialized():
                dist.destroy_process_group()
            continue
        if name != "fake":
            _use()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
