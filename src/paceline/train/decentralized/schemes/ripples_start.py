"""How Ripples begins: the rules for its groups, and the generators beside the first workers of a process group."""

from __future__ import annotations

import secrets
from typing import Any

import torch.distributed as dist

from paceline.errors import GeneratorError, UsageError
from paceline.policy.groups import Formation, Rules
from paceline.train.decentralized.generator.service import GeneratorService
from paceline.train.decentralized.hosts import own_address
from paceline.train.decentralized.mesh import GroupMesh
from paceline.train.decentralized.schemes.scheme import Worker

_STANDBYS = 8
"""So many of the first workers can run the generator; the others only use it."""

_SETTLE_S = 3.0
"""So long a generator that takes over waits for workers before it ends a job."""

_FIRST_GROUP_SIZE = 2


def start_services(
    worker: Worker, rules: Rules, adapts: bool, link_aware: bool
) -> tuple[GeneratorService | None, list[str], bytes]:
    """Start a generator beside this worker if it is one of the first; return it, where all are, and their secret."""
    mesh = worker.mesh
    assert isinstance(mesh, GroupMesh)
    shared: list[Any] = [secrets.token_bytes(32)]
    dist.broadcast_object_list(shared, group=mesh.group, group_src=0)
    secret: bytes = shared[0]
    service, mine, error = None, "", ""
    if mesh.worker < _STANDBYS:
        try:
            service = GeneratorService(
                own_address(),
                0,
                secret,
                rules,
                total_steps=worker.total_steps,
                adapt_group_size=adapts,
                link_aware=link_aware,
                # All workers have joined the first one before any makes a step. The others succeed one that was lost.
                settle_s=0.0 if mesh.worker == 0 else _SETTLE_S,
            )
            service.start()
            mine = service.address
        except (OSError, GeneratorError, UsageError) as problem:
            service, error = None, str(problem)
    said: list[tuple[str, str]] = [("", "")] * mesh.num_workers
    dist.all_gather_object(said, (mine, error), group=mesh.group)
    addresses = [address for address, _ in said if address]
    if not addresses:
        raise GeneratorError(f"no worker could start the group generator: {said[0][1]}")
    return service, addresses, secret


def read_rules(
    group_size: int | str,
    formation: str,
    slow_factor: float,
    patience_s: float,
    lease_s: float,
    longest_s: float,
    *,
    extra_arrivals: int,
) -> Rules:
    """Return the rules that a user's options stand for."""
    if group_size != "auto" and not isinstance(group_size, int):
        raise UsageError(f'group_size is {group_size!r}: give a number of 2 or more, or "auto"')
    kinds = {one.value: one for one in Formation}
    if formation not in kinds:
        raise UsageError(f"there is no formation {formation!r}: choose one of {', '.join(kinds)}")
    return Rules(
        group_size=_FIRST_GROUP_SIZE if isinstance(group_size, str) else group_size,
        formation=kinds[formation],
        slow_factor=slow_factor,
        patience_s=patience_s,
        longest_average_s=longest_s,
        lease_s=lease_s,
        extra_arrivals=extra_arrivals,
    )
