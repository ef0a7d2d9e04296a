"""PacelineStrategy against Lightning's DDPStrategy, from the same seeds on two ranks: every bit is the same."""

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

from paceline.errors import UnsupportedError, UsageError
from ranks import BACKEND, Member, Ranks, run_ranks

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="lightning is not installed: pip install --group test"
)


def _module(kind: str) -> Any:
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build("cnn")
            if kind == "manual":  # without buffers, which Lightning's DDP does not broadcast then
                self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 3))
            self.automatic_optimization = kind != "manual"
            self.seen: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            if kind == "fails" and index == 3:
                if self.global_rank == 0:
                    loss.backward()
                raise ArithmeticError("in a batch")
            if not self.automatic_optimization:
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: Any) -> None:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.seen.append(loss.item())
            self.log("val_loss", loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            if kind == "two optimizers":
                self.automatic_optimization = False
                return [optimizer, torch.optim.SGD(self.parameters(), lr=0.1)]
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Classifier()


def _trainer(me: Member, folder: str, strategy: Any, **options: Any) -> Any:
    """As torchrun starts it."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    warnings.simplefilter("ignore")  # Lightning advises
    rank, size = str(me.rank), str(me.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(TORCHELASTIC_RUN_ID="test", MASTER_PORT="0")
    return Trainer(
        **{"accelerator": "cpu", "devices": me.world_size, "strategy": strategy, "logger": False, **options},
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(dirpath=folder, monitor="val_loss", save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _batches() -> Any:
    dice = torch.Generator().manual_seed(1)
    inputs = torch.randn(72, 1, 8, 8, generator=dice)
    targets = (inputs.flatten(1).sum(1) > 0).long()
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=4, shuffle=True)


def fits(me: Member, folder: str, kind: str, sharded: bool) -> Any:
    from lightning.pytorch import seed_everything
    from lightning.pytorch.strategies import DDPStrategy

    from paceline.integrations.lightning import PacelineStrategy

    def run(name: str, strategy: Any) -> Any:
        options: dict[str, Any] = {}
        if kind == "automatic":
            options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
        path = f"{folder}/{name}"
        seed_everything(1, verbose=False)
        trainer = _trainer(me, path, strategy(), max_epochs=2, **options)
        module = _module(kind)
        trainer.fit(module, _batches(), _batches())
        halfway = weights(module)
        trainer.validate(module, _batches(), verbose=False)
        again = _module(kind)
        resumed = _trainer(me, f"{path}-resumed", strategy(), max_epochs=4, **options)
        resumed.fit(again, _batches(), _batches(), ckpt_path=f"{folder}/ddp/last.ckpt")
        resumed.save_checkpoint(f"{path}/end.ckpt", weights_only=False)
        end = torch.load(f"{path}/end.ckpt", weights_only=True)
        state = {str(key): entry["momentum_buffer"] for key, entry in end["optimizer_states"][0]["state"].items()}
        return [halfway, weights(again), end["state_dict"], state], module.seen + again.seen

    theirs, seen_theirs = run("ddp", DDPStrategy)
    ours, seen_ours = run("paceline", lambda: PacelineStrategy(sharded=sharded, bucket_mb=0.002))
    return [apart(a, b) for a, b in zip(ours, theirs, strict=True)], seen_theirs == seen_ours, apart(ours[0], ours[1])


@pytest.mark.parametrize(("kind", "sharded"), [("automatic", False), ("automatic", True), ("manual", False)])
def test_a_fit_ends_with_the_weights_of_lightnings_ddp(tmp_path: Path, kind: str, sharded: bool) -> None:
    for distances, same_losses, moved in run_ranks(fits, 2, str(tmp_path), kind, sharded, timeout_s=110):
        assert distances == [0.0] * 4
        assert same_losses
        assert moved > 0


def fails(me: Member, folder: str) -> None:
    from paceline.integrations.lightning import PacelineStrategy

    module = _module("fails")
    with pytest.raises(ArithmeticError, match="in a batch"):
        _trainer(me, folder, PacelineStrategy(), max_epochs=1).fit(module, _batches())
    assert type(module.net[0].weight) is nn.Parameter


def test_an_error_in_the_module_comes_out_without_waiting_for_other_ranks(tmp_path: Path) -> None:
    run_ranks(fails, 2, str(tmp_path), timeout_s=110)


def starts(me: Member, folder: str) -> None:
    """The strategy makes the process group, and refuses what it cannot do."""
    import torch.distributed as dist

    from paceline.integrations.lightning import PacelineStrategy

    with pytest.raises(UsageError, match="no option find_unused_parameters"):
        PacelineStrategy(find_unused_parameters=True)
    with pytest.raises(UsageError, match="no option ddp_comm_hook"):
        PacelineStrategy(ddp_comm_hook=print)
    assert not dist.is_initialized()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    trainer = _trainer(me, folder, PacelineStrategy(), max_steps=2)
    trainer.fit(_module("automatic"), _batches(), _batches())
    assert dist.get_backend() == "paceline"
    with pytest.raises(UnsupportedError, match="returned 2 optimizers"):
        _trainer(me, folder, PacelineStrategy(), max_steps=2).fit(_module("two optimizers"), _batches())


@pytest.mark.skipif(BACKEND != "paceline", reason="the backend is what is tested")
def test_the_strategy_starts_paceline_and_says_what_it_cannot_do(tmp_path: Path) -> None:
    with Ranks(starts, 1, str(tmp_path), join=False) as ranks:
        ranks.results(110)
