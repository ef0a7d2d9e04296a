"""Schedules as messages: every algorithm, any size, by rendezvous; and what the programs promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from executor import inputs_of, outputs_of
from letters import Mailbox, MailWire, run_threads
from paceline.algorithms import ALGORITHMS, Algorithm, prove
from paceline.errors import MessageError, UsageError
from paceline.executors.messages import message_program
from paceline.executors.torch_p2p import op_name, run
from paceline.ir.collective import Collective, Kind
from paceline.ir.schedule import Schedule
from paceline.ir.transfers import Transfer
from paceline.ir.verify import Proof, verify
from strategies import requests


def _play(proof: Proof, buffers: list[torch.Tensor], op: str = "SUM", *, batches: bool) -> int:
    mailbox = Mailbox()

    def rank(r: int) -> None:
        run(message_program(proof, r), buffers[r], op, MailWire(mailbox, r), batches=batches)

    run_threads(rank, proof.schedule.num_ranks)
    assert not any(mailbox.sent.values())
    assert not any(mailbox.wanted.values())
    return mailbox.num_messages


@examples(60)
@given(requests(most_ranks=9), st.integers(0, 300), st.booleans(), st.randoms(use_true_random=False))
def test_every_algorithm_gives_the_right_sums(
    request_: tuple[Algorithm, Collective, dict[str, Any]], size: int, batches: bool, rng: Any
) -> None:
    entry, collective, parameters = request_
    proof = prove(entry.name, collective, **parameters)
    kind, n, chunks = collective.kind, collective.num_ranks, proof.schedule.num_chunks
    if kind is Kind.BARRIER:
        return  # moves no bytes
    inputs = [torch.tensor([rng.randrange(1000) for _ in range(size)], dtype=torch.int64) for _ in range(n)]
    buffers = [one.clone() for one in inputs]
    _play(proof, buffers, batches=batches)
    per_rank = chunks // (n * n if kind is Kind.ALL_TO_ALL else n)
    for chunk in range(chunks):
        here = slice(chunk * size // chunks, (chunk + 1) * size // chunks)
        wanted = sum(inputs[rank][here] for rank in inputs_of(kind, n, collective.root, chunk, per_rank))
        for rank in outputs_of(kind, n, collective.root, chunk, per_rank):
            assert torch.equal(buffers[rank][here], wanted), f"rank {rank}, chunk {chunk}"


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("name", [a.name for a in ALGORITHMS.values() if Kind.ALL_REDUCE in a.kinds])
def test_a_message_is_sent_for_each_that_the_proof_counts(name: str, batches: bool) -> None:
    collective = Collective(Kind.ALL_REDUCE, 6)
    parameters = {"arrivals": (0, 0, 0, 0, 9, 9)} if "arrivals" in ALGORITHMS[name].parameters else {}
    if "hosts" in ALGORITHMS[name].parameters:
        parameters = {"hosts": (0, 0, 0, 1, 1, 1)}
    if ALGORITHMS[name].multicast:
        pytest.skip("each destination of a multicast is a message of its own here")
    proof = prove(name, collective, **parameters)
    buffers = [torch.full((600,), float(rank)) for rank in range(6)]
    assert _play(proof, buffers, batches=batches) == proof.num_messages
    assert all(torch.equal(buffer, torch.full((600,), 15.0)) for buffer in buffers)


OPS = {"SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
BITS = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


@pytest.mark.parametrize("op", [*OPS, *BITS])
def test_every_reduction(op: str) -> None:
    proof = prove("stragglar", Collective(Kind.ALL_REDUCE, 5), late=2)
    inputs = [torch.arange(20) * (rank + 3) % 7 for rank in range(5)]
    wanted = inputs[0]
    for one in inputs[1:]:
        wanted = {**OPS, **BITS}[op](wanted, one)
    buffers = [one.clone() for one in inputs]
    _play(proof, buffers, op, batches=False)
    assert all(torch.equal(buffer, wanted) for buffer in buffers)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int8, torch.bool]
)
def test_every_dtype_that_can_be_added(dtype: torch.dtype) -> None:
    proof = prove("ring", Collective(Kind.ALL_REDUCE, 3))
    inputs = [(torch.arange(10) % 3 + rank).to(dtype) for rank in range(3)]
    buffers = [one.clone() for one in inputs]
    _play(proof, buffers, batches=False)
    assert all(torch.equal(buffer, inputs[0] + inputs[1] + inputs[2]) for buffer in buffers)


@pytest.mark.parametrize("late", [0, 3, 6])
def test_nobody_waits_for_a_late_rank_before_the_exchange(late: int) -> None:
    proof = prove("stragglar", Collective(Kind.ALL_REDUCE, 7), late=late, pieces=2)
    table = proof.schedule.transfers
    to_late = [row.step for row in table if late in (row.source, *row.destinations)]
    before = [row for row in table if row.step < min(to_late)]
    reduced = sum(row.count for row in before if row.reduce)
    assert reduced == proof.schedule.num_chunks * (7 - 2)  # the others' whole reduce-scatter
    program = message_program(proof, late)
    assert program.messages[0].step == min(to_late)


def test_what_a_step_reads_and_writes_is_set_aside() -> None:
    swap = [Transfer(0, 0, (1,), 0, 1, True), Transfer(0, 1, (0,), 0, 1, True)]
    proof = verify(Schedule.from_rows(Collective(Kind.ALL_REDUCE, 2), 1, swap))
    send, receive = message_program(proof, 0).messages
    assert (send.receives, receive.receives, receive.direct, receive.reads_before) == (False, True, False, (0,))
    gathering = message_program(prove("ring", Collective(Kind.ALL_GATHER, 4)), 1)
    assert all(message.direct for message in gathering.messages if message.receives)


def test_a_failed_message_names_the_peer() -> None:
    class Broken(MailWire):
        def receive(self, *_: Any) -> Any:
            raise RuntimeError("connection reset\nmore words")

    program = message_program(prove("ring", Collective(Kind.ALL_REDUCE, 3)), 0)
    with pytest.raises(
        MessageError, match="ring of 3 ranks: receiving from rank 2 of the group failed: connection reset;"
    ):
        run(program, torch.zeros(9), "SUM", Broken(Mailbox(), 0))


def test_operations_by_name() -> None:
    assert op_name(dist.ReduceOp.SUM) == op_name(dist.ReduceOp(dist.ReduceOp.SUM)) == "SUM"
    with pytest.raises(UsageError, match="cannot be run over messages: take one of SUM, AVG"):
        op_name(dist._make_nccl_premul_sum(2.0))
