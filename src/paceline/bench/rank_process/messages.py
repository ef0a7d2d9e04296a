"""What the controller orders and what a rank answers: one JSON object a line.

======== =========================== =========================================
order    answer                      meaning
======== =========================== =========================================
(none)   Hello                       a process is there
Setup    Ready                       it has joined its contender's group
Prepare  Prepared                    buffers exist and the result was checked
Block    Timed                       a block of iterations was run and timed
Perform  Performed                   a job of the rank's program was done
Stop     (none)                      it leaves
Ping     Pong                        at once, whatever else it is doing
any      Failed                      it could not; the reason is one sentence
======== =========================== =========================================
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

MEMORIES = ("torch", "huge")
"""Memory of torch's tensors: as torch allocates it, or in huge pages, which numpy asks for."""


class Setup(msgspec.Struct, tag=True, frozen=True):
    """Join the group of ``backend`` with these variables set; ``messages``: run Paceline over its messages."""

    backend: str
    num_ranks: int
    environment: dict[str, str]
    messages: bool = False


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Make the buffers of an operation: ``count`` elements where nccl-tests' size is measured.

    ``late_s`` tells by rank who will be late, to those who want to know before. ``between_s`` is what a replayed layer
    lasts less, because that much passes between layers anyway. ``first_count`` is the size of a replayed DDP's first
    bucket, where that is smaller than the others. ``memory`` is where torch's tensors lie (``MEMORIES``). ``beside`` is
    another operation, on a group of its own, which runs at the same time.
    """

    operation: str
    count: int
    dtype: str
    late_s: dict[int, float] = {}
    between_s: float = 0.0
    first_count: int = 0
    memory: str = "torch"
    beside: str = ""


class Pause(msgspec.Struct, frozen=True):
    """What all ranks do before each call: ``kind`` is ``sleep`` or ``compute``."""

    kind: str
    seconds: float


class Block(msgspec.Struct, tag=True, frozen=True):
    """Run the operation ``warmup`` times, then ``iterations`` times against the clock.

    With ``late_ns`` or ``pause``, all ranks meet at a barrier before each call. Then all pause, and each rank sleeps
    for its nanoseconds of ``late_ns``.
    """

    warmup: int
    iterations: int
    late_ns: dict[int, int] | None = None
    pause: Pause | None = None


class Perform(msgspec.Struct, tag=True, frozen=True):
    """Do a job that only the rank's program understands."""

    job: str


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
    """Duration of each iteration on this rank, and of the loop around them.

    ``begins_ns`` is when each began, on the monotonic clock that all processes of this machine share.
    ``processor_ns`` is the processor time of all threads of the rank during the loop.
    """

    durations_ns: list[int]
    loop_ns: int
    begins_ns: list[int] = []
    processor_ns: int = 0


class Performed(msgspec.Struct, tag=True, frozen=True):
    """What came out of the job."""

    result: str


class Pong(msgspec.Struct, tag=True, frozen=True):
    """How many iterations of the block are done."""

    iterations: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """What went wrong."""

    reason: str


Order: TypeAlias = Setup | Prepare | Block | Perform | Stop | Ping
Answer: TypeAlias = Hello | Ready | Prepared | Timed | Performed | Pong | Failed
