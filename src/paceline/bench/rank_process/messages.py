"""What the controller orders and what a rank answers: one JSON object a line.

======== =========================== =========================================
order    answer                      meaning
======== =========================== =========================================
(none)   Hello                       a process is there
Setup    Ready                       it has joined its contender's group
Prepare  Prepared                    buffers exist and the result was checked
Block    Timed                       a block of iterations was run and timed
Stop     (none)                      it leaves
Ping     Pong                        at once, whatever else it is doing
any      Failed                      it could not; the reason is one sentence
======== =========================== =========================================
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Setup(msgspec.Struct, tag=True, frozen=True):
    """Join the group of ``backend`` with these variables set."""

    backend: str
    num_ranks: int
    environment: dict[str, str]


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Make the buffers of an operation: ``count`` elements where nccl-tests' size is measured."""

    operation: str
    count: int
    dtype: str


class Block(msgspec.Struct, tag=True, frozen=True):
    """Run the operation ``warmup`` times, then ``iterations`` times against the clock."""

    warmup: int
    iterations: int


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Leave the group and end."""


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Say how far you are."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A process is there. The rank is -1 if its launcher did not tell it."""

    rank: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The rank and size the library gave us, and its versions by name."""

    rank: int
    num_ranks: int
    versions: dict[str, str]


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """How many elements of this rank's result were wrong."""

    wrong: int


class Timed(msgspec.Struct, tag=True, frozen=True):
    """Duration of each iteration on this rank, and of the loop around them."""

    durations_ns: list[int]
    loop_ns: int


class Pong(msgspec.Struct, tag=True, frozen=True):
    """How many iterations of the block are done."""

    iterations: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """What went wrong."""

    reason: str


Order: TypeAlias = Setup | Prepare | Block | Stop | Ping
Answer: TypeAlias = Hello | Ready | Prepared | Timed | Pong | Failed
