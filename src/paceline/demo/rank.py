"""One rank: ``python -m paceline.demo.rank RANK JOB`` trains in every strategy and prints what happens.

It ends when its standard input does, so that nothing stays when the controller is gone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

from paceline.backend import arrivals, chosen_algorithms
from paceline.demo.data import Digits, accuracy, make_model
from paceline.demo.messages import Finished, Job, Message, Strategy
from paceline.demo.trainings import finish, groups_of, train
from paceline.observe.arrivals import lateness
from paceline.train.decentralized.wrapper import Decentralized

_PATIENCE = timedelta(seconds=60)


def main(rank: int, job: Job) -> None:
    """Train in one strategy after the other, each time from the same weights."""
    threading.Thread(target=_end_with_controller, daemon=True).start()
    torch.set_num_threads(1)  # ranks share the cores
    digits = Digits.load()
    first: nn.Module | None = None
    for strategy in Strategy:
        store = FileStore(str(Path(job.folder) / strategy.name), job.num_ranks)
        dist.init_process_group(
            strategy.backend, store=store, rank=rank, world_size=job.num_ranks, timeout=_PATIENCE
        )  # fmt: skip
        module = make_model(job.seed)
        model = train(strategy, module, digits, job, _say)
        waited_s = finish(model)
        ended_s = time.perf_counter()
        first = module if first is None else first
        tells = strategy.backend == "paceline" and strategy.synchronous
        _say(
            Finished(
                strategy,
                ended_s,
                accuracy=accuracy(module, digits),
                away=_difference(first, module),
                algorithms=_algorithms(model) if tells else [],
                told=_late_ranks(model) if tells else [],
                waited_s=waited_s,
                averages=dict(model.statistics.groups) if isinstance(model, Decentralized) else {},
            )
        )
        dist.barrier()
        del model
        dist.destroy_process_group()


def _algorithms(model: Any) -> list[str]:
    return [line for group in groups_of(model) for line in chosen_algorithms(group)]


def _late_ranks(model: Any) -> list[str]:
    return [str(one) for group in groups_of(model) for one in lateness(arrivals(group)) if one.mostly]


def _difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def _say(message: Message) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _end_with_controller() -> None:
    os.read(0, 1)  # without the lock of sys.stdin, which a daemon thread must not hold at the end
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Job))
