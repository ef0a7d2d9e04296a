"""What to say of a schedule that was refused: the transfer, the ranks, the chunk and the rule broken.

The proof itself only notices that something is wrong, and where; these functions find out why, slowly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.errors import ProofError
from paceline.ir.schedule import Schedule
from paceline.ir.transfers import Moves, Transfers


def never_received(schedule: Schedule, rank: int, chunk: int) -> ProofError:
    """A rank needs a chunk and no transfer brings it any."""
    return ProofError(
        f"{_title(schedule)}: no transfer brings chunk {chunk} to rank {rank}, which needs it [never-received]",
        rule="never-received",
        transfer=None,
        ranks=(rank,),
        chunk=chunk,
    )


def move(schedule: Schedule, moves: Moves, row: int, rule: str) -> ProofError:
    """One move breaks a rule by itself: sent-too-early or nothing-to-add-to."""
    index, chunk = int(moves.transfer[row]), int(moves.chunk[row])
    source, target = int(moves.source[row]), int(moves.destination[row])
    why = {
        "sent-too-early": f"rank {source} holds nothing of chunk {chunk} at that step",
        "nothing-to-add-to": f"rank {target} holds nothing of chunk {chunk} to add it to (a copy is meant?)",
    }[rule]
    return ProofError(
        f"{_title(schedule)}: {_name(schedule.transfers, index)}: {why} [{rule}]",
        rule=rule,
        transfer=index,
        ranks=(source, target),
        chunk=chunk,
    )


def _title(schedule: Schedule) -> str:
    return f"{schedule.algorithm} schedule, {schedule.collective}"


def _name(table: Transfers, index: int) -> str:
    return f"transfer {index} (step {table.step[index]}: {table[index]})"


def result(schedule: Schedule, rank: int, chunk: int) -> ProofError:
    """A result is wrong: find one contribution that is wrong in it, follow that one, and name the transfer at fault."""
    moves = schedule.transfers.moves(chunk, chunk + 1)
    contributor = schedule.collective.contributor(np.array([chunk], np.int32), schedule.num_chunks)
    counts = _times_counted(schedule.num_ranks, moves, rank)
    contributors = np.arange(schedule.num_ranks) if contributor is None else contributor
    twice = [] if schedule.collective.idempotent else contributors[counts[contributors] > 1].tolist()
    if twice:
        whose, fault = twice, _follow(schedule.num_ranks, moves, rank, twice[0])
        what = f"holding the part of {_ranks(whose)} more than once"
        rule, guilty, verb = "counted-twice", fault.doubled, "adds it again"
    else:
        whose = contributors[counts[contributors] == 0].tolist()
        fault = _follow(schedule.num_ranks, moves, rank, whose[0])
        what = f"lacking the part of {_ranks(whose)}"
        if fault.destroyed is not None:
            rule, guilty, verb = "overwritten", fault.destroyed, "destroys it"
        else:
            rule, guilty, verb = "missing", fault.last_into, "is the last to reach it and does not bring it"
    index, source, target = (int(column[guilty]) for column in (moves.transfer, moves.source, moves.destination))
    return ProofError(
        f"{_title(schedule)}: rank {rank} ends with chunk {chunk} {what}; "
        f"{_name(schedule.transfers, index)} {verb} [{rule}]",
        rule=rule,
        transfer=index,
        ranks=(rank, source, target),
        chunk=chunk,
    )


def _times_counted(num_ranks: int, moves: Moves, rank: int) -> npt.NDArray[np.int64]:
    """How often (0, 1, or 2 for more) what each rank held at the start is counted in what one rank holds at the end.

    Walks the moves of a chunk backwards: ``weight[r]`` is how often the value of rank r, at that moment, counts.
    """
    weight = [0] * num_ranks
    weight[rank] = 1
    read: dict[int, int] = {}  # what the current step reads counts for the state before it
    current_step = -1
    for move in reversed(range(len(moves))):
        if moves.step[move] != current_step:
            current_step = int(moves.step[move])
            for source, times in read.items():
                weight[source] = min(2, weight[source] + times)
            read = {}
        source, target = int(moves.source[move]), int(moves.destination[move])
        read[source] = min(2, read.get(source, 0) + weight[target])
        if not moves.reduce[move]:
            weight[target] = 0
    for source, times in read.items():
        weight[source] = min(2, weight[source] + times)
    return np.array(weight, np.int64)


@dataclass
class _Fault:
    """Moves to blame: what made a count of two, what destroyed the contribution, what reached the rank last."""

    doubled: int | None = None
    destroyed: int | None = None
    last_into: int | None = None


def _follow(num_ranks: int, moves: Moves, rank: int, contribution: int) -> _Fault:
    """Follow one contribution through the moves of a chunk."""
    count = [0] * num_ranks
    count[contribution] = 1
    doubled_by: list[int | None] = [None] * num_ranks  # for the value of each rank
    fault = _Fault()
    lost_by_rank: int | None = None
    before: dict[int, tuple[int, int | None]] = {}  # what ranks written in this step held before it
    current_step = -1
    for move in range(len(moves)):
        if moves.step[move] != current_step:
            current_step, before = int(moves.step[move]), {}
        source, target = int(moves.source[move]), int(moves.destination[move])
        sent, sent_doubled_by = before.get(source, (count[source], doubled_by[source]))
        before.setdefault(target, (count[target], doubled_by[target]))
        if moves.reduce[move]:
            if doubled_by[target] is None:
                doubled_by[target] = sent_doubled_by
            if doubled_by[target] is None and count[target] > 0 and sent > 0:
                doubled_by[target] = move
            count[target] = min(2, count[target] + sent)
        else:
            if count[target] > 0 and sent == 0:
                fault.destroyed = move
                lost_by_rank = move if target == rank else lost_by_rank
            count[target], doubled_by[target] = sent, sent_doubled_by
        if target == rank:
            fault.last_into = move
    fault.doubled = doubled_by[rank]
    if lost_by_rank is not None:
        fault.destroyed = lost_by_rank
    elif any(count):
        fault.destroyed = None  # somebody still has it: it was not destroyed, but never brought here
    return fault


def _ranks(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"
