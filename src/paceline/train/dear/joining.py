"""Uneven inputs: ranks that have run out of them shadow what the others do, until all have.

Inside ``join()`` every operation is announced: who of the ranks still has inputs, and what the first of them does next,
with what it needs (hyper-parameters of a step, the norm to clip to). A rank without inputs does the same with no
gradients of its own. So weights and optimizer stay equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from paceline.train.dear.groups import Groups

_NOBODY_ASKS = nullcontext()
Operations = dict[str, Callable[[Any], object]]


class Joining:
    """Announces operations while inputs are uneven."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._groups = groups
        self._device = device
        self._depth = 0
        self.entered = False
        self.num_active = groups.num_ranks
        self.last_active = 0

    def announced(self, operation: str, details: Callable[[], object] = lambda: None) -> AbstractContextManager[None]:
        """Tell the ranks without inputs what this one does; parts of an announced operation need no announcement."""
        return self._announced(operation, details) if self.entered else _NOBODY_ASKS

    @contextmanager
    def _announced(self, operation: str, details: Callable[[], object]) -> Iterator[None]:
        if self._depth == 0:
            self._announce((operation, details()))
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def shadow(self, operations: Operations) -> None:
        """This rank has no more inputs: do what the others do until they have none either."""
        while (said := self._announce(None)) is not None:
            operation, details = said
            self._depth += 1
            try:
                operations[operation](details)
            finally:
                self._depth -= 1

    def _announce(self, mine: tuple[str, object] | None) -> Any:
        """What the first rank with inputs does, and None when no rank has any."""
        active = torch.zeros(self._groups.num_ranks, dtype=torch.int64, device=self._device)
        active[self._groups.rank] = int(mine is not None)
        dist.all_reduce(active, group=self._groups.reduce)
        ranks = active.nonzero().flatten().tolist()
        self.num_active = len(ranks)
        if not ranks:
            return None
        self.last_active = ranks[0]
        said = [mine]
        dist.broadcast_object_list(said, group=self._groups.reduce, group_src=ranks[0])
        return said[0]
