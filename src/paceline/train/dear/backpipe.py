"""BackPipe: reduce-scatter (or all-reduce) of each bucket as soon as backpropagation has its gradients.

Collectives must come in the same order on all ranks, whatever autograd does on one of them. So buckets leave from the
last to the first, each when it and all before it are complete, and the rest when backpropagation ends. Gradients that
come after their bucket has left (a second backward(), a weight shared between checkpointed parts) stay where autograd
puts them, and follow in a second round that all ranks agree on, as sums of means are means of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.policy.early import early_buckets
from paceline.train.dear.bucket import Bucket, Phase
from paceline.train.dear.control import Agreement, Decision, Standing, agreement, words
from paceline.train.dear.groups import Groups, all_reduce, reduce_scatter
from paceline.train.dear.guard import Guard
from paceline.train.dear.overlap import Recorder


class BackPipe:
    """Launches and awaits reductions."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        groups: Groups,
        guard: Guard,
        recorder: Recorder,
        complete: Callable[[Bucket], None],
    ) -> None:
        self._parameters = parameters
        self._names = names
        self._groups = groups
        self._guard = guard
        self._recorder = recorder
        self._complete = complete
        self._buckets: list[Bucket] = []
        self._of: list[Bucket] = []
        self._next = -1
        self._task = -1
        self._touched = False
        self._fresh = False
        self._dirty = False
        self._agreement: Agreement | None = None
        self.enabled = True
        self.gathered = False
        self.steps = 0
        self.num_early = 0  # how many buckets are all-reduced from the next round on
        self._num_chosen = 0  # and how many are in this one
        self.divisor = groups.num_ranks
        self.before_round: Callable[[], None] = lambda: None
        hooked: Sequence[Any] = parameters
        self._hooks = [
            one.register_post_accumulate_grad_hook(partial(self._arrived, index)) for index, one in enumerate(hooked)
        ]

    def use(self, buckets: Sequence[Bucket]) -> None:
        """Work with these buckets from now on; nothing is under way."""
        self._buckets = list(buckets)
        self.num_early = self._num_chosen = 0
        self._of = [self._buckets[0]] * len(self._parameters)
        for bucket in buckets:
            for index in bucket.indexes:
                self._of[index] = bucket
        self._begin_round()

    def close(self) -> None:
        """Hear of no more gradients."""
        self.enabled = False
        for hook in self._hooks:
            hook.remove()

    def bucket_of(self, index: int) -> Bucket:
        """Where a parameter travels."""
        return self._of[index]

    @property
    def under_way(self) -> bool:
        """Whether gradients have left that no step() has used: those of the last bucket leave first."""
        return self._buckets[-1].phase is Phase.REDUCING

    def forget(self) -> None:
        """Gradients that have not left were dropped: expect all of them again."""
        if not self._fresh and not self.under_way:
            self._begin_round()

    def _begin_round(self) -> None:
        for bucket in self._buckets:
            bucket.await_all()
        self._next = len(self._buckets) - 1
        self._agreement = None
        self._fresh = True

    def backward_begins(self, _: object = None) -> None:
        """A gradient enters the model: be told when this backpropagation ends, also those nested in it."""
        task = torch._C._current_graph_task_id()
        if self.enabled and task != self._task:
            self._task = task
            self._touched = False
            self._dirty = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._task = -1
        if self.enabled and self._touched:
            self.launch_rest()

    def _arrived(self, index: int, _: torch.Tensor) -> None:
        """Autograd has added up a gradient."""
        if not self.enabled:
            return
        if self._task == -1:
            self.backward_begins()
        self._touched = True
        self._fresh = False
        bucket = self._of[index]
        if bucket.phase is Phase.REDUCING:
            return
        bucket.missing.discard(index)
        if bucket.number == self._next:
            self._launch_complete()

    def _launch_complete(self) -> None:
        while self._next >= 0 and not self._buckets[self._next].missing:
            self._launch_next()

    def launch_rest(self) -> None:
        """What has not left leaves now; parameters without a gradient send zeros."""
        while self._next >= 0:
            self._launch_next()

    def _launch_next(self) -> None:
        if self._next == len(self._buckets) - 1:
            self.before_round()
            self._choose_halves()
        bucket = self._buckets[self._next]
        if bucket.phase is Phase.PENDING:  # nobody has used its parameters since the last step
            self._complete(bucket)
        self._send(bucket)
        self._next -= 1
        self.gathered = False

    def _choose_halves(self) -> None:
        """At the start of a round, when all ranks have seen the same agreements, say which buckets are all-reduced."""
        if self.num_early == self._num_chosen:
            return
        self._num_chosen = self.num_early
        for bucket, early in zip(self._buckets, early_buckets(self.num_early, len(self._buckets)), strict=True):
            bucket.all_reduced = early

    def _send(self, bucket: Bucket) -> None:
        """Move the gradients into the flat buffer and let it go."""
        with torch._C.DisableTorchFunctionSubclass():
            targets, sources = [], []
            for position, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
                gradient = parameter.grad
                if gradient is None:
                    view.zero_()
                    continue
                bucket.used[position] = True
                if not bucket.has_lent(position, gradient):
                    if gradient.is_sparse or gradient.requires_grad:
                        self._refuse(bucket.indexes[position], gradient)
                    targets.append(view)
                    sources.append(gradient)
            if targets:
                torch._foreach_copy_(targets, sources)
            for parameter in bucket.parameters:
                parameter.grad = None
            group = self._groups.reduce
            if bucket.all_reduced:
                operation, work = "all-reduce", all_reduce(bucket.flat, group)
            else:
                operation, work = "reduce-scatter", reduce_scatter(bucket.shard, bucket.flat, group)
        bucket.reduction = self._recorder.launched(operation, bucket.number, bucket.size_bytes, work)
        bucket.phase = Phase.REDUCING
        self._guard.raise_on(bucket.parameters)

    def _refuse(self, index: int, gradient: torch.Tensor) -> None:
        if gradient.is_sparse:
            raise UsageError(
                f"parameter {self._names[index]} has a sparse gradient, which DataParallel does not reduce: make its "
                "embedding with sparse=False"
            )
        raise UsageError(
            f"the gradient of {self._names[index]} has a graph of its own (create_graph=True): call that "
            "backward() inside no_sync(), or use torch.autograd.grad"
        )

    def flush(self, decision: Callable[[], Decision | None], *, drops: bool = False) -> Agreement:
        """Let everything leave, agree on it, and wait until this rank has its part of the means."""
        self.launch_rest()
        if self._agreement is None or self._dirty:
            self._dirty = False
            residual, used = self._late_ones()
            standings: list[Standing | None] = [None] * self._groups.num_ranks
            standings[self._groups.rank] = Standing(self.steps, drops)
            said = torch.tensor(words(used, residual, decision(), standings), dtype=torch.int64, device=self._device)
            work = all_reduce(said, self._groups.reduce)
            launched = self._recorder.launched("agreement", 0, said.numel() * said.element_size(), work)
            self.settle(self._buckets[1:])  # while the first, which left last, is under way
            self.settle(self._buckets[:1])
            launched.wait()
            self._agreement = agreement(said.tolist(), len(self._parameters), len(standings))
            for bucket, late in zip(self._buckets, self._agreement.residual, strict=True):
                bucket.used = [self._agreement.used[index] for index in bucket.indexes]
                if late:
                    self._second_round(bucket)
        return self._agreement

    @property
    def _device(self) -> torch.device:
        return self._buckets[0].flat.device

    def _late_ones(self) -> tuple[list[bool], list[bool]]:
        """For each bucket, whether it has gradients that have not left; for each parameter, whether it had any."""
        residual, used = [], [False] * len(self._parameters)
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self._buckets:
                late = [parameter.grad is not None for parameter in bucket.parameters]
                residual.append(True in late)
                for index, one, too_late in zip(bucket.indexes, bucket.used, late, strict=True):
                    used[index] = one or too_late
        return residual, used

    def _second_round(self, bucket: Bucket) -> None:
        first = bucket.sums.clone()
        self._send(bucket)
        self.settle([bucket])
        bucket.sums.add_(first)

    def settle(self, buckets: Sequence[Bucket]) -> None:
        """Wait for the sums of all ranks' gradients, and make them means."""
        sums = []
        for bucket in reversed(buckets):
            if bucket.reduction is not None:
                bucket.reduction.wait()
                bucket.reduction = None
                sums.append(bucket.sums)
        if sums and self.divisor != 1:
            torch._foreach_mul_(sums, 1.0 / self.divisor)

    def settled(self, gathered: bool) -> None:
        """The round is over: its gradients were used, or handed back, or dropped."""
        self.gathered = gathered
        self._begin_round()

    def abandon(self) -> Agreement:
        """Drop gradients that are under way. Their round is finished first, so that all ranks go on alike."""
        self._dirty = True  # what was agreed on before knows nothing of it
        agreed = self.flush(lambda: None, drops=True)
        self.drop()
        return agreed

    def drop(self) -> None:
        """The gradients of a finished round are nobody's."""
        for bucket in self._buckets:
            bucket.phase = Phase.IDLE
            bucket.used = [False] * len(bucket.used)
            self._guard.lower_on(bucket.parameters)
        self.settled(gathered=False)
