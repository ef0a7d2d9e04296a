"""What to say of a schedule that was refused: the transfer, the ranks, the chunk and the rule broken.

The proof itself only notices that something is wrong, and where; these functions find out why, slowly.
"""

from __future__ import annotations

import numpy as np

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
    """A result is wrong: replay its chunk slowly, counting contributions, and name the transfer at fault."""
    table, ranks = schedule.transfers, schedule.num_ranks
    chunks = np.array([chunk], np.int32)
    contributor = schedule.collective.contributor(chunks, schedule.num_chunks)
    contributors = range(ranks) if contributor is None else [int(contributor[0])]
    moves = table.moves(chunk, chunk + 1)
    columns = (moves.step, moves.source, moves.destination, moves.reduce, moves.transfer)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))

    value: list[dict[int, int]] = [{r: 1} if r in contributors else {} for r in range(ranks)]
    doubled: dict[int, tuple[int, int, int]] = {}
    lost: dict[int, tuple[int, int, int]] = {}
    into_rank: tuple[int, int, int] | None = None
    before: list[dict[int, int]] = []
    previous_step = -1
    for step, source, target, reduce, index in rows:
        if step != previous_step:
            before, previous_step = [dict(held) for held in value], step
        sent, here = before[source], value[target]
        if reduce:
            for r, times in sent.items():
                here[r] = here.get(r, 0) + times
                if here[r] > 1:
                    doubled.setdefault(r, (index, source, target))
        else:
            for r in here:
                if r not in sent:
                    lost[r] = (index, source, target)
            value[target] = dict(sent)
        if target == rank:
            into_rank = (index, source, target)

    twice = [r for r, times in value[rank].items() if times > 1]
    missing = [r for r in contributors if r not in value[rank]]
    if twice and not schedule.collective.idempotent:
        rule, whose, (index, source, target) = "counted-twice", twice, doubled[twice[0]]
        what = f"rank {rank} ends with chunk {chunk} holding the part of {_ranks(whose)} more than once"
    else:
        nowhere = [r for r in missing if not any(r in held for held in value)]
        rule, whose = ("overwritten", nowhere) if nowhere else ("missing", missing)
        at_fault = lost.get(whose[0]) if nowhere else into_rank
        index, source, target = at_fault or into_rank or (rows[-1][4], rows[-1][1], rows[-1][2])
        what = f"rank {rank} ends with chunk {chunk} lacking the part of {_ranks(whose)}"
    verb = {
        "counted-twice": "adds it again",
        "overwritten": "destroys it",
        "missing": "is the last to reach it and does not bring it",
    }[rule]
    return ProofError(
        f"{_title(schedule)}: {what}; {_name(table, index)} {verb} [{rule}]",
        rule=rule,
        transfer=index,
        ranks=(rank, source, target),
        chunk=chunk,
    )


def _ranks(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"
