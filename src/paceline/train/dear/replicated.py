"""Gather gradients: every rank has the whole optimizer, and updates a bucket when its gradients have arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.train.dear.bucket import Bucket
from paceline.train.dear.partial import PartialStep


class ReplicatedUpdate:
    """The update of the mode that gathers gradients."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._partial = PartialStep(optimizer)
        self._group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._num_groups = len(optimizer.param_groups)
        self._hyper_parameters: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Remember the hyper-parameters of step()."""
        self._hyper_parameters = self._partial.hyper_parameters()

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """The shards of the mean gradients are what all ranks need."""

    def arrived(self, buckets: Sequence[Bucket]) -> None:
        """Update with the mean gradients, which stay in ``p.grad`` unless they were dropped meanwhile."""
        by_group: list[list[nn.Parameter]] = [[] for _ in range(self._num_groups)]
        newer: dict[int, torch.Tensor] = {}
        for bucket in buckets:
            for index, parameter, view, used in zip(
                bucket.indexes, bucket.parameters, bucket.views, bucket.used, strict=True
            ):
                if used:
                    gradient = parameter.grad
                    if gradient is not None:  # of a graph older than step()
                        newer[index] = gradient
                    parameter.grad = view
                    by_group[self._group_of[id(parameter)]].append(parameter)
        self._partial.run(self._hyper_parameters, by_group)
        for bucket in buckets:
            _hand_over(bucket, newer)


def _hand_over(bucket: Bucket, newer: dict[int, torch.Tensor]) -> None:
    """Gradients that were dropped are nobody's; newer ones stay, or are added to those that stay."""
    for position, (index, parameter) in enumerate(zip(bucket.indexes, bucket.parameters, strict=True)):
        if index in bucket.dropped:
            parameter.grad = newer.get(index)
        elif bucket.used[position]:
            parameter.grad = bucket.lend(position)
            if index in newer:
                parameter.grad.add_(newer[index])
