"""The least an iteration can take, if communication and computation overlap as far as dependencies allow. Pure."""

from __future__ import annotations

import msgspec


class Bounds(msgspec.Struct, frozen=True):
    """Seconds of both passes and of both halves of the all-reduce; bounds know no start-ups and no buckets."""

    forward_s: float
    backward_s: float
    reduce_scatter_s: float
    all_gather_s: float

    @property
    def compute_s(self) -> float:
        """Without communication."""
        return self.forward_s + self.backward_s

    @property
    def all_reduce_s(self) -> float:
        """Both halves."""
        return self.reduce_scatter_s + self.all_gather_s

    @property
    def dear_s(self) -> float:
        """Reduce-scatter behind backpropagation, all-gather behind the next forward pass.

        >>> Bounds(1.0, 2.0, 2.0, 2.0).dear_s
        4.0
        """
        return max(self.backward_s, self.reduce_scatter_s) + max(self.forward_s, self.all_gather_s)

    @property
    def wait_free_s(self) -> float:
        """All-reduce behind backpropagation, as DistributedDataParallel does.

        >>> Bounds(1.0, 2.0, 2.0, 2.0).wait_free_s
        5.0
        """
        return self.forward_s + max(self.backward_s, self.all_reduce_s)

    @property
    def ideal_ratio(self) -> float:
        """What DeAR can gain over wait-free backpropagation at best."""
        return self.wait_free_s / self.dear_s
