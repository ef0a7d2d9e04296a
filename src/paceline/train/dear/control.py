"""What ranks tell each other once a step, in one small all-reduce of integers. Pure.

The words, added up over the ranks: for each parameter, whether it has a gradient; for each bucket, whether gradients
came after its reduce-scatter was launched; then rank 0's decisions. So no rank decides alone what all must do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """Rank 0's: learn the order of use in the next iteration, or fuse up to another threshold (0: go on as before)."""

    learn_order: bool = False
    threshold_bytes: int = 0


@dataclass(frozen=True)
class Agreement:
    """What holds for all ranks in this step."""

    used: tuple[bool, ...]
    residual: tuple[bool, ...]
    decision: Decision


def words(used: Sequence[bool], residual: Sequence[bool], decision: Decision | None) -> list[int]:
    """This rank's part; only rank 0 has a decision."""
    said = decision or Decision()
    return [*map(int, used), *map(int, residual), int(said.learn_order), said.threshold_bytes]


def agreement(sums: Sequence[int], num_parameters: int) -> Agreement:
    """What the sums of all ranks' words mean."""
    used, residual = sums[:num_parameters], sums[num_parameters:-2]
    decision = Decision(bool(sums[-2]), int(sums[-1]))
    return Agreement(tuple(map(bool, used)), tuple(map(bool, residual)), decision)
