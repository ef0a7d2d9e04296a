"""One training iteration, held together: who is under way, who may read what, and what step() does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.errors import StepError
from paceline.train.dear.backpipe import BackPipe
from paceline.train.dear.bucket import Bucket, Phase
from paceline.train.dear.buckets import Shape, lay_out
from paceline.train.dear.control import Decision
from paceline.train.dear.feedpipe import FeedPipe, PlainArithmetic
from paceline.train.dear.groups import Groups
from paceline.train.dear.guard import Guard
from paceline.train.dear.lookout import Lookout
from paceline.train.dear.order import learnt, out_of_order, worth_learning
from paceline.train.dear.overlap import Recorder
from paceline.train.dear.replicated import ReplicatedUpdate
from paceline.train.dear.sharded import ShardedUpdate
from paceline.train.dear.tuning import Tuner
from paceline.units import format_size

log = logging.getLogger("paceline.dear")


class Pipeline:
    """Parameters in buckets, on their way out and back in.

    Threads may read parameters, gradients and state beside the training loop, as with DDP. Whatever moves a bucket on
    does so under one lock. Reading a parameter that is not PENDING takes none, as the loop may hold the lock for as
    long as another rank is late.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        optimizer: Optimizer,
        groups: Groups,
        tuner: Tuner,
        *,
        sharded: bool,
        at_once: bool,
        log_every: int,
        deterministic: bool = False,
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.optimizer = optimizer
        self.groups = groups
        self.sharded = sharded
        self.recorder = Recorder(groups.rank)
        self.guard = Guard(self)
        self.update: ReplicatedUpdate | ShardedUpdate
        self.update = ShardedUpdate(optimizer, self.names, groups) if sharded else ReplicatedUpdate(optimizer)
        self._lock = threading.RLock()
        self.feed = FeedPipe(groups, self.guard, self.recorder, self.update, self._lock)
        self.back = BackPipe(self.parameters, self.names, groups, self.guard, self.recorder, self.feed.complete)
        self._index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._shapes = [
            Shape(parameter.numel(), parameter.element_size(), (parameter.dtype, parameter.device))
            for parameter in self.parameters
        ]
        self._tuner = tuner
        self.looks_out = groups.rank == 0 and not sharded
        self._at_once = at_once
        self._log_every = log_every
        self._deterministic = deterministic
        self.training_thread = threading.get_ident()
        self._order = list(range(len(self.parameters)))
        self._uses: list[int] | None = None
        self._arrivals: list[int] = []
        self._streak = 0
        self._times_learnt = 0
        self._decision = Decision()
        self.before_step: Callable[[], None] = lambda: None
        self.buckets: list[Bucket] = []
        self._lay_out(tuner.threshold_bytes)
        self._learn()

    # What the guard asks.

    def about_to_read(self, parameters: list[nn.Parameter]) -> bool:
        """Bring these up to date; whether some stay guarded, since only their gradients are away."""
        if not parameters:
            self.synchronize()
            return True
        away = False
        for parameter in parameters:
            index = self._index_of[id(parameter)]
            bucket = self.back.bucket_of(index)
            if bucket.phase is Phase.PENDING:
                self._arrivals.append(bucket.number)
                self.feed.complete(bucket, self.buckets[bucket.number + 1 :])
            elif bucket.phase is Phase.REDUCING or (self._uses is not None and self._reads_beside()):
                away = True
            else:
                if self._uses is not None:
                    self._uses.append(index)
                self.guard.lower_on([parameter])
                if self.back.bucket_of(index).phase is not Phase.IDLE:  # since a moment ago, by another thread
                    self.guard.raise_on([parameter])
        return away

    def _reads_beside(self) -> bool:
        """Whether a thread beside the training loop reads; when it does so is not the order of the model."""
        return self._deterministic and threading.get_ident() != self.training_thread

    def read_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """What ``parameter.grad`` is: the mean over all ranks, which is fetched if it is away."""
        bucket = self.back.bucket_of(self._index_of[id(parameter)])
        self._fetch_gradients(bucket)
        if bucket.phase is Phase.PENDING and not self.sharded:
            self.feed.complete(bucket)
        with torch._C.DisableTorchFunctionSubclass():
            return parameter.grad

    def write_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """``parameter.grad = gradient``."""
        index = self._index_of[id(parameter)]
        bucket = self.back.bucket_of(index)
        if bucket.phase is Phase.PENDING and gradient is None:
            bucket.dropped.add(index)
        elif bucket.phase is Phase.PENDING:
            self.feed.complete(bucket)
        else:
            self._fetch_gradients(bucket)
        with torch._C.DisableTorchFunctionSubclass():
            parameter.grad = gradient

    def _fetch_gradients(self, bucket: Bucket) -> None:
        """Gather all gradients if this bucket's are away; another thread may be doing so."""
        if bucket.phase is Phase.REDUCING:
            with self._lock:
                if bucket.phase is Phase.REDUCING:
                    self.gather_gradients()

    # What the wrapper does.

    def synchronize(self) -> None:
        """Bring every parameter up to date."""
        for bucket in self.buckets:
            self.feed.complete(bucket)

    def close(self) -> None:
        """Leave the parameters alone from now on, whatever has arrived."""
        self.back.close()
        self.guard.lower_on(self.parameters)

    def before_reading_state(self) -> None:
        """Somebody reads the optimizer's state: nothing may be outstanding, nor may another thread's update go on."""
        with self._lock:
            self.synchronize()

    def use(self, parameters: Iterable[nn.Parameter]) -> None:
        """Bring these up to date before something reads them that the guard does not see."""
        guarded = [parameter for parameter in parameters if self.guard.holds(parameter)]
        if guarded:
            self.about_to_read(guarded)

    def reduce(self) -> None:
        """Let all gradients leave, agree on what there is, and wait for this rank's part of the means."""
        with self._lock:
            agreed = self.back.flush(self._decide)
            self._note(agreed.decision)
            if agreed.quarrel is not None:
                self.back.drop()
                raise StepError(agreed.quarrel)

    def abandon(self) -> None:
        """Drop gradients that are under way; a rank that does so alone makes the step() of the others an error."""
        with self._lock:
            self._note(self.back.abandon().decision)

    def _note(self, decision: Decision) -> None:
        """Rank 0's: for the next round, or for the end of the next step."""
        if decision.num_early is not None:
            self.back.num_early = decision.num_early
        elif decision != Decision():
            self._decision = decision

    def gather_gradients(self) -> None:
        """Somebody reads gradients before step(): put the means into ``p.grad``, as DDP does at once.

        In the mode that gathers gradients this is the all-gather that step() would launch; in the other it is one
        more, so there every rank has to read.
        """
        with self._lock:
            self.reduce()
            group = self.groups.reduce if self.sharded else self.groups.gather
            for bucket in self.buckets:
                if not bucket.all_reduced:
                    self.feed.gather(bucket, group)
            for bucket in self.buckets:
                self.feed.wait(bucket)
                with torch._C.DisableTorchFunctionSubclass():
                    for position, (parameter, used) in enumerate(zip(bucket.parameters, bucket.used, strict=True)):
                        parameter.grad = bucket.lend(position) if used else None
                bucket.phase = Phase.IDLE
                self.guard.lower_on(bucket.parameters)
                bucket.used = [False] * len(bucket.used)
            self.back.settled(gathered=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, also those under way."""
        if self.back.under_way:
            self.abandon()
        self.back.forget()
        if not set_to_none:
            self.synchronize()
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self.buckets:
                if bucket.phase is Phase.PENDING:
                    bucket.dropped.update(bucket.indexes)
            for parameter in self.parameters:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.requires_grad_(False).zero_()

    def step(self) -> None:
        """What is left of an optimizer's step: let updates happen where gradients or parameters arrive."""
        with self._lock:
            self.before_step()
            self.update.begin()
            if self.back.gathered:
                self._step_gathered()
            else:
                self.reduce()
            if not (self.back.gathered and not self.sharded):
                self._launch()
            self.back.settled(gathered=False)
            self._end_step()

    def end_whole_step(self) -> None:
        """The optimizer itself has used the gradients."""
        with self._lock:
            self.back.settled(gathered=False)
            self._end_step()

    def _launch(self) -> None:
        """Let all-gathers go, the first one soon: it is awaited first. Then twice as many at a time, or all at once."""
        begin, count = 0, len(self.buckets) if self._at_once else 1
        while some := self.buckets[begin : begin + count]:
            self.update.prepare(some)
            for bucket in some:
                self.feed.launch(bucket)
            begin, count = begin + count, 2 * count

    def _step_gathered(self) -> None:
        """The gradients were read, and perhaps changed, before step(): what is in ``p.grad`` counts."""
        for bucket in self.buckets:
            bucket.used = [parameter.grad is not None for parameter in bucket.parameters]
            with torch.no_grad():
                for position, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
                    if parameter.grad is None:
                        view.zero_()
                    elif not bucket.has_lent(position, parameter.grad):
                        view.copy_(parameter.grad)
                if self.sharded:
                    bucket.shard.copy_(bucket.part(self.groups.rank))
                    for parameter in bucket.parameters:
                        parameter.grad = None
                else:
                    bucket.dropped.clear()
                    self._update_in_place(bucket)

    def _update_in_place(self, bucket: Bucket) -> None:
        gradients = [parameter.grad for parameter in bucket.parameters]
        for parameter in bucket.parameters:
            parameter.grad = None
        with PlainArithmetic(bucket.flat.device):
            self.update.arrived([bucket])
        for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
            parameter.grad = gradient
        bucket.used = [False] * len(bucket.used)

    def _end_step(self) -> None:
        """Act on what rank 0 has decided, and say what was hidden."""
        self.back.steps += 1
        done = self.recorder.next_step()
        if done is not None and self._log_every and done.step % self._log_every == 0:
            log.info("%s", done.line())
        was_learning, decision = self._uses is not None, self._decision
        self._decision = Decision()
        if was_learning and decision.learn_order:
            self._take_order()
        elif decision.threshold_bytes:
            self._lay_out(decision.threshold_bytes)
        elif decision.learn_order:
            self._learn()
        self._arrivals.clear()

    # Order and fusion: rank 0 decides, once a step, and all follow.

    def _decide(self) -> Decision | None:
        if self.groups.rank:
            return None
        if self._uses is not None:  # this was the iteration to learn from: now take the order over
            return Decision(learn_order=bool(self._uses))
        if self._deterministic:  # all that follows depends on clocks, or on which all-gathers have arrived
            return Decision()
        self._streak = self._streak + 1 if out_of_order(self._arrivals) else 0
        if worth_learning(self._streak, self._times_learnt):
            self._streak = 0
            return Decision(learn_order=True)
        threshold_bytes = self._tuner.next_threshold_bytes()
        if threshold_bytes or self._tuner.searching or not self.looks_out:
            return Decision(threshold_bytes=threshold_bytes)
        return Decision(num_early=self._lookout.next_num_early())

    def _learn(self) -> None:
        """Note the order of first uses in the next iteration."""
        self.synchronize()
        self._uses = []
        self.guard.raise_on(self.parameters)

    def _take_order(self) -> None:
        """Bucket as rank 0 has used the parameters."""
        self.synchronize()
        order = learnt(self._uses or [], len(self.parameters))
        said = torch.tensor(order, dtype=torch.int64, device=self.buckets[0].flat.device)
        dist.broadcast(said, group=self.groups.reduce, group_src=0)
        self._uses = None
        self._times_learnt += 1
        self.guard.lower_on(self.parameters)
        self._order = said.tolist()
        self._lay_out(self._tuner.threshold_bytes)

    def _lay_out(self, threshold_bytes: int) -> None:
        """Cut anew; what the optimizer knows moves with its pieces."""
        layouts = lay_out(self._shapes, self._order, threshold_bytes, self.groups.num_ranks)
        self._tuner.follow(threshold_bytes)
        if self.buckets and layouts == [bucket.layout for bucket in self.buckets]:
            return
        self.synchronize()
        whole = self.update.consolidated() if self.buckets and isinstance(self.update, ShardedUpdate) else None
        self.buckets = [Bucket(number, layout, self.parameters) for number, layout in enumerate(layouts)]
        self.back.use(self.buckets)
        self._lookout = Lookout(len(self.buckets))
        if isinstance(self.update, ShardedUpdate):
            self.update.use(self.buckets)
            if whole is not None:
                self.update.scatter(whole)
        log.debug("%d buckets of up to %s", len(layouts), format_size(threshold_bytes))
