"""FeedPipe: all-gather of the buckets in the order of the forward pass, each awaited at the first use of a parameter.

Buckets that have arrived by then are brought up to date with it: an update of several costs hardly more than one. All
are launched in step(), so that no rank's all-gather waits for what another rank does after it: one rank may save a
checkpoint while the others wait for it at a barrier.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """The shards have the mean gradients: leave in them what all ranks need."""

    def arrived(self, buckets: Sequence[Bucket]) -> None:
        """The flat buffers have all ranks' shards: bring the parameters up to date."""


class FeedPipe:
    """Launches and awaits all-gathers."""

    def __init__(self, groups: Groups, guard: Guard, recorder: Recorder, update: Update) -> None:
        self._groups = groups
        self._guard = guard
        self._recorder = recorder
        self._update = update
        self.updating = False

    def launch(self, bucket: Bucket) -> None:
        """Send this rank's shard to all, if they need it; the parameters are old from now on."""
        if not bucket.all_reduced:
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

    def complete(self, bucket: Bucket, following: Sequence[Bucket] = ()) -> None:
        """Bring a bucket up to date, once, and with it those of the following that have arrived."""
        if bucket.phase is not Phase.PENDING:
            return
        self.wait(bucket)
        arrived = [bucket, *self._arrived(following)]
        for one in arrived:
            one.phase = Phase.IDLE
            self._guard.lower_on(one.parameters)
        self.updating = True
        try:
            with PlainArithmetic(bucket.flat.device):
                self._update.arrived(arrived)
        finally:
            self.updating = False
        for one in arrived:
            one.used = [False] * len(one.used)

    def _arrived(self, following: Sequence[Bucket]) -> Iterator[Bucket]:
        for bucket in following:
            if bucket.phase is not Phase.PENDING or (bucket.gather is not None and not bucket.gather.is_completed()):
                return
            try:
                self.wait(bucket)
            except RuntimeError:  # whoever uses its parameters gets it again
                return
            yield bucket


class PlainArithmetic:
    """An update happens in the midst of the user's forward pass: not in its graph, transform, precision or mode.

    A context manager for each bucket of each step, so it does nothing that is not needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._records = False
        self._left: ExitStack | None = None

    def __enter__(self) -> None:
        """Leave what is entered."""
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        inference = torch.is_inference_mode_enabled()
        if transformed or inference or torch.is_autocast_enabled(self._device.type):
            self._left = ExitStack()
            self._left.enter_context(torch._C._DisableFuncTorch())
            if inference:
                self._left.enter_context(torch.inference_mode(False))
            self._left.enter_context(torch.autocast(self._device.type, enabled=False))
        self._records = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        """Enter it again."""
        torch._C._set_grad_enabled(self._records)
        if self._left is not None:
            self._left.close()
