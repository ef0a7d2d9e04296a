"""Tensors that share memory, and arguments that are refused at the call, on every rank, without harm to the group."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from contract import numbers, same

from ranks import BACKEND, Member, run_ranks

Outcome = tuple[torch.Tensor, torch.Tensor]  # what came out, and what should have
LENGTHS = (3, 300_000)  # 1.2 MB: more than goes in one piece


def _coalescing() -> object:
    return dist.distributed_c10d._coalescing_manager()


def _theirs(me: Member, length: int, start: int = 0) -> list[torch.Tensor]:
    return [numbers(start + rank, length) for rank in range(me.world_size)]


def _reduced_twice_in_a_list(me: Member, length: int) -> Outcome:
    mine = numbers(me.rank, length)
    dist.all_reduce_coalesced([mine, mine])
    return mine, sum(_theirs(me, length))


def _reduced_twice_in_the_manager(me: Member, length: int) -> Outcome:
    mine = numbers(me.rank, length)
    with _coalescing():
        dist.all_reduce(mine)
        dist.all_reduce(mine)
    return mine, sum(_theirs(me, length))


def _reduced_in_part(me: Member, length: int) -> Outcome:
    mine = numbers(me.rank, length)
    dist.all_reduce_coalesced([mine[: length - 1], mine[1:]])
    return mine, sum(_theirs(me, length))


def _all_gather_to_one_output(me: Member, length: int) -> Outcome:
    output = torch.zeros(length)
    dist.all_gather([output] * me.world_size, numbers(me.rank, length))
    return output, _theirs(me, length)[-1]


def _all_gather_to_the_input(me: Member, length: int) -> Outcome:
    mine = numbers(me.rank, length)
    outputs = [torch.zeros(length) for _ in range(me.world_size)]
    outputs[(me.rank + 1) % me.world_size] = mine
    dist.all_gather(outputs, mine)
    return torch.cat(outputs), torch.cat(_theirs(me, length))


def _all_gather_in_place(me: Member, length: int) -> Outcome:
    output = torch.zeros(me.world_size * length)
    part = output.chunk(me.world_size)[me.rank]
    part.copy_(numbers(me.rank, length))
    dist.all_gather_single(output, part)
    return output, torch.cat(_theirs(me, length))


def _all_gather_from_the_wrong_part(me: Member, length: int) -> Outcome:
    output = torch.zeros(me.world_size * length)
    part = output[1 : length + 1]
    part.copy_(numbers(me.rank, length))
    dist.all_gather_single(output, part)
    return output, torch.cat(_theirs(me, length))


def _all_gather_twice_to_one_output(me: Member, length: int) -> Outcome:
    output = torch.zeros(me.world_size * length)
    with _coalescing():
        dist.all_gather_single(output, numbers(me.rank, length))
        dist.all_gather_single(output, numbers(me.rank + 1, length))
    return output, torch.cat(_theirs(me, length, start=1))


def _reduce_scatter_in_place(me: Member, length: int) -> Outcome:
    parts = numbers(me.rank, me.world_size * length)
    output = parts.chunk(me.world_size)[me.rank]
    dist.reduce_scatter_single(output, parts)
    return output, sum(_theirs(me, me.world_size * length)).chunk(me.world_size)[me.rank]


def _reduce_scatter_to_the_wrong_part(me: Member, length: int) -> Outcome:
    parts = numbers(me.rank, me.world_size * length)
    output = parts[1 : length + 1]
    dist.reduce_scatter_single(output, parts)
    return output, sum(_theirs(me, me.world_size * length)).chunk(me.world_size)[me.rank]


def _reduce_scatter_to_anothers_input(me: Member, length: int) -> Outcome:
    parts = [numbers(me.rank + part, length) for part in range(me.world_size)]
    output = parts[(me.rank + 1) % me.world_size]
    dist.reduce_scatter(output, parts)
    return output, sum(_theirs(me, length, start=me.rank))


def _reduce_scatter_twice_to_one_output(me: Member, length: int) -> Outcome:
    output = torch.zeros(length)
    with _coalescing():
        dist.reduce_scatter_single(output, numbers(me.rank, me.world_size * length))
        dist.reduce_scatter_single(output, numbers(me.rank + 1, me.world_size * length))
    return output, sum(_theirs(me, me.world_size * length, start=1)).chunk(me.world_size)[me.rank]


def _gather_to_one_output(me: Member, length: int) -> Outcome:
    output = torch.zeros(length)
    dist.gather(numbers(me.rank, length), [output] * me.world_size if me.rank == 0 else None, 0)
    return output, _theirs(me, length)[-1] if me.rank == 0 else torch.zeros(length)


def _gather_to_the_input(me: Member, length: int) -> Outcome:
    mine = numbers(me.rank, length)
    outputs = [torch.zeros(length) for _ in range(me.world_size - 1)] + [mine]
    dist.gather(mine, outputs if me.rank == 0 else None, 0)
    wanted = _theirs(me, length) if me.rank == 0 else outputs
    return torch.cat(outputs), torch.cat(wanted)


def _scatter_to_anothers_input(me: Member, length: int) -> Outcome:
    parts = _theirs(me, length)
    output = parts[1] if me.rank == 0 else torch.zeros(length)
    dist.scatter(output, parts if me.rank == 0 else None, 0)
    return output, numbers(me.rank, length)


def _all_to_all_in_place(me: Member, length: int) -> Outcome:
    mine = torch.cat(_theirs(me, length, start=10 * me.rank))
    dist.all_to_all_single(mine, mine)
    return mine, torch.cat([numbers(10 * rank + me.rank, length) for rank in range(me.world_size)])


def _all_to_all_of_a_list_in_place(me: Member, length: int) -> Outcome:
    mine = _theirs(me, length, start=10 * me.rank)
    dist.all_to_all(mine, mine)
    return torch.cat(mine), torch.cat([numbers(10 * rank + me.rank, length) for rank in range(me.world_size)])


def _all_to_all_to_one_output(me: Member, length: int) -> Outcome:
    output = torch.zeros(length)
    dist.all_to_all([output] * me.world_size, _theirs(me, length, start=10 * me.rank))
    return output, numbers(10 * (me.world_size - 1) + me.rank, length)


def _inputs_of_one_element(me: Member, length: int) -> Outcome:
    output = torch.zeros(me.world_size * length)
    dist.all_gather(list(output.chunk(me.world_size)), torch.tensor([float(me.rank)]).expand(length))
    return output, torch.arange(float(me.world_size)).repeat_interleave(length)


def _reduced_twice_in_flight(me: Member, length: int) -> Outcome:
    mine = numbers(me.rank, length)
    works = [dist.all_reduce(mine, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    return mine, me.world_size**2 * sum(_theirs(me, length))


def _gathered_while_in_flight(me: Member, length: int) -> Outcome:
    """An all-gather of a tensor, which is read at the call, behind its all-reduce; then the input is overwritten."""
    mine, output = numbers(me.rank, length), torch.zeros(me.world_size * length)
    works = [
        dist.all_reduce(mine, async_op=True),
        dist.all_gather_single(output, mine, async_op=True),
        dist.broadcast(mine, 0, async_op=True),
    ]
    for work in works:
        work.wait()
    return output, sum(_theirs(me, length)).repeat(me.world_size)


# What Gloo of torch 2.13 does: "right", "wrong" (always, or by timing). Whatever it does, the result must be right.
SHARING: dict[Callable[[Member, int], Outcome], str] = {
    _reduced_twice_in_a_list: "right",  # it flattens copies: reduced once
    _reduced_twice_in_the_manager: "right",  # the same call
    _reduced_in_part: "right",
    _all_gather_to_one_output: "right",  # copied in order: the last rank's stays
    _all_gather_to_the_input: "right",
    _all_gather_in_place: "right",
    _all_gather_from_the_wrong_part: "right",
    _all_gather_twice_to_one_output: "right",  # the last one's stays
    _reduce_scatter_in_place: "right",
    _reduce_scatter_to_the_wrong_part: "right",
    _reduce_scatter_to_anothers_input: "wrong",
    _reduce_scatter_twice_to_one_output: "right",
    _gather_to_one_output: "right",
    _gather_to_the_input: "right",
    _scatter_to_anothers_input: "wrong",  # sends what it has overwritten
    _all_to_all_in_place: "wrong",
    _all_to_all_of_a_list_in_place: "right",
    _all_to_all_to_one_output: "right",
    _inputs_of_one_element: "right",
    _reduced_twice_in_flight: "wrong",  # its threads run both at once
    _gathered_while_in_flight: "wrong",
}


def sharing(me: Member, case: Callable[[Member, int], Outcome]) -> None:
    for length in LENGTHS:
        for _ in range(3):
            same(*case(me, length), (case.__name__, length))


@pytest.mark.parametrize("case", SHARING, ids=lambda case: case.__name__.strip("_"))
def test_tensors_that_share_memory(case: Callable[[Member, int], Outcome]) -> None:
    if BACKEND == "gloo" and SHARING[case] == "wrong":
        pytest.skip("Gloo's result is wrong")
    run_ranks(sharing, 3, case)


def sharing_on_one_rank(me: Member) -> None:
    """Ranks need not agree in which of their tensors share memory."""
    pair = [numbers(me.rank, 5), numbers(me.rank, 5)]
    if me.rank == 0:
        pair[1] = pair[0]
    dist.all_reduce_coalesced(pair)
    for tensor in pair:
        same(tensor, sum(_theirs(me, 5)))


def test_tensors_that_share_memory_on_one_rank() -> None:
    run_ranks(sharing_on_one_rank, 3)


def _expanded(length: int = 4) -> torch.Tensor:
    return torch.ones(1).expand(length)


def _windows() -> torch.Tensor:
    return torch.ones(6).unfold(0, 3, 1)


def _refused(me: Member) -> dict[str, tuple[Callable[[], object], str]]:
    """Calls that no rank can make, with words of the error; the same as Gloo's where it has them."""
    n, last = me.world_size, me.world_size - 1
    pg = dist.group.WORLD._get_backend(torch.device("cpu"))
    at_root = me.rank == 0

    def ones(count: int = n, size: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.ones(size, dtype=dtype) for _ in range(count)]

    def odd(size: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [*ones(n - 1), torch.ones(size, dtype=dtype)]

    def broadcast(root: int, root_tensor: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, root_tensor
        pg.broadcast([torch.ones(2)], options)

    def reduce(root: int, root_tensor: int) -> None:
        options = dist.ReduceOptions()
        options.rootRank, options.rootTensor = root, root_tensor
        pg.reduce([torch.ones(2)], options)

    def gather(outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], root: int) -> None:
        options = dist.GatherOptions()
        options.rootRank = root
        pg.gather(outputs, inputs, options)

    def scatter(outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], root: int) -> None:
        options = dist.ScatterOptions()
        options.rootRank = root
        pg.scatter(outputs, inputs, options)

    def here(lists: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        return [lists] if at_root else []

    calls: dict[str, tuple[Callable[[], object], str]] = {
        "broadcast, root -1": (lambda: broadcast(-1, 0), "invalid root rank: -1"),
        "broadcast, root n": (lambda: broadcast(n, 0), f"invalid root rank: {n}"),
        "broadcast, root tensor 1": (lambda: broadcast(0, 1), "invalid root tensor: 1"),
        "broadcast, root tensor -1": (lambda: broadcast(0, -1), "invalid root tensor: -1"),
        "broadcast of no tensor": (lambda: pg.broadcast([]), "single-element|invalid root tensor"),
        "reduce, root n": (lambda: reduce(n, 0), f"invalid root rank: {n}"),
        "reduce, root tensor 1": (lambda: reduce(0, 1), "invalid root tensor: 1"),
        "all_reduce_coalesced of nothing": (lambda: pg.allreduce_coalesced([]), "non-empty tensor list"),
        "all_reduce_coalesced, two types": (
            lambda: pg.allreduce_coalesced([torch.ones(1), torch.ones(1).long()]),
            "same type",
        ),
        "all_gather, short list": (lambda: pg.allgather([ones(n - 1)], ones(1)), "invalid output tensor list"),
        "all_gather, long list": (lambda: pg.allgather([ones(n + 1)], ones(1)), "invalid output tensor list"),
        "all_gather, no input": (lambda: pg.allgather([ones()], []), "non-empty input|single-element"),
        "all_gather, type of the last": (lambda: pg.allgather([odd(2, torch.long)], ones(1)), "invalid tensor type"),
        "all_gather, own size": (lambda: pg.allgather([ones(n, 3)], ones(1)), "invalid tensor size"),
        "all_gather_coalesced, one list short": (
            lambda: pg.allgather_coalesced([*[ones(2) for _ in range(last)], ones(1)], ones(2)),
            "invalid output size",
        ),
        "all_gather_single, uneven": (
            lambda: dist.all_gather_single(torch.ones(n + 1), torch.ones(1)),
            "invalid tensor size|invalid output",
        ),
        "reduce_scatter_single, uneven": (lambda: dist.reduce_scatter_single(torch.ones(1), torch.ones(n + 1)), ""),
        "gather, root n": (lambda: gather([], ones(1), n), f"invalid root rank: {n}"),
        "gather, outputs elsewhere": (
            lambda: gather([] if at_root else [ones()], ones(1), 0),
            "single-element output list|single-element tensor list" if at_root else "requires empty output on non-root",
        ),
        "scatter, root n": (lambda: scatter(ones(1), [], n), f"invalid root rank: {n}"),
        "scatter, inputs elsewhere": (
            lambda: scatter(ones(1), [] if at_root else [ones()], 0),
            "single-element input list|single-element tensor list" if at_root else "requires empty input on non-root",
        ),
        "send, negative tag": (lambda: pg.send(ones(1), (me.rank + 1) % n, -1), "Tag must be nonnegative"),
    }
    if at_root:  # the others are not asked
        calls |= {
            "gather, short list": (lambda: gather(here(ones(n - 1)), ones(1), 0), "Incorrect output list size"),
            "gather, last size": (lambda: gather(here(odd(3)), ones(1), 0), f"invalid tensor size at index {last}"),
            "gather, last type": (lambda: gather(here(odd(2, torch.long)), ones(1), 0), "invalid tensor type at index"),
            "scatter, long list": (lambda: scatter(ones(1), here(ones(n + 1)), 0), "Incorrect input list size"),
            "scatter, last size": (lambda: scatter(ones(1), here(odd(3)), 0), f"invalid tensor size at index {last}"),
            "scatter, last type": (lambda: scatter(ones(1), here(odd(2, torch.long)), 0), "invalid tensor type"),
        }
    if BACKEND != "gloo":  # where it fails later, hangs, or writes to memory that is not the tensor's
        word = "share memory"
        calls |= {
            "all_to_all, last type": (lambda: pg.alltoall(odd(2, torch.long), ones()), "invalid tensor type"),
            "all_to_all, own size": (lambda: pg.alltoall(ones(n, 3), ones()), "invalid tensor size"),
            "all_reduce to an expanded tensor": (lambda: dist.all_reduce(_expanded()), word),
            "all_reduce to windows": (lambda: dist.all_reduce(_windows()), word),
            "all_reduce_coalesced": (lambda: dist.all_reduce_coalesced([torch.ones(1), _expanded()]), word),
            "reduce to an expanded tensor": (lambda: dist.reduce(_expanded(), 0), word),
            "broadcast to an expanded tensor": (lambda: dist.broadcast(_expanded(), 0), word),
            "all_gather to expanded tensors": (
                lambda: dist.all_gather([_expanded() for _ in range(n)], torch.ones(4)),
                word,
            ),
            "reduce_scatter to an expanded tensor": (
                lambda: dist.reduce_scatter(_expanded(), [torch.ones(4) for _ in range(n)]),
                word,
            ),
            "recv to an expanded tensor": (lambda: dist.recv(_expanded(), (me.rank + 1) % n), word),
        }
    return calls


def refusals(me: Member) -> None:
    for name, (call, words) in _refused(me).items():
        with pytest.raises(RuntimeError) as caught:
            call()
        assert re.search(words, str(caught.value)), (name, str(caught.value))
        assert type(caught.value) is RuntimeError, name  # as with Gloo, and no failure of the group
    total = numbers(me.rank, 3)
    dist.all_reduce(total)
    same(total, sum(_theirs(me, 3)), "after all refusals")


def test_wrong_arguments_are_refused_at_the_call() -> None:
    run_ranks(refusals, 3)


def new_time_limit(me: Member) -> str:
    """The other rank stays away after the group's limit of a minute was set to half a second."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), dist.group.WORLD)
    said = ""
    if me.rank == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(2))
        said = str(caught.value)
    me.meet("told")
    return said


def test_a_new_time_limit_holds_for_later_calls() -> None:
    assert re.search("[Tt]imed out", run_ranks(new_time_limit, 2, timeout_s=30)[0])
