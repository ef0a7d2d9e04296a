"""Changes of the weights that background averages have made and the training thread has not applied yet."""

from __future__ import annotations

import threading

import torch

from paceline.train.decentralized.weights import Weights


class PendingChange:
    """Weights that others may average at any time, also while this worker computes.

    The weights that count are those of the module plus a change, which ``apply`` adds to the module between two steps.
    An average takes a snapshot s of them with ``read``, and gives back its mean m with ``replace``: they become
    themselves + (m - s). So the sum over workers is preserved, and the steps made meanwhile are kept.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._lock = threading.Lock()
        self._change = torch.zeros(weights.size, dtype=weights.dtype, device=weights.device)
        self._changed = False

    def read(self, into: torch.Tensor) -> None:
        """Copy the weights, or the first part of them, with the change."""
        with self._lock:
            self._weights.read(into)
            if self._changed:
                self._grow(into.numel())
                into.add_(self._change[: into.numel()])

    def replace(self, snapshot: torch.Tensor, mean: torch.Tensor) -> None:
        """Add ``mean - snapshot`` to the change; the snapshot's memory is overwritten."""
        torch.sub(mean, snapshot, out=snapshot)
        with self._lock:
            self._grow(snapshot.numel())
            self._change[: snapshot.numel()].add_(snapshot)
            self._changed = True

    def apply(self) -> None:
        """Bring the change into the module; for the training thread, between two steps."""
        with self._lock:
            if self._changed:
                self._weights.add(self._change)
                self._change.zero_()
                self._changed = False

    def _grow(self, size: int) -> None:
        if size > self._change.numel():  # the optimizer has made its state
            grown = self._change.new_zeros(size)
            grown[: self._change.numel()] = self._change
            self._change = grown
