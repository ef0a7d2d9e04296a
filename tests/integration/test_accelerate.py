"""paceline.integrations.accelerate against what Accelerate prepares itself, DDP: every bit is the same on two ranks."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from dear_models import apart, build, weights
from torch import nn

import paceline
from paceline.errors import UsageError
from ranks import Member, run_ranks

pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="accelerate is not installed: pip install --group test"
)


def fits(me: Member, folder: str, sharded: bool, precision: str) -> Any:
    warnings.simplefilter("ignore")  # Accelerate advises
    os.environ.update(RANK=str(me.rank), LOCAL_RANK=str(me.rank), WORLD_SIZE=str(me.world_size), MASTER_PORT="0")
    from accelerate import Accelerator

    from paceline.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    assert accelerator.num_processes == me.world_size
    inputs = torch.randn(48, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs, (inputs.flatten(1).sum(1) > 0).long())

    def run(name: str, prepared: Any, saved: str | None = None) -> Any:
        net = build("cnn")
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        loader: Any = torch.utils.data.DataLoader(data, batch_size=4)
        model, optimizer, loader, scheduler = prepared(net, optimizer, loader, scheduler)
        if saved:
            accelerator.load_state(saved)
        for _ in range(2):
            for features, targets in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(features), targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        accelerator.save_state(f"{folder}/{name}")
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        state = {str(i): entry["momentum_buffer"] for i, entry in optimizer.state_dict()["state"].items()}
        kept = weights(net)
        return [kept, state, {"loss": loss.detach(), "rate": torch.tensor(scheduler.get_last_lr()[0])}]

    def ours(*parts: Any) -> Any:
        return prepare(accelerator, *parts, sharded=sharded, bucket_mb=0.002)

    first, one = run("ddp", accelerator.prepare), run("paceline", ours)
    second, two = run("ddp2", accelerator.prepare, f"{folder}/ddp"), run("paceline2", ours, f"{folder}/paceline")
    return [apart(a, b) for a, b in zip(first + second, one + two, strict=True)], apart(first[0], second[0])


@pytest.mark.parametrize(("sharded", "precision"), [(False, "bf16"), (True, "no")])
def test_a_loop_with_accelerate_ends_with_the_weights_of_ddp(tmp_path: Path, sharded: bool, precision: str) -> None:
    for distances, moved in run_ranks(fits, 2, str(tmp_path), sharded, precision, timeout_s=110):
        assert distances == [0.0] * 6
        assert moved > 0


def refusals(me: Member) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(me.rank), LOCAL_RANK=str(me.rank), WORLD_SIZE=str(me.world_size), MASTER_PORT="0")
    from accelerate import Accelerator

    from paceline.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="give prepare\\(\\) a compiled module"):
        prepare(accelerator, net, optimizer)
    with pytest.raises(UsageError, match="AcceleratedOptimizer only passes calls on"):
        paceline.DataParallel(net, accelerator.prepare(optimizer))
    with pytest.raises(UsageError, match="DistributedDataParallel around paceline"):
        accelerator.prepare(paceline.DataParallel(net, optimizer))


def test_what_would_train_otherwise_than_meant_is_refused() -> None:
    run_ranks(refusals, 2)
