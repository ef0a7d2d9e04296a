"""FeedPipe: all-gather of the buckets in the order of the forward pass, each awaited at the first use of a parameter.

All are launched in step(), so that no rank's all-gather waits for what another rank does after it: one rank may save a
checkpoint while the others wait for it at a barrier.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch

from paceline.train.dear.bucket import Bucket, Phase
from paceline.train.dear.groups import Groups, all_gather
from paceline.train.dear.guard import Guard
from paceline.train.dear.overlap import Recorder

OPERATION = "all-gather"


class Update(Protocol):
    """What step() and the first use of a bucket do to its parameters: one of the two modes."""

    def begin(self) -> None:
        """Step() was called: remember the hyper-parameters of this moment."""

    def prepare(self, bucket: Bucket) -> None:
        """The shard has the mean gradient: leave in it what all ranks need."""

    def arrived(self, bucket: Bucket) -> None:
        """The flat buffer has all ranks' shards: bring the parameters up to date."""


class FeedPipe:
    """Launches and awaits all-gathers."""

    def __init__(self, groups: Groups, guard: Guard, recorder: Recorder, update: Update) -> None:
        self._groups = groups
        self._guard = guard
        self._recorder = recorder
        self._update = update
        self.updating = False

    def launch(self, bucket: Bucket) -> None:
        """Send this rank's shard to all; the parameters are old from now on."""
        self.gather(bucket, self._groups.gather)
        bucket.phase = Phase.PENDING
        bucket.dropped.clear()
        self._guard.raise_on(bucket.parameters)

    def gather(self, bucket: Bucket, group: object) -> None:
        """Launch the all-gather of whatever the shard has."""
        self._recorder.launched(OPERATION, bucket.number, bucket.size_bytes)
        bucket.gather = all_gather(bucket.flat, bucket.shard, group=group, async_op=True)

    def wait(self, bucket: Bucket) -> None:
        """Wait for the bytes. After an error the bucket stays as it is, and so does the error."""
        if bucket.gather is None:
            return
        began_s, was_done = time.perf_counter(), bucket.gather.is_completed()
        bucket.gather.wait()
        self._recorder.waited(OPERATION, bucket.number, began_s, was_done)
        bucket.gather = None

    def complete(self, bucket: Bucket) -> None:
        """Bring a bucket up to date, once."""
        if bucket.phase is not Phase.PENDING:
            return
        self.wait(bucket)
        bucket.phase = Phase.IDLE
        self._guard.lower_on(bucket.parameters)
        self.updating = True
        try:
            with plain_arithmetic(bucket.flat.device):
                self._update.arrived(bucket)
        finally:
            self.updating = False
        bucket.used = [False] * len(bucket.used)


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """An update happens in the midst of the user's forward pass: not in its graph, transform, precision or mode."""
    with ExitStack() as stack:
        stack.enter_context(torch._C._DisableFuncTorch())
        stack.enter_context(torch.no_grad())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield
