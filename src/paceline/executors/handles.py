"""What a caller holds while a collective runs over another backend's messages.

In processor memory the messages that follow from others are posted by a thread: Gloo tells that a message has arrived
only to whoever waits for it, so somebody must wait. On an accelerator nobody has to: all messages and additions are
queued on a stream of their own when the call returns, and the handle orders the caller's stream behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol

import torch

_MOST_AT_ONCE = 8
"""Calls of a group that run side by side; those after them wait for one to end."""


class Pending(Protocol):
    """A collective under way; the part of ``torch.distributed.Work`` that scripts use."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the result is there; raise what went wrong."""

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of ``[tensor]``."""

    def spent_s(self) -> float:
        """Seconds from the call to the result, of a collective that is over."""


class InThread:
    """Runs in a thread of a pool; calls start in the order they are made."""

    def __init__(self, pool: Executor, act: Callable[[], object], tensor: torch.Tensor) -> None:
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._began_s, self._ended_s = time.perf_counter(), 0.0
        self._running = pool.submit(self._run, act, tensor)

    def _run(self, act: Callable[[], object], tensor: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                act()
        except Exception as error:
            self._ended_s = time.perf_counter()
            self._future.set_exception(error)  # type: ignore[arg-type]  # torch says it takes the result's type
            raise
        self._ended_s = time.perf_counter()
        self._future.set_result([tensor])

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the result is there; raise what went wrong, or TimeoutError."""
        self._running.result(None if timeout is None else timeout.total_seconds())
        return True

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self._running.done()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of ``[tensor]``."""
        return self._future

    def spent_s(self) -> float:
        """Seconds from the call to the result."""
        return self._ended_s - self._began_s


class OnStream:
    """Queued on a stream of its own; calls queue one behind the other."""

    def __init__(self, stream: torch.Stream, act: Callable[[], object], tensor: torch.Tensor) -> None:
        self._device, self._tensor = tensor.device, tensor
        self._began = torch.Event(self._device, enable_timing=True)
        self._ended = torch.Event(self._device, enable_timing=True)
        caller = torch.accelerator.current_stream(self._device)
        self._began.record(caller)
        stream.wait_event(self._began)
        with stream, torch.no_grad():
            act()
            self._ended.record(stream)
            tensor.record_stream(stream)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the caller's stream behind the result; the processor goes on."""
        del timeout
        torch.accelerator.current_stream(self._device).wait_event(self._ended)
        return True

    def is_completed(self) -> bool:
        """Whether the stream has come that far."""
        return bool(self._ended.query())

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of ``[tensor]`` that knows the stream."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[self._device])
        self.wait()
        future.set_result([self._tensor])  # on the caller's stream, which is behind the result now
        return future

    def spent_s(self) -> float:
        """Seconds on the device from the call to the result."""
        milliseconds: Any = self._began.elapsed_time(self._ended)
        return float(milliseconds) * 1e-3


class Beside:
    """Starts the calls of a group beside their caller, as it suits the tensor's device."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="paceline")
        self._streams: dict[torch.device, torch.Stream] = {}

    def start(self, act: Callable[[], None], tensor: torch.Tensor) -> Pending:
        """Run it, and return what to wait for."""
        if tensor.device.type == "cpu":
            return InThread(self._pool, act, tensor)
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.Stream(tensor.device)
        return OnStream(self._streams[tensor.device], act, tensor)
