"""A communication hook for DistributedDataParallel, for those who keep their backend.

>>> state = paceline.hooks.StragglerState()
>>> model.register_comm_hook(state, paceline.hooks.straggler_hook)

Gradients are averaged by Paceline's schedules over the backend's own messages. When a rank keeps arriving late, the
others do what they can without it before it comes.

The first all-reduce of each step tells how late ranks are: who spent the least time in it came last. Every ``every``
steps the ranks exchange these times, and at the step after that all decide from the same numbers, so all decide the
same.
"""

# Annotations are objects in this file, not strings: DistributedDataParallel looks at those of a hook.

import logging
from collections.abc import Mapping
from statistics import median

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from paceline.collectives import Late, all_reduce, deterministic, read_late
from paceline.errors import UsageError
from paceline.executors.handles import Pending
from paceline.policy.stragglers import RECENT, Seen, forecast

_log = logging.getLogger("paceline")


class StragglerState:
    """What the hook keeps between steps: one for each DistributedDataParallel, with the same arguments on all ranks.

    ``late`` says who is late and ends all measuring; ``()`` says nobody. With ``PACELINE_DETERMINISTIC=1`` nothing is
    measured either, and nobody is late unless ``late`` says so. ``least_late_s`` is how late a rank must be to
    count as late. ``lateness_s`` has the median lateness of each rank at the last exchange.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        late: Late = None,
        *,
        algorithm: str | None = None,
        every: int = 20,
        least_late_s: float = 0.005,
    ) -> None:
        if every < 2:
            raise UsageError(f"every is the number of steps between decisions, 2 or more, not {every}")
        group = dist.group.WORLD if process_group is None else process_group
        if group is None:
            raise UsageError("there is no process group: call torch.distributed.init_process_group first")
        self.process_group = group
        self.algorithm, self.every, self.least_late_s = algorithm, every, least_late_s
        self.measures = late is None and group.size() > 1
        self._given = late if late is None or isinstance(late, (int, Mapping)) else list(late)
        self.late: dict[int, float] = read_late(self._given, group.size())
        self.lateness_s: list[float] = []
        self.step = 0
        self._first: Pending | None = None
        self._spent_s: list[float] = []
        self._seen: list[Seen] = []
        self._exchange: tuple[dist.Work, list[torch.Tensor]] | None = None

    def begin_step(self, device: torch.device) -> None:
        """Take note of the step before. Everything that is decided is decided here, at the same step on all ranks."""
        self.step += 1
        if self.step == 1 and self.measures:
            self.measures = not deterministic(self.process_group)
        if not self.measures:
            return
        if self._first is not None:
            self._spent_s.append(self._first.spent_s())
            self._first = None
        if self._exchange is not None:
            self._decide()
        if len(self._spent_s) == self.every:
            # Nobody waits for it in this step: a late rank joins when it comes, and then everyone has it.
            mine = torch.tensor(self._spent_s, dtype=torch.float64, device=device)
            everyones = [torch.empty_like(mine) for _ in range(self.process_group.size())]
            work = dist.all_gather(everyones, mine, group=self.process_group, async_op=True)
            assert work is not None
            self._exchange, self._spent_s = (work, everyones), []

    def _decide(self) -> None:
        assert self._exchange is not None
        work, everyones = self._exchange
        self._exchange = None
        work.wait()
        late = self.late
        steps = [Seen.inside(spent_s) for spent_s in zip(*(one.tolist() for one in everyones), strict=True)]
        for seen in steps:
            self._seen = [*self._seen, seen][-RECENT:]
            late = forecast(self._seen, late, self.least_late_s)
        self.lateness_s = [median(of_rank) for of_rank in zip(*(seen.late_s for seen in steps), strict=True)]
        if late != self.late and dist.get_rank(self.process_group) == 0:
            who = [f"rank {rank} arrives {1e3 * self.lateness_s[rank]:.0f} ms late" for rank in late]
            _log.info("step %d: %s", self.step, ", ".join(who) or "nobody is late any more")
        self.late = late

    def average(self, tensor: torch.Tensor, *, first: bool) -> Pending:
        """Start to average a bucket."""
        late = self.late if self.measures else self._given
        work = all_reduce(
            tensor, dist.ReduceOp.AVG, self.process_group, late=late, algorithm=self.algorithm, async_op=True
        )
        assert work is not None
        if first and self.measures:
            self._first = work
        return work


def straggler_hook(state: StragglerState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over the group, whoever is late."""
    first = bucket.index() == 0
    tensor = bucket.buffer()
    if first:
        state.begin_step(tensor.device)
    return state.average(tensor, first=first).get_future().then(lambda done: done.value()[0])
