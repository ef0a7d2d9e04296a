"""PyTorch's suite knows built-in backends only. It asks for one of them, gets the one under test, and is not told."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import distributed_test

SPOKEN = distributed_test.BACKEND


def translate(backend: str) -> None:
    """From here on, in this process, the name the suite uses means ``backend``."""
    if backend == SPOKEN:
        return
    for name in ("init_process_group", "new_group"):
        _replace(name, _asking_for(backend, getattr(distributed_c10d, name)))
    _replace("get_backend", _answering(backend, distributed_c10d.get_backend))

    events_of = distributed_test.get_profiling_event

    def get_profiling_event(event_name: str, profiler: Any, *args: Any, **kwargs: Any) -> Any:
        profile = profiler.profiler if isinstance(profiler, torch.profiler.profile) else profiler
        for event in profile.function_events:
            event.name = event.name.replace(f"{backend}:", f"{SPOKEN}:")
        return events_of(event_name, profiler, *args, **kwargs)

    distributed_test.get_profiling_event = get_profiling_event

    logged_by = DistributedDataParallel._get_ddp_logging_data

    def _get_ddp_logging_data(self: DistributedDataParallel) -> dict[str, Any]:
        facts: dict[str, Any] = {"backend_name": SPOKEN}
        if SPOKEN == "gloo":  # DDP logs these for Gloo alone, and the suite looks for them
            facts["gloo_socket_ifname"] = os.environ.get("GLOO_SOCKET_IFNAME", "N/A")
            facts["gloo_device_transport"] = os.environ.get("GLOO_DEVICE_TRANSPORT", "N/A")
            facts["gloo_num_threads"] = 2
        return {**logged_by(self), **facts}

    DistributedDataParallel._get_ddp_logging_data = _get_ddp_logging_data


def _replace(name: str, function: Callable[..., Any]) -> None:
    """PyTorch itself calls by one name, its tests by the other."""
    setattr(distributed_c10d, name, function)
    setattr(dist, name, function)


def _asking_for(backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("backend") == SPOKEN:
            bound.arguments["backend"] = backend
        return function(*bound.args, **bound.kwargs)

    return call


def _answering(backend: str, function: Callable[..., str]) -> Callable[..., str]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> str:
        name = function(*args, **kwargs)
        return SPOKEN if name == backend else name

    return call
