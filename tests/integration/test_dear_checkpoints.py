"""State dictionaries of a DataParallel are those of plain PyTorch, for any number of ranks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from dear_models import OPTIMIZERS, apart, build, ddp, dear, fit, loss_of, weights
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import paceline
from paceline.errors import UsageError
from ranks import Member, run_ranks

MODES = (False, True)


def _bytes(state: Any) -> bytes:
    stored = io.BytesIO()
    torch.save(state, stored)
    return stored.getvalue()


def _read(stored: bytes) -> Any:
    return torch.load(io.BytesIO(stored))


def same_as_ddp(me: Member, optimizer: str) -> bytes:
    """Both modes save what DDP does, bit for bit; returns it."""
    reference, theirs = ddp("mlp", optimizer)
    fit(reference, theirs, "mlp", me, 4)
    saved = b""
    for sharded in MODES:
        model, ours = dear("mlp", optimizer, sharded=sharded)
        fit(model, ours, "mlp", me, 4)
        wanted, found = theirs.state_dict(), ours.state_dict()
        assert found["param_groups"] == wanted["param_groups"]
        assert found["state"].keys() == wanted["state"].keys()
        for number, entries in wanted["state"].items():
            assert found["state"][number].keys() == entries.keys()
            for key, value in entries.items():
                assert torch.equal(found["state"][number][key], value), (sharded, number, key)
        assert list(model.state_dict()) == list(build("mlp").state_dict())
        saved = _bytes({"model": model.state_dict(), "optimizer": found})
        if sharded:
            held = sum(v.numel() for one in ours.state.values() for v in one.values() if v.dim())
            total = sum(v.numel() for one in wanted["state"].values() for v in one.values() if v.dim())
            assert held < 0.7 * total, "each rank of two keeps about half"
    return saved


def go_on(me: Member, stored: bytes, optimizer: str) -> list[float]:
    """Load into plain PyTorch and into both modes, before and after wrapping; train on, and compare with DDP."""
    reference, theirs = ddp("mlp", optimizer)
    state = _read(stored)
    reference.module.load_state_dict(state["model"])
    theirs.load_state_dict(state["optimizer"])
    fit(reference, theirs, "mlp", me, 4, 10)
    found = []
    for sharded in MODES:
        model, ours = dear("mlp", optimizer, sharded=sharded)
        fit(model, ours, "mlp", me, 3)  # something to be replaced
        model.load_state_dict({f"module.{key}": value for key, value in state["model"].items()})
        ours.load_state_dict(_read(stored)["optimizer"])  # PyTorch keeps the very tensors it is given
        fit(model, ours, "mlp", me, 4, 10)
        found.append(apart(weights(reference), weights(model)))
        net = build("mlp")
        early = OPTIMIZERS[optimizer](net.parameters())
        net.load_state_dict(state["model"])
        early.load_state_dict(_read(stored)["optimizer"])
        model = paceline.DataParallel(net, early, sharded=sharded, bucket_mb=0.002)
        fit(model, early, "mlp", me, 4, 10)
        found.append(apart(weights(reference), weights(model)))
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_states_move_between_ddp_modes_and_numbers_of_ranks(optimizer: str) -> None:
    stored = run_ranks(same_as_ddp, 2, optimizer)[0]
    for num_ranks in (2, 3):
        for found in run_ranks(go_on, num_ranks, stored, optimizer):
            assert max(found) <= (0.0 if num_ranks == 2 else 1e-6)
    net = build("mlp")
    alone = OPTIMIZERS[optimizer](net.parameters())
    state = _read(stored)
    net.load_state_dict(state["model"])
    alone.load_state_dict(state["optimizer"])
    loss_of(net, "mlp", 0, 0).backward()
    alone.step()


def save(me: Member, folder: str, sharded: bool) -> None:
    model, optimizer = dear("mlp", "adamw", sharded=sharded)
    fit(model, optimizer, "mlp", me, 3)
    checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/a")
    state, optimizer_state = get_state_dict(model.module, optimizer)
    checkpoint.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/b")
    fit(model, optimizer, "mlp", me, 2, 3)
    if me.rank == 0:
        torch.save(model.state_dict(), f"{folder}/wanted.pt")


def load(me: Member, folder: str, sharded: bool) -> list[float]:
    found = []
    for name in ("a", "b"):
        model, optimizer = dear("mlp", "adamw", sharded=sharded)
        fit(model, optimizer, "mlp", me, 1, 50)
        if name == "a":
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint.load(state, checkpoint_id=f"{folder}/{name}")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        else:
            mine, theirs = get_state_dict(model.module, optimizer)
            state = {"model": mine, "optimizer": theirs}
            checkpoint.load(state, checkpoint_id=f"{folder}/{name}")
            set_state_dict(
                model.module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        fit(model, optimizer, "mlp", me, 2, 3)
        found.append(apart(torch.load(f"{folder}/wanted.pt"), weights(model)))
    dist.barrier()
    return found


@pytest.mark.parametrize("sharded", MODES)
def test_distributed_checkpoints(sharded: bool, tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), sharded)
    for found in run_ranks(load, 2, str(tmp_path), not sharded):
        assert max(found) == 0.0


def refuse(me: Member) -> None:
    model, optimizer = dear("mlp", "adamw", sharded=True)
    fit(model, optimizer, "mlp", me, 1)
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].flatten()[:100]
    with pytest.raises(UsageError, match="one rank's part of a state"):
        optimizer.load_state_dict(state)


def test_one_ranks_part_of_a_state_is_refused() -> None:
    run_ranks(refuse, 2)
