"""FeedPipe: all-gather of the buckets in the order of the forward pass, each awaited at the first use of a parameter.

Buckets that have arrived by then are brought up to date with it: an update of several costs hardly more than one. All
are launched in step(), so that no rank's all-gather waits for what another rank does after it: one rank may save a
checkpoint while the others wait for it at a barrier.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from paceline.train.dear.bucket import Bucket, Phase
from paceline.train.dear.groups import Groups, all_gather
from paceline.train.dear.guard import Guard
from paceline.train.dear.overlap import Recorder

_set_trace: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]


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

    def __init__(self, groups: Groups, guard: Guard, recorder: Recorder, update: Update, lock: threading.RLock) -> None:
        self._groups = groups
        self._guard = guard
        self._recorder = recorder
        self._update = update
        self._lock = lock

    def launch(self, bucket: Bucket) -> None:
        """Send this rank's shard to all, if they need it; the parameters are old from now on."""
        if not bucket.all_reduced:
            self.gather(bucket, self._groups.gather)
        bucket.phase = Phase.PENDING
        bucket.dropped.clear()
        self._guard.raise_on(bucket.parameters)

    def gather(self, bucket: Bucket, group: Any) -> None:
        """Launch the all-gather of whatever the shard has."""
        work = all_gather(bucket.flat, bucket.shard, group)
        bucket.gather = self._recorder.launched("all-gather", bucket.number, bucket.size_bytes, work)

    def wait(self, bucket: Bucket) -> None:
        """Wait for the bytes. After an error the bucket stays as it is, and so does the error."""
        if bucket.gather is not None:
            bucket.gather.wait()
            bucket.gather = None

    def complete(self, bucket: Bucket, following: Sequence[Bucket] = ()) -> None:
        """Bring a bucket up to date, once, and with it those of the following that have arrived."""
        if bucket.phase is not Phase.PENDING:
            return
        with self._lock:
            if bucket.phase is Phase.PENDING:  # no other thread has done it meanwhile
                self.wait(bucket)
                self._bring_up_to_date([bucket, *self._arrived(following)])

    def _bring_up_to_date(self, buckets: Sequence[Bucket]) -> None:
        """Until it is done the parameters are guarded: other threads wait."""
        try:
            with PlainArithmetic(buckets[0].flat.device):
                self._update.arrived(buckets)
        finally:
            for one in buckets:
                one.used = [False] * len(one.used)
                one.phase = Phase.IDLE
                self._guard.lower_on(one.parameters)

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
    """An update happens in the midst of the user's forward pass: not in its graph, trace, transform, precision or mode.

    Nor does the guard look at what it does.

    A context manager for each bucket of each step, so it does nothing that is not needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._records = False
        self._trace: Any = None
        self._unseen: Any = torch._C.DisableTorchFunction()  # by the guard, and by modes like torch.device("meta")
        self._left: ExitStack | None = None

    def __enter__(self) -> None:
        """Leave what is entered."""
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        inference = torch.is_inference_mode_enabled()
        dispatched = torch._C._len_torch_dispatch_stack() > 0
        if transformed or inference or dispatched or torch.is_autocast_enabled(self._device.type):
            self._left = ExitStack()
            self._left.enter_context(torch._C._DisableFuncTorch())
            if inference:
                self._left.enter_context(torch.inference_mode(False))
            if dispatched:
                self._left.enter_context(_disable_current_modes())
            self._left.enter_context(torch.autocast(self._device.type, enabled=False))
        self._trace = torch._C._get_tracing_state()
        if self._trace is not None:
            _set_trace(None)
        self._unseen.__enter__()
        self._records = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        """Enter it again."""
        torch._C._set_grad_enabled(self._records)
        self._unseen.__exit__(*error)
        if self._trace is not None:
            _set_trace(self._trace)
        if self._left is not None:
            self._left.close()
