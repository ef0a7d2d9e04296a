"""An address that this host cannot use fails the group that has it; the process and its other groups go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.backend import failure
from ranks import BACKEND, Member, run_ranks

pytestmark = pytest.mark.skipif(BACKEND == "gloo", reason="reads and changes what Paceline publishes")

BAD = {
    "a scope that is not there": "[fe80::1%nosuch0]:4711",
    "a number that is no port": "127.0.0.1:port",
    "nothing": "",
}


class Forging(dist.Store):
    """A store in which rank 1 publishes another TCP address than its own."""

    def __init__(self, inner: dist.Store, address: str) -> None:
        super().__init__()
        self.inner = inner
        self.address = address

    def set(self, key: str, value: Any) -> None:
        if key.endswith("rank/1"):
            host, _, *others = bytes(value).decode().split("\n")
            value = "\n".join([host, self.address, *others])
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self.inner.wait(keys, *timeout)

    def delete_key(self, key: str) -> bool:
        return self.inner.delete_key(key)


def meet_badly(me: Member, address: str) -> str:
    """Rank 0 hears that rank 1 cannot be reached; then both work in the next group of the same processes."""
    dist.destroy_process_group()
    store = Forging(me.store, address) if me.rank == 1 else me.store
    Member(me.rank, me.world_size, me.backend, store).join("bad")
    said = ""
    if me.rank == 0:
        with pytest.raises(dist.DistBackendError) as caught:
            dist.all_reduce(torch.ones(10))
        said = str(caught.value)
        assert failure() in said
    me.meet("heard")
    dist.destroy_process_group()
    me.join("good")
    ones = torch.ones(10)
    dist.all_reduce(ones)
    assert ones.eq(me.world_size).all()
    return said


@pytest.mark.parametrize("address", BAD.values(), ids=BAD.keys())
def test_an_address_that_is_none_fails_its_group_only(address: str) -> None:
    said, _ = run_ranks(meet_badly, 2, address, environment={"PACELINE_TRANSPORT": "tcp"})
    assert "allreduce #1: rank 1 (" in said
    assert "cannot be reached" in said
