"""What ranks tell each other once a step, in one small all-reduce of integers. Pure.

The words, added up over the ranks: for each parameter, whether it has a gradient; for each bucket, whether gradients
came after it had left; then rank 0's decisions; then, for each rank, its standing. So no rank
decides alone what all must do, and a rank that does something else than the others is found and named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """Rank 0's: learn the order of use in the next iteration, fuse up to another threshold (0: go on as before), or
    all-reduce so many buckets in backpropagation (None: go on as before)."""

    learn_order: bool = False
    threshold_bytes: int = 0
    num_early: int | None = None


@dataclass(frozen=True)
class Standing:
    """Of one rank: how many steps it has made, and whether it drops the gradients of this one."""

    steps: int
    drops: bool


@dataclass(frozen=True)
class Agreement:
    """What holds for all ranks in this step."""

    used: tuple[bool, ...]
    residual: tuple[bool, ...]
    decision: Decision
    standings: tuple[Standing, ...]

    @property
    def quarrel(self) -> str | None:
        """What ranks do differently, and what to do then; None where they do the same."""
        first = self.standings[0]
        for rank, one in enumerate(self.standings):
            if one.steps != first.steps:
                return (
                    f"rank {rank} has made {one.steps} steps and rank 0 {first.steps}: one has left out a step() "
                    "whose gradients the ranks had exchanged, so their weights differ. close() and wrap anew on all "
                    "ranks, which takes rank 0's weights, or load a checkpoint then"
                )
        dropping = [str(rank) for rank, one in enumerate(self.standings) if one.drops]
        if dropping and len(dropping) < len(self.standings):
            return (
                f"no rank has made step {first.steps + 1}, as rank {', '.join(dropping)} dropped its gradients (after "
                "an error?): all ranks can go on with zero_grad() and the next batch"
            )
        return None


def words(
    used: Sequence[bool], residual: Sequence[bool], decision: Decision | None, standings: Sequence[Standing | None]
) -> list[int]:
    """This rank's part; only rank 0 has a decision, and of the standings each rank knows its own."""
    said = decision or Decision()
    standing = [2 * one.steps + one.drops if one else 0 for one in standings]
    early = 0 if said.num_early is None else 1 + said.num_early
    return [*map(int, used), *map(int, residual), int(said.learn_order), said.threshold_bytes, early, *standing]


def agreement(sums: Sequence[int], num_parameters: int, num_ranks: int) -> Agreement:
    """What the sums of all ranks' words mean."""
    used, residual = sums[:num_parameters], sums[num_parameters : -num_ranks - 3]
    learn_order, threshold_bytes, early, *standings = sums[-num_ranks - 3 :]
    return Agreement(
        used=tuple(map(bool, used)),
        residual=tuple(map(bool, residual)),
        decision=Decision(bool(learn_order), int(threshold_bytes), int(early) - 1 if early else None),
        standings=tuple(Standing(word // 2, bool(word % 2)) for word in standings),
    )
