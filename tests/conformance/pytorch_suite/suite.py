"""The suite PyTorch ships in its wheel, as a test case whose ranks are forked and speak to the backend of choice.

PyTorch spawns three interpreters a test, which import for seconds before they test for milliseconds. Here a server
imports everything once and forks the ranks.

The suite reads its environment when it is imported: set ``BACKEND`` and ``WORLD_SIZE`` before.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import translation
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

_PR_SET_PDEATHSIG = 1
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch._dynamo", "torch.testing._internal.distributed.distributed_test"])


@dataclass(frozen=True)
class Verdict:
    """What became of one test: passed, failed or skipped, and why."""

    name: str
    outcome: str
    reason: str
    duration_s: float


class PytorchSuite(TestDistBackend, DistributedTest._DistTestBase):
    """PyTorch's class of the same kind is TestDistBackendWithSpawn."""

    backend = ""  # the one under test; the suite itself believes in $BACKEND

    def setUp(self) -> None:
        """Start the ranks."""
        super().setUp()
        self._spawn_processes()

    def tearDown(self) -> None:
        """Leave no rank behind, not even one that is stuck."""
        for process in self.processes:
            process.kill()
            process.join()
        Path(self.file_name).unlink(missing_ok=True)  # the ranks' FileStore
        super().tearDown()

    def _spawn_processes(self) -> None:
        changed = {name: os.environ[name] for name in ("TEMP_DIR", "INIT_METHOD", "WORLD_SIZE")}

        def process(target: Callable[..., None], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return _processes.Process(target=_rank, name=name, args=(self.backend, changed, target, args, kwargs))

        self._start_processes(process)


def names() -> list[str]:
    """Every test of the suite."""
    return list(unittest.TestLoader().getTestCaseNames(PytorchSuite))


def run(name: str, backend: str, limit_s: int) -> Verdict:
    """Run one test on real ranks."""
    common_distributed.TIMEOUT_DEFAULT = limit_s
    common_distributed.TIMEOUT_OVERRIDE.clear()
    PytorchSuite.backend = backend
    result = unittest.TestResult()
    started_s = time.monotonic()
    PytorchSuite(name).run(result)
    duration_s = time.monotonic() - started_s
    if troubles := result.failures + result.errors:
        return Verdict(name, "failed", troubles[0][1], duration_s)
    if result.skipped:
        return Verdict(name, "skipped", result.skipped[0][1], duration_s)
    return Verdict(name, "passed", "", duration_s)


def _rank(backend: str, changed: dict[str, str], target: Callable[..., None], args: Any, kwargs: Any) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the server ends with the suite: so do we
    os.environ.update(changed)
    torch.set_num_threads(1)
    translation.translate(backend)
    target(*args, **kwargs)
