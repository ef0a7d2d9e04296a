"""What a training's messages say in numbers: pure, from times to times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from paceline.demo.messages import Finished, Flight, Step, Strategy

WINDOW = 10
"""Accuracy while training is the share of images read right in so many iterations, each before learning from it."""


@dataclass
class Training:
    """All that was said of one training: for each rank its steps, and its end."""

    strategy: Strategy
    num_ranks: int
    steps: list[list[Step]] = field(default_factory=list)
    finished: dict[int, Finished] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps = [[] for _ in range(self.num_ranks)]

    def add(self, rank: int, message: Step | Finished) -> None:
        """Take what a rank has said."""
        if isinstance(message, Finished):
            self.finished[rank] = message
        else:
            self.steps[rank].append(message)

    @property
    def num_iterations(self) -> int:
        """Those that all ranks have done."""
        return min(len(steps) for steps in self.steps)

    @property
    def flights(self) -> list[list[Flight]]:
        """Each rank's."""
        return [[flight for step in steps for flight in step.flights] for steps in self.steps]

    @property
    def waits(self) -> list[list[tuple[float, float]]]:
        """When each rank waited."""
        return [[wait for step in steps for wait in step.waits] for steps in self.steps]


def iteration_s(training: Training) -> float:
    """The median time from one iteration's start to the next, of all ranks; 0 where there is no next."""
    gaps = [later.began_s - earlier.began_s for steps in training.steps for earlier, later in pairwise(steps)]
    return median(gaps) if gaps else 0.0


def total_s(training: Training) -> float:
    """From the first rank's start to the last rank's end."""
    return max(one.ended_s for one in training.finished.values()) - min(steps[0].began_s for steps in training.steps)


def running_accuracy(training: Training, number: int) -> float:
    """The share read right in the last iterations up to this one, by all ranks."""
    recent = [step for steps in training.steps for step in steps[max(0, number + 1 - WINDOW) : number + 1]]
    return sum(step.num_correct for step in recent) / max(1, sum(step.num_seen for step in recent))


def reached_s(training: Training, target: float) -> float | None:
    """When the accuracy while training has reached the target, in seconds from the start; None if it has not."""
    start_s = min(steps[0].began_s for steps in training.steps)
    for number in range(WINDOW - 1, training.num_iterations):
        if running_accuracy(training, number) >= target:
            return max(steps[number].ended_s for steps in training.steps) - start_s
    return None


def exposed_s(training: Training) -> float:
    """What is waited for in an iteration even by the rank that waits least, as the last one to come: the median.

    The others also wait for that rank. Waiting counts in the iteration in which it was noticed.
    """
    per_rank = [[sum(end - begin for begin, end in step.waits) for step in steps] for steps in training.steps]
    return median(min(waited) for waited in zip(*per_rank, strict=False)) if training.num_iterations else 0.0


def behind_s(training: Training) -> list[float]:
    """How much later than the median rank each has its batch, as a median over the iterations."""
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
