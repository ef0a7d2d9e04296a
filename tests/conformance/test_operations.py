"""Operations that move data: what lands where, for every type, shape and layout, with inputs left as they were."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from contract import COMPLEX, DTYPES, WORLD_SIZES, dtypes_here, has, needs, numbers, same

from ranks import Member, run_ranks

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (3, 5), (0,), (2, 0, 3))


def _empties(count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(count)]


def moves(me: Member, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Broadcast, gathers, scatters and exchanges of one type and shape, with every root."""
    n, ranks = me.world_size, range(me.world_size)
    theirs = [numbers(rank, shape, dtype) for rank in ranks]
    mine = theirs[me.rank].clone()
    what = (dtype, shape)

    for root in ranks:
        received = mine.clone()
        dist.broadcast(received, root)
        same(received, theirs[root], ("broadcast", root, *what))

        parts = [numbers(10 * root + rank, shape, dtype) for rank in ranks]
        received = torch.zeros(shape, dtype=dtype)
        dist.scatter(received, parts if me.rank == root else None, root)
        same(received, parts[me.rank], ("scatter", root, *what))

        if dtype not in COMPLEX or has("complex gather"):
            gathered = _empties(n, shape, dtype) if me.rank == root else None
            dist.gather(mine, gathered, root)
            for rank, part in enumerate(gathered or []):
                same(part, theirs[rank], ("gather", root, rank, *what))

    gathered = _empties(n, shape, dtype)
    dist.all_gather(gathered, mine)
    for rank in ranks:
        same(gathered[rank], theirs[rank], ("all_gather", rank, *what))
    for all_gather in (dist.all_gather_single, dist.all_gather_into_tensor):
        if has("stacked outputs"):
            stacked = torch.zeros((n, *shape), dtype=dtype)
            all_gather(stacked, mine)
            same(stacked, torch.stack(theirs), (all_gather.__name__, "stacked", *what))
        if shape:
            joined = torch.zeros((n * shape[0], *shape[1:]), dtype=dtype)
            all_gather(joined, mine)
            same(joined, torch.cat(theirs), (all_gather.__name__, *what))

    parcels = [numbers(10 * me.rank + rank, shape, dtype) for rank in ranks]
    wanted = [numbers(10 * rank + me.rank, shape, dtype) for rank in ranks]
    received = _empties(n, shape, dtype)
    dist.all_to_all(received, parcels)
    for rank in ranks:
        same(received[rank], wanted[rank], ("all_to_all", rank, *what))
        same(parcels[rank], numbers(10 * me.rank + rank, shape, dtype), ("input of all_to_all", rank, *what))
    stacked, sent = torch.zeros((n, *shape), dtype=dtype), torch.stack(parcels)
    dist.all_to_all_single(stacked, sent)
    same(stacked, torch.stack(wanted), ("all_to_all_single", *what))
    same(sent, torch.stack(parcels), ("input of all_to_all_single", *what))
    same(mine, theirs[me.rank], ("input", *what))


def moves_of_all_types(me: Member) -> None:
    for dtype in dtypes_here(*DTYPES):
        moves(me, dtype, (7,))


def moves_of_all_shapes(me: Member) -> None:
    for shape in SHAPES:
        moves(me, torch.float32, shape)


@pytest.mark.parametrize("function", [moves_of_all_types, moves_of_all_shapes])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_moves(function: object, world_size: int) -> None:
    run_ranks(function, world_size)


def unusual_types(me: Member) -> None:
    """What only moves needs no arithmetic: any type will do."""
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2):
        received = torch.arange(1, 8).to(dtype) if me.rank == 0 else torch.zeros(7, dtype=torch.uint8).to(dtype)
        dist.broadcast(received, 0)
        same(received.view(torch.uint8), torch.arange(1, 8).to(dtype).view(torch.uint8), ("broadcast", dtype))
        joined = torch.zeros(7 * me.world_size, dtype=torch.uint8).to(dtype)
        dist.all_gather_single(joined, received)
        same(joined[-7:].view(torch.uint8), received.view(torch.uint8), ("all_gather_single", dtype))


@needs("unusual types")
def test_unusual_types_move() -> None:
    run_ranks(unusual_types, 2)


def large_moves(me: Member) -> None:
    """A million and three elements, and 8 MB: more than any buffer on the way holds."""
    for count in (1_000_003, 2_000_000):
        moves(me, torch.float32, (count,))


@pytest.mark.parametrize("world_size", [2, 3])
def test_large_moves(world_size: int) -> None:
    run_ranks(large_moves, world_size)


def uneven_exchanges(me: Member) -> None:
    """all_to_all_single by splits, some of them zero: rank r sends (r + s) % 3 rows to rank s."""
    ranks = range(me.world_size)
    to, of = [(me.rank + rank) % 3 for rank in ranks], [(rank + me.rank) % 3 for rank in ranks]
    parcels = [numbers(10 * me.rank + rank, (to[rank], 2)) for rank in ranks]
    received = torch.zeros(sum(of), 2)
    dist.all_to_all_single(received, torch.cat(parcels), of, to)
    same(received, torch.cat([numbers(10 * rank + me.rank, (of[rank], 2)) for rank in ranks]), "splits")

    last = me.world_size - 1  # everything to the last rank, nothing to the others
    to, of = [4 if rank == last else 0 for rank in ranks], [4 if me.rank == last else 0 for _ in ranks]
    received = torch.zeros(sum(of))
    dist.all_to_all_single(received, numbers(me.rank, 4), of, to)
    if me.rank == last:
        same(received, torch.cat([numbers(rank, 4) for rank in ranks]), "to one")
    nothing = torch.zeros(0)
    dist.all_to_all_single(nothing, torch.zeros(0), [0] * me.world_size, [0] * me.world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_uneven_exchanges(world_size: int) -> None:
    run_ranks(uneven_exchanges, world_size)


def uneven_lists(me: Member) -> None:
    """all_gather and all_to_all of tensors whose sizes differ by rank."""
    ranks = range(me.world_size)
    gathered = [torch.zeros(rank + 1) for rank in ranks]
    dist.all_gather(gathered, numbers(me.rank, me.rank + 1))
    for rank, part in enumerate(gathered):
        same(part, numbers(rank, rank + 1), ("all_gather", rank))
    received = [torch.zeros((rank + me.rank) % 3, 2) for rank in ranks]
    dist.all_to_all(received, [numbers(10 * me.rank + rank, ((rank + me.rank) % 3, 2)) for rank in ranks])
    for rank, part in enumerate(received):
        same(part, numbers(10 * rank + me.rank, ((rank + me.rank) % 3, 2)), ("all_to_all", rank))


def uneven_reduce_scatters(me: Member) -> None:
    """reduce_scatter into tensors whose sizes differ by rank; the last gets nothing."""
    sizes = [me.world_size - 1 - rank for rank in range(me.world_size)]
    output = torch.zeros(sizes[me.rank])
    dist.reduce_scatter(output, [numbers(10 * me.rank + to, size) for to, size in enumerate(sizes)])
    wanted = sum(numbers(10 * rank + me.rank, sizes[me.rank]) for rank in range(me.world_size))
    same(output, wanted)


@needs("uneven lists")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_uneven_lists(world_size: int) -> None:
    run_ranks(uneven_lists, world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_uneven_reduce_scatters(world_size: int) -> None:
    run_ranks(uneven_reduce_scatters, world_size)


def coalesced(me: Member) -> None:
    """Several tensors in one call, by the functions and by the coalescing manager DDP and FSDP use."""
    n, shapes = me.world_size, ((3,), (2, 2), (1,), (5000,))
    wanted = [sum(numbers(rank, shape) for rank in range(n)) for shape in shapes]

    tensors = [numbers(me.rank, shape) for shape in shapes]
    dist.all_reduce_coalesced(tensors)
    for tensor, total in zip(tensors, wanted, strict=True):
        same(tensor, total, "all_reduce_coalesced")

    tensors = [numbers(me.rank, shape) for shape in shapes]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor, total in zip(tensors, wanted, strict=True):
        same(tensor, total, "coalesced all_reduce")

    outputs = [torch.zeros(n * shape[0], *shape[1:]) for shape in shapes]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for output, shape in zip(outputs, shapes, strict=True):
            dist.all_gather_single(output, numbers(me.rank, shape))
    manager.wait()
    for output, shape in zip(outputs, shapes, strict=True):
        same(output, torch.cat([numbers(rank, shape) for rank in range(n)]), "coalesced all_gather_single")

    outputs = [torch.zeros(shape) for shape in shapes]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for output, shape in zip(outputs, shapes, strict=True):
            dist.reduce_scatter_single(output, numbers(me.rank, (n, *shape)).flatten(0, 1))
    manager.wait()
    for output, shape in zip(outputs, shapes, strict=True):
        same(output, sum(numbers(rank, (n, *shape))[me.rank] for rank in range(n)), "coalesced reduce_scatter_single")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_coalesced(world_size: int) -> None:
    run_ranks(coalesced, world_size)


def transposed(me: Member) -> None:
    """Dense tensors in another order of dimensions, the same on all ranks."""
    n = me.world_size
    mine = numbers(me.rank, (4, 6)).t()
    dist.all_reduce(mine)
    same(mine, sum(numbers(rank, (4, 6)) for rank in range(n)).t(), "all_reduce")
    received = numbers(me.rank, (4, 6)).t()
    dist.broadcast(received, n - 1)
    same(received, numbers(n - 1, (4, 6)).t(), "broadcast")


def strided(me: Member) -> None:
    """Every second column of a wider tensor: results are right, and what lies between is not touched."""
    n, ranks = me.world_size, range(me.world_size)

    def spread(values: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*values.shape[:-1], 2 * values.shape[-1]), -1, dtype=values.dtype)
        wide[..., ::2] = values
        return wide

    def check(wide: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        same(wide, spread(wanted), what)

    theirs = [numbers(rank, (3, n)) for rank in ranks]
    total = sum(theirs)
    wide = spread(theirs[me.rank])
    dist.all_reduce(wide[..., ::2])
    check(wide, total, "all_reduce")
    wide = spread(theirs[me.rank])
    dist.reduce(wide[..., ::2], 0)
    if me.rank == 0:
        check(wide, total, "reduce")
    wide = spread(theirs[me.rank])
    dist.broadcast(wide[..., ::2], 0)
    check(wide, theirs[0], "broadcast")

    outputs = [spread(torch.zeros(3, n)) for _ in ranks]
    dist.all_gather([output[..., ::2] for output in outputs], spread(theirs[me.rank])[..., ::2])
    for rank in ranks:
        check(outputs[rank], theirs[rank], "all_gather")
    output = spread(torch.zeros(3, n))
    dist.reduce_scatter(output[..., ::2], [spread(theirs[me.rank])[..., ::2] for _ in ranks])
    check(output, total, "reduce_scatter")
    outputs = [spread(torch.zeros(3, n)) for _ in ranks]
    dist.all_to_all([output[..., ::2] for output in outputs], [spread(theirs[me.rank])[..., ::2] for _ in ranks])
    for rank in ranks:
        check(outputs[rank], theirs[rank], "all_to_all")


def test_transposed() -> None:
    run_ranks(transposed, 3)


@needs("strided tensors")
@pytest.mark.parametrize("world_size", [2, 3])
def test_strided(world_size: int) -> None:
    run_ranks(strided, world_size)


def barriers(me: Member) -> bool:
    """Nobody leaves before the last has come. Returns whether the last had, when this rank left."""
    dist.barrier()
    if me.rank == me.world_size - 1:
        me.store.set("the last has come", "")
    dist.barrier()
    there = me.store.check(["the last has come"])
    dist.distributed_c10d._get_default_group().monitored_barrier(timedelta(seconds=30))
    return there


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_barriers(world_size: int) -> None:
    assert run_ranks(barriers, world_size) == [True] * world_size


def missing_at_the_barrier(me: Member) -> str:
    """The last rank stays away from a monitored barrier; the others say how it ended for them."""
    said = "stayed away"
    if me.rank != me.world_size - 1:
        with pytest.raises(RuntimeError) as caught:
            dist.distributed_c10d._get_default_group().monitored_barrier(timedelta(seconds=1), wait_all_ranks=True)
        said = str(caught.value)
    me.meet("told")
    return said


def test_monitored_barrier_names_the_missing_rank() -> None:
    said = run_ranks(missing_at_the_barrier, 3)
    assert "rank 2" in said[0].lower() or "ranks 2" in said[0].lower()
