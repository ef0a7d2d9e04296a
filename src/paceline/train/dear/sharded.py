"""Sharded update: every rank updates its pieces with the user's own optimizer, then parameters are gathered.

The optimizer keeps its parameters and groups; during a step it is lent the pieces instead. ``optimizer.state`` has,
for each parameter, the state of this rank's piece of it, so 1/P of the whole. Saving gathers the whole state and
loading takes the pieces out of it, so files are those of plain PyTorch, for any number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.train.dear.bucket import Bucket
from paceline.train.dear.buckets import Piece
from paceline.train.dear.feedpipe import PlainArithmetic
from paceline.train.dear.groups import Groups, all_gather
from paceline.train.dear.partial import PartialStep

State = dict[str, Any]


@dataclass
class Own:
    """This rank's piece of a parameter: a view into the parameter's memory, and one into the shard."""

    place: Piece
    parameter: nn.Parameter
    weights: torch.Tensor
    share: torch.Tensor
    pointer: int


class ShardedUpdate:
    """The update of the mode that gathers parameters."""

    def __init__(self, optimizer: Optimizer, names: Sequence[str], groups: Groups) -> None:
        self._optimizer = optimizer
        self._partial = PartialStep(optimizer)
        self._names = names
        self._groups = groups
        self._group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._num_groups = len(optimizer.param_groups)
        self._hyper_parameters: list[dict[str, Any]] = []
        self._buckets: list[Bucket] = []
        self._own: list[list[Own]] = []

    def use(self, buckets: Sequence[Bucket]) -> None:
        """Work with these buckets from now on."""
        self._buckets = list(buckets)
        self._own = []
        for bucket in buckets:
            parameters = dict(zip(bucket.indexes, bucket.parameters, strict=True))
            self._own.append(
                [
                    _own(parameters[place.index], place, bucket.shard)
                    for place in bucket.layout.pieces(self._groups.rank)
                ]
            )

    def begin(self) -> None:
        """Remember the hyper-parameters of step()."""
        self._hyper_parameters = self._partial.hyper_parameters()

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Update this rank's pieces, in one step of the optimizer, and put them into the shards."""
        with PlainArithmetic(buckets[0].flat.device):
            self._prepare(buckets)

    def _prepare(self, buckets: Sequence[Bucket]) -> None:
        by_group: list[list[torch.Tensor]] = [[] for _ in range(self._num_groups)]
        state: defaultdict[torch.Tensor, State] = defaultdict(dict)
        owned = [own for bucket in buckets for own in self._fresh(bucket)]
        used = {index for bucket in buckets for index, one in zip(bucket.indexes, bucket.used, strict=True) if one}
        for own in owned:
            if own.place.index in used:
                own.weights.grad = own.share
                by_group[self._group_of[id(own.parameter)]].append(own.weights)
                state[own.weights] = self._optimizer.state[own.parameter]
        self._partial.run(self._hyper_parameters, by_group, state)
        for own in owned:
            own.weights.grad = None
        if owned:
            torch._foreach_copy_([own.share for own in owned], [own.weights for own in owned])

    def _fresh(self, bucket: Bucket) -> list[Own]:
        """The pieces, viewed anew where a parameter's memory was exchanged."""
        owned = self._own[bucket.number]
        with torch._C.DisableTorchFunctionSubclass():
            for position, own in enumerate(owned):
                if own.parameter.data_ptr() != own.pointer:
                    owned[position] = _own(own.parameter, own.place, bucket.shard)
        return owned

    def arrived(self, buckets: Sequence[Bucket]) -> None:
        """Copy the new weights into the parameters."""
        parameters: list[torch.Tensor] = [parameter for bucket in buckets for parameter in bucket.parameters]
        torch._foreach_copy_(parameters, [view for bucket in buckets for view in bucket.views])

    def consolidated(self) -> dict[int, State]:
        """The whole state by index of the parameter, the same on all ranks; every rank must ask."""
        mine: dict[int, dict[str, tuple[str, Any]]] = {}
        for owned in self._own:
            for own in owned:
                entries = self._optimizer.state.get(own.parameter, {})
                mine[own.place.index] = {key: _described(value, own) for key, value in entries.items()}
        everyone: list[Any] = [None] * self._groups.num_ranks
        dist.all_gather_object(everyone, mine, group=self._groups.reduce)
        kinds: dict[int, dict[str, tuple[str, Any]]] = {}
        for one in everyone:
            for index, entries in one.items():
                kinds.setdefault(index, {}).update(entries)
        whole: dict[int, State] = {}
        for bucket, owned in zip(self._buckets, self._own, strict=True):
            self._consolidate(bucket, owned, kinds, whole)
        return whole

    def _consolidate(
        self,
        bucket: Bucket,
        owned: Sequence[Own],
        kinds: dict[int, dict[str, tuple[str, Any]]],
        whole: dict[int, State],
    ) -> None:
        tensors = sorted(
            {
                (key, str(value), value)
                for index in bucket.indexes
                for key, (kind, value) in kinds.get(index, {}).items()
                if kind == "piece"
            },
            key=lambda entry: entry[:2],
        )
        for index in bucket.indexes:
            if kinds.get(index):
                whole[index] = {key: value for key, (kind, value) in kinds[index].items() if kind == "value"}
        for key, _, dtype in tensors:
            shard = torch.zeros(bucket.layout.shard_numel, dtype=dtype, device=bucket.flat.device)
            for own in owned:
                value = self._optimizer.state.get(own.parameter, {}).get(key)
                if isinstance(value, torch.Tensor) and value.dtype == dtype and value.dim() == 1:
                    shard[own.place.offset : own.place.offset + own.place.numel] = value
            flat = torch.empty(bucket.layout.numel, dtype=dtype, device=shard.device)
            all_gather(flat, shard, self._groups.reduce).wait()
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
                if kinds.get(slot.index, {}).get(key) == ("piece", dtype):
                    view = flat.as_strided(parameter.size(), parameter.stride(), slot.offset)
                    whole[slot.index][key] = view.clone()

    def scatter(self, whole: dict[int, State]) -> None:
        """Keep this rank's pieces of a whole state."""
        self._optimizer.state.clear()
        for owned in self._own:
            for own in owned:
                entries = whole.get(own.place.index)
                if entries:
                    name = self._names[own.place.index]
                    self._optimizer.state[own.parameter] = {
                        key: _cut(key, value, own, name) for key, value in entries.items()
                    }


def memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor as they lie in memory, as a view of one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _own(parameter: nn.Parameter, place: Piece, shard: torch.Tensor) -> Own:
    with torch._C.DisableTorchFunctionSubclass():
        weights = memory_order(parameter.detach())[place.start : place.end]
        pointer = parameter.data_ptr()
    return Own(place, parameter, weights, shard[place.offset : place.offset + place.numel], pointer)


def _described(value: Any, own: Own) -> tuple[str, Any]:
    """Either ("piece", dtype), to be gathered, or ("value", itself), the same on all ranks."""
    if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == own.place.numel:
        return "piece", value.dtype
    return "value", value


def _cut(key: str, value: Any, own: Own, name: str) -> Any:
    """This rank's piece of one entry of a state."""
    if not isinstance(value, torch.Tensor) or (value.dim() == 0 and (own.parameter.dim() > 0 or key == "step")):
        return value
    if value.shape != own.parameter.shape:
        raise UsageError(
            f"the optimizer's {key!r} of {name} has the shape {tuple(value.shape)}, and the parameter "
            f"{tuple(own.parameter.shape)}: this is one rank's part of a state. Save what optimizer.state_dict() "
            "returns when all ranks call it: that loads into any number of ranks"
        )
    like = torch.empty_strided(own.parameter.size(), own.parameter.stride(), dtype=value.dtype, device=value.device)
    return memory_order(like.copy_(value))[own.place.start : own.place.end].clone()
