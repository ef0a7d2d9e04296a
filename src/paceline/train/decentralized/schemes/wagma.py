"""WAGMA-SGD (Li et al. 2020, arXiv 2005.00124): groups average without waiting for their late members."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from paceline.errors import MessageError, UsageError
from paceline.train.decentralized.schemes.progress import FIRST_KIND, Progress
from paceline.train.decentralized.schemes.scheme import Scheme, Worker
from paceline.train.decentralized.schemes.synchronous import average_all, group_mesh

_START = FIRST_KIND  # step, elements


def default_group_size(num_workers: int) -> int:
    """Return the largest power of two up to the square root, and at least 2.

    >>> [default_group_size(n) for n in (2, 4, 8, 16, 64)]
    [2, 2, 2, 4, 8]
    """
    size = 2
    while (2 * size) ** 2 <= num_workers:
        size *= 2
    return size


def butterfly_groups(step: int, num_workers: int, group_size: int) -> list[list[int]]:
    """Return the groups of a step, which rotate as a butterfly does: disjoint, and together all workers.

    With powers of two, a group are workers whose numbers differ in some bits only, and the next step takes the next
    bits: after log(n) / log(size) steps, rounded up, each worker has met, directly or through others, all. With other
    numbers some groups are smaller, and the workers left alone form groups of their own.

    >>> butterfly_groups(0, 4, 2), butterfly_groups(1, 4, 2), butterfly_groups(1, 5, 2)
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 2], [1, 3], [4]])
    """
    num_bits = max(1, (num_workers - 1).bit_length())
    width = min(group_size.bit_length() - 1, num_bits)
    mask = sum({1 << (step * width + one) % num_bits for one in range(width)})
    whole = num_workers == 1 << num_bits
    shift = 0 if whole else step * width // num_bits  # so that it is not always the same ones who are left alone
    groups: dict[int, list[int]] = {}
    for place in range(num_workers):
        groups.setdefault(place & ~mask, []).append((place + shift) % num_workers)
    alone = sorted(members[0] for members in groups.values() if len(members) == 1)
    rest = [alone[first : first + group_size] for first in range(0, len(alone), group_size)]
    return sorted([sorted(members) for members in groups.values() if len(members) > 1] + rest)


@dataclass
class _Average:
    """A group's all-reduce, as this worker sees it."""

    members: list[int]
    vector: torch.Tensor | None
    """What this worker contributes; then the sum."""
    adopt: bool
    """This worker is in a meeting and takes the mean as soon as it is there."""
    done: bool = False


class WAGMA(Scheme):
    """After each step, groups of ``group_size`` average; every ``tau`` steps, all workers do.

    The first member that has made its step starts its group's all-reduce: a tiny message tells the others. A member
    that is late contributes, from a background thread, the weights it had at its last average. The paper's rule for
    merging, where S is the number of members and X the sum of what they contributed:

    - a member whose weights of this step are in X takes X / S;
    - a late member, whose weights W are not, takes (X + W) / (S + 1) when it has made that step.

    A global average, in steps tau, 2 tau, ..., waits for all. The training thread waits for the transfer of its
    group's all-reduce, never for a late member.

    ``group_size`` is a power of two; by default, about the square root of the number of workers. The paper has powers
    of two only; with other numbers of workers some groups are smaller (``butterfly_groups``). A worker that has
    finished takes part in the others' averages with its weights, and takes the means.
    """

    def __init__(self, worker: Worker, group_size: int | None = None, tau: int = 10) -> None:
        super().__init__(worker)
        mesh = group_mesh(self.mesh)
        size = default_group_size(mesh.num_workers) if group_size is None else group_size
        if size < 2 or size & (size - 1):
            raise UsageError(f"group_size is {group_size}: it must be a power of two, 2 or more")
        if tau < 1:
            raise UsageError(f"tau is {tau}: it must be 1 or more")
        self._group_size, self._tau = size, tau
        self._num_workers = mesh.num_workers
        everyone = set(range(mesh.num_workers))
        # Guarded by the condition.
        self._next_step = 0  # that this worker's training thread has not begun to average
        self._sent = self.weights.new()  # the weights at this worker's last average
        self.weights.read(self._sent)
        self._averages: dict[int, _Average] = {}  # by step, also those begun before this worker came
        self._announced: dict[int, int] = {}  # global averages that somebody waits in, and their elements
        self._in_meeting = False
        self._adopted = -1  # the last step whose mean was adopted
        self._under_way: set[int] = set()  # numbers of reductions
        self._progress = Progress(self, peers=everyone, receive=self._receive)
        self._condition = self._progress.condition
        self._progress.start()

    def after_step(self) -> None:
        """Average with this step's group, or with all."""
        self._progress.report(self.statistics.steps)
        size = self.weights.size
        with self._condition:
            step = self._next_step
            self._next_step += 1
            self._announced.pop(step, None)
            self._sent = _longer(self._sent, size)
            self.weights.read(self._sent)
            average = self._averages.pop(step, None)
            late = average is not None
            if average is None:
                average = self._begin(step, size, adopt=False)
        if not late:
            for member in average.members:
                if member != self.mesh.worker:
                    self._progress.send(member, _START, step, size)
        self._progress.wait_for(lambda: average.done, f"the average of workers {average.members} in step {step}")
        if average.vector is not None and not average.adopt:
            if late:
                average.vector.add_(self._sent)
            self.weights.write(average.vector.div_(len(average.members) + late))

    def finish(self) -> None:
        """Go on to contribute until all have finished, then take the mean of all."""
        self._meet(last=True)
        self.weights.write(average_all(self))

    def average(self) -> torch.Tensor:
        """Return the mean of all workers' weights."""
        self._meet(last=False)
        return average_all(self)

    def _meet(self, *, last: bool) -> None:
        with self._condition:
            self._in_meeting = True
            for step, size in sorted(self._announced.items()):
                self._averages[step] = self._begin(step, size, adopt=True)
            self._announced.clear()
        self._progress.meet(last=last)
        self._progress.wait_for(lambda: not self._under_way, "averages of the other workers")
        with self._condition:
            self._in_meeting = False

    def close(self) -> None:
        """Give up what is under way."""
        with self._condition:
            under_way = list(self._under_way)
        for number in under_way:
            self.mesh.give_up(number, f"rank {self.mesh.worker} has left the training")
        with self._condition:
            self._condition.wait_for(lambda: not self._under_way, 5.0)
        self._progress.close()

    def _receive(self, _: int, __: int, step: int, size: int) -> None:
        """Somebody has begun an average: take part with what was sent last. Called with the condition held."""
        if step < self._next_step or step in self._averages:
            return
        if self._is_global(step) and not self._in_meeting:
            self._announced[step] = size
        else:
            self._averages[step] = self._begin(step, size, adopt=self._in_meeting)

    def _is_global(self, step: int) -> bool:
        return (step + 1) % self._tau == 0

    def _begin(self, step: int, size: int, *, adopt: bool) -> _Average:
        """Begin to reduce what this worker sent last, on a thread; with the condition held.

        Each has a thread of its own: members may come to their averages in different orders, and an average that waited
        for another to end could wait for itself.
        """
        if self._is_global(step):
            groups = [list(range(self._num_workers))]
        else:
            groups = butterfly_groups(step, self._num_workers, self._group_size)
        number = next(one for one, members in enumerate(groups) if self.mesh.worker in members)
        if adopt:
            self._sent = _longer(self._sent, self.weights.size)
            self.weights.read(self._sent[: self.weights.size])
        average = _Average(groups[number], _longer(self._sent, size).clone(), adopt)
        number += step << 10
        self._under_way.add(number)
        threading.Thread(
            target=self._reduce, args=(average, step, number), name=f"paceline WAGMA {step}", daemon=True
        ).start()
        return average

    def _reduce(self, average: _Average, step: int, number: int) -> None:
        vector = average.vector
        assert vector is not None
        begin = time.perf_counter()
        failure = ""
        try:
            self.mesh.reduce(vector, average.members, number, mean=False, timeout_s=self.worker.timeout_s)
        except (RuntimeError, MessageError) as error:
            failure = str(error)
        took_s = time.perf_counter() - begin
        with self._condition:
            if failure:
                self._progress.fail(failure)
            else:
                average.done = True
                if len(average.members) > 1:
                    self.statistics.count_average(len(average.members), vector.numel() * vector.element_size(), took_s)
                if average.adopt:
                    average.vector = None
                    if step > self._adopted:
                        self._adopted = step
                        self.weights.write(vector.div_(len(average.members))[: self.weights.size])
            self._under_way.remove(number)
            self._condition.notify_all()


def _longer(vector: torch.Tensor, size: int) -> torch.Tensor:
    """Return a vector with zeros added: the optimizer's state of a worker that has made no step yet."""
    if vector.numel() >= size:
        return vector
    grown = vector.new_zeros(size)
    grown[: vector.numel()] = vector
    return grown
