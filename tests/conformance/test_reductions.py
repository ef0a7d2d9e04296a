"""Reductions: every operator on every type, exact where the arithmetic is, within stated bounds where it rounds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from contract import COMPLEX, DTYPES, FLOATS, INTEGERS, WORLD_SIZES, dtypes_here, has, needs, numbers, same
from torch.testing import assert_close

from ranks import Member, run_ranks

Operator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_EVERY = (*FLOATS, *INTEGERS, torch.bool)
_BITS = (*INTEGERS, torch.bool)
OPERATORS: dict[str, tuple[Operator, tuple[torch.dtype, ...]]] = {
    "SUM": (torch.add, DTYPES),
    "AVG": (torch.add, (*FLOATS, *COMPLEX)),
    "PRODUCT": (torch.mul, _EVERY),
    "MIN": (torch.minimum, _EVERY),
    "MAX": (torch.maximum, _EVERY),
    "BAND": (torch.bitwise_and, _BITS),
    "BOR": (torch.bitwise_or, _BITS),
    "BXOR": (torch.bitwise_xor, _BITS),
}
SIZES = (0, 1, 7, 1000, 1_000_003, 2_000_000)  # the last is 8 MB of float32


def reductions(me: Member, name: str) -> None:
    """Every operation that reduces, for one operator, on every type it makes sense for."""
    operator, dtypes = OPERATORS[name]
    op, ranks = getattr(dist.ReduceOp, name), range(me.world_size)
    roundings = 2 if name == "AVG" else 0  # by dividing, or by scaling before or after adding
    for dtype in dtypes_here(*dtypes):
        if name == "SUM" and dtype is torch.bool and not has("bool SUM"):
            continue
        for each in (1, 5):
            inputs = [numbers(rank, each * me.world_size, dtype) for rank in ranks]
            wanted = reduce(operator, inputs)
            if name == "AVG":
                wanted = (wanted / me.world_size).to(dtype)
            part = wanted.chunk(me.world_size)[me.rank]
            where = (name, dtype, each)

            mine = inputs[me.rank].clone()
            dist.all_reduce(mine, op)
            same(mine, wanted, ("all_reduce", *where), roundings)
            for root in ranks:
                mine = inputs[me.rank].clone()
                dist.reduce(mine, root, op)
                if me.rank == root:
                    same(mine, wanted, ("reduce", root, *where), roundings)

            mine, output = inputs[me.rank].clone(), torch.empty(each, dtype=dtype)
            dist.reduce_scatter_single(output, mine, op)
            same(output, part, ("reduce_scatter_single", *where), roundings)
            same(mine, inputs[me.rank], ("input of reduce_scatter_single", *where))
            dist.reduce_scatter(output.zero_(), list(mine.chunk(me.world_size)), op)
            same(output, part, ("reduce_scatter", *where), roundings)
            same(mine, inputs[me.rank], ("input of reduce_scatter", *where))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_operator_on_every_type(operator: str, world_size: int) -> None:
    run_ranks(reductions, world_size, operator)


def rounding_sums(me: Member) -> list[str]:
    """Sums of random floats; the digests of the results are for the test to compare."""
    digests = []
    for dtype in FLOATS:
        for size in SIZES:
            inputs = [_noise(rank, size, dtype) for rank in range(me.world_size)]
            mine = inputs[me.rank].clone()
            dist.all_reduce(mine)
            _close_to_sum(mine, inputs, ("all_reduce", dtype, size))
            digests.append(hashlib.sha256(mine.view(torch.uint8).numpy()).hexdigest())
    return digests


def _noise(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _close_to_sum(result: torch.Tensor, inputs: list[torch.Tensor], what: object) -> None:
    """Within what n - 1 roundings can do, whatever the order: each is at most eps / 2 of a partial sum."""
    exact = sum((part.double() for part in inputs), torch.zeros_like(inputs[0], dtype=torch.float64))
    largest = sum((part.double().abs() for part in inputs), torch.zeros_like(exact))
    bound = (len(inputs) - 1) * torch.finfo(result.dtype).eps / 2 * 1.01 * largest
    assert bool(((result.double() - exact).abs() <= bound).all()), f"{what} is off by more than its roundings"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_ranks_get_the_same_bits(world_size: int) -> None:
    digests = run_ranks(rounding_sums, world_size)
    assert digests == [digests[0]] * world_size


def special_values(me: Member) -> None:
    """Infinities and NaNs go through, and integers wrap as they do in torch."""
    mine = torch.tensor([1.0, float("inf"), 1.0, float("nan")]) if me.rank == 0 else torch.ones(4)
    dist.all_reduce(mine)
    same(mine, torch.tensor([float(me.world_size), float("inf"), float(me.world_size), float("nan")]))
    byte = torch.full((9,), 200, dtype=torch.uint8)
    dist.all_reduce(byte)
    same(byte, torch.full((9,), 200 * me.world_size % 256, dtype=torch.uint8))
    big = torch.full((3,), 2**62, dtype=torch.int64) + me.rank
    wanted = reduce(torch.add, [torch.full((3,), 2**62, dtype=torch.int64) + rank for rank in range(me.world_size)])
    dist.all_reduce(big)
    same(big, wanted)


def test_special_values() -> None:
    run_ranks(special_values, 3)


def scaled_sums(me: Member) -> None:
    """PREMUL_SUM: every contribution is scaled before it is added."""
    for dtype in FLOATS:
        mine = numbers(me.rank, 12, dtype)
        dist.all_reduce(mine, dist._make_nccl_premul_sum(0.5))
        wanted = sum(numbers(rank, 12, torch.float64) * 0.5 for rank in range(me.world_size))
        same(mine, wanted.to(dtype), ("all_reduce", dtype))
        output = torch.empty(12 // me.world_size, dtype=dtype)
        dist.reduce_scatter_single(output, numbers(me.rank, 12, dtype), dist._make_nccl_premul_sum(0.5))
        same(output, wanted.to(dtype).chunk(me.world_size)[me.rank], ("reduce_scatter_single", dtype))


@needs("PREMUL_SUM")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_premultiplied_sum(world_size: int) -> None:
    run_ranks(scaled_sums, world_size)


def refusals(me: Member) -> None:
    """What has no meaning is an error on every rank, and does no harm to the group."""
    for dtype, name in ((torch.float32, "BAND"), (torch.complex64, "MAX"), (torch.float64, "BXOR")):
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_reduce(torch.ones(3, dtype=dtype), getattr(dist.ReduceOp, name))
    mine = torch.ones(3)
    dist.all_reduce(mine)
    same(mine, torch.full((3,), float(me.world_size)))


def test_meaningless_reductions_are_refused() -> None:
    run_ranks(refusals, 2)


def sparse_sums(me: Member) -> None:
    """Sparse all_reduce as Gloo has it: indices are united, values of equal indices added."""
    n = me.world_size
    rows = torch.tensor([[me.rank, n]])
    mine = torch.sparse_coo_tensor(rows, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (n + 1, 2), check_invariants=True)
    dist.all_reduce(mine)
    wanted = torch.tensor([[1.0, 2.0]] * n + [[3.0 * n, 4.0 * n]])
    assert mine.is_sparse
    assert_close(mine.to_dense(), wanted, rtol=0, atol=0)
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (4,), check_invariants=True)
    dist.all_reduce(empty)
    assert_close(empty.to_dense(), torch.zeros(4), rtol=0, atol=0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sparse_sum(world_size: int) -> None:
    run_ranks(sparse_sums, world_size)
