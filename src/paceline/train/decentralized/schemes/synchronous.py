"""What schemes share whose workers all take part in global averages."""

from __future__ import annotations

import torch
import torch.distributed as dist

from paceline.errors import UnsupportedError
from paceline.train.decentralized.hosts import host_name
from paceline.train.decentralized.mesh import GroupMesh, Mesh
from paceline.train.decentralized.schemes.scheme import Scheme


def group_mesh(mesh: Mesh) -> GroupMesh:
    """Return the mesh of a process group, or raise an error where workers come and go."""
    if not isinstance(mesh, GroupMesh):
        raise UnsupportedError('this scheme needs a process group: only "ripples" runs with a generator of its own')
    return mesh


def average_all(scheme: Scheme) -> torch.Tensor:
    """Return the mean of all workers' weights; every worker must call it."""
    mesh, weights = group_mesh(scheme.mesh), scheme.weights
    vector = weights.new(weights.num_weights)
    weights.read(vector)
    with scheme.waiting():
        dist.all_reduce(vector, group=mesh.group)
    return vector.div_(mesh.num_workers)


def hosts_of(mesh: Mesh) -> list[list[int]]:
    """Return the workers of each host, by number."""
    group = group_mesh(mesh)
    names: list[str] = [""] * group.num_workers
    dist.all_gather_object(names, host_name(), group=group.group)
    hosts: dict[str, list[int]] = {}
    for worker, name in enumerate(names):
        hosts.setdefault(name, []).append(worker)
    return list(hosts.values())
