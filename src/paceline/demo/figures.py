"""What a training's messages say in numbers: pure, from times to times."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median

from paceline.demo.messages import Finished, Flight, Step, Strategy

WINDOW = 10
"""Accuracy while training is the share of images read right in the last steps, each before learning from it: so many
times the number of ranks. A rank that is faster than the others may have made more of them."""


@dataclass
class Training:
    """All that was said of one training: for each rank its steps, and its end."""

    strategy: Strategy
    num_ranks: int
    late_rank: int
    steps: list[list[Step]] = field(default_factory=list)
    finished: dict[int, Finished] = field(default_factory=dict)
    told: list[Step] = field(default_factory=list)
    """All ranks' steps, in the order in which they were told."""

    def __post_init__(self) -> None:
        self.steps = [[] for _ in range(self.num_ranks)]

    def add(self, rank: int, message: Step | Finished) -> None:
        """Take what a rank has said."""
        if isinstance(message, Finished):
            self.finished[rank] = message
        else:
            self.steps[rank].append(message)
            self.told.append(message)

    @property
    def num_iterations(self) -> int:
        """Those that all ranks have done."""
        return min(len(steps) for steps in self.steps)

    @property
    def punctual(self) -> list[list[Step]]:
        """The steps of each rank that is not late."""
        return [steps for rank, steps in enumerate(self.steps) if rank != self.late_rank]

    @property
    def flights(self) -> list[list[Flight]]:
        """Each rank's."""
        return [[flight for step in steps for flight in step.flights] for steps in self.steps]

    @property
    def waits(self) -> list[list[tuple[float, float]]]:
        """When each rank waited."""
        return [[wait for step in steps for wait in step.waits] for steps in self.steps]


def iteration_s(training: Training) -> float:
    """The median time from one iteration's start to the next, of the ranks on time; 0 where there is no next.

    In a synchronous training it is the same for all ranks.
    """
    gaps = [later.began_s - earlier.began_s for steps in training.punctual for earlier, later in pairwise(steps)]
    return median(gaps) if gaps else 0.0


def total_s(training: Training) -> float:
    """From the first rank's start to the last rank's end."""
    return max(one.ended_s for one in training.finished.values()) - min(steps[0].began_s for steps in training.steps)


def images_per_s(training: Training) -> float:
    """Images learnt from in a second, by all ranks together."""
    return sum(step.num_seen for step in training.told) / total_s(training)


def recent_accuracy(training: Training) -> float:
    """The share read right in the steps told last, by all ranks."""
    recent = training.told[-WINDOW * training.num_ranks :]
    return sum(step.num_correct for step in recent) / max(1, sum(step.num_seen for step in recent))


def reached_s(training: Training, target: float) -> float | None:
    """When the accuracy while training has reached the target, in seconds from the start; None if it has not."""
    start_s = min(steps[0].began_s for steps in training.steps)
    recent: deque[Step] = deque(maxlen=WINDOW * training.num_ranks)
    num_correct = num_seen = 0
    for step in sorted(training.told, key=lambda one: one.ended_s):
        if len(recent) == recent.maxlen:
            num_correct, num_seen = num_correct - recent[0].num_correct, num_seen - recent[0].num_seen
        recent.append(step)
        num_correct, num_seen = num_correct + step.num_correct, num_seen + step.num_seen
        if len(recent) == recent.maxlen and num_correct >= target * num_seen:
            return step.ended_s - start_s
    return None


def exposed_s(training: Training) -> float:
    """What is waited for in an iteration even by the rank that waits least, as the last one to come: the median.

    The others also wait for that rank. Waiting counts in the iteration in which it was noticed. In a decentralised
    training the ranks' iterations are not the same, and it is the smallest mean wait of a rank.
    """
    per_rank = [[sum(end - begin for begin, end in step.waits) for step in steps] for steps in training.steps]
    if not training.strategy.synchronous:
        return min(mean(waited) for waited in per_rank)
    return median(min(waited) for waited in zip(*per_rank, strict=False)) if training.num_iterations else 0.0


def ending_s(training: Training) -> float:
    """The smallest wait of a rank at the end of a training: the last rank to come waits for no other."""
    return min(one.waited_s for one in training.finished.values())


def num_averages(training: Training) -> dict[int, int]:
    """How many averages of weights there were, by the number of ranks."""
    parts: Counter[int] = Counter()
    for one in training.finished.values():
        parts.update(one.averages)
    return {size: parts[size] // size for size in sorted(parts)}


def behind_s(training: Training) -> list[float]:
    """How much later than the median rank each has its batch, as a median over the iterations.

    In a decentralised training, whose ranks begin when they like: how much longer each loads it.
    """
    if not training.strategy.synchronous:
        loading = [median(step.loaded_s - step.began_s for step in steps) for steps in training.steps]
        return [own - median(loading) for own in loading]
    loaded = [[step.loaded_s for step in steps] for steps in training.steps]
    return [
        median(moment - median(moments) for moment, moments in zip(own, zip(*loaded, strict=False), strict=False))
        for own in loaded
    ]


def latest(training: Training) -> tuple[int, float]:
    """The rank that is latest, and by how much."""
    behind = behind_s(training)
    rank = max(range(len(behind)), key=behind.__getitem__)
    return rank, behind[rank]


def complement(begin_s: float, end_s: float, gaps: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """What remains of an interval without the gaps.

    >>> complement(0.0, 5.0, [(1.0, 2.0), (4.0, 9.0)])
    [(0.0, 1.0), (2.0, 4.0)]
    """
    parts, reached_s = [], begin_s
    for first, last in sorted(gaps):
        if min(first, end_s) > reached_s:
            parts.append((reached_s, min(first, end_s)))
        reached_s = max(reached_s, last)
    if reached_s < end_s:
        parts.append((reached_s, end_s))
    return parts
