"""What workers and the group generator say to each other.

A worker's conversation. Each line is a message or a wait for one; ``=>`` is said by the worker.

==========================  ============================================================================================
``=> Join``                 first, after Evicted, and on each new connection
``Joined``                  the worker's number. ``copy``: it needs the weights of others first, see Average. A second
                            Joined with ``copy=False`` says that nobody is left to copy from: it keeps its own
``=> Ready``                a worker that had ``copy=True`` has the weights. Before, it is in no group
``=> Request``              it has made local steps and wants a group. It may go on with steps meanwhile
``Solo``                    no group this time
``Start``                   average with these members now; then ``=> Finished``
``Commit`` or ``Abort``     apply the result, or drop it. An Abort may come while the worker still averages
``=> AskAverage``           it wants the mean of all workers: an Average comes that has it among ``receivers``
``Average``                 all ``members`` sum: ``contributors`` add their weights, others zeros. ``receivers`` use
                            sum / len(contributors). Then ``=> AverageFinished``. One is under way at a time, beside
                            groups. ``replaces`` names one that failed: the member gives that up first
``Commit`` or ``Abort``     all members have finished the Average, or it is given up. After a ``final`` one the worker
                            leaves only when it has heard this
``Enough``                  the job's total of steps is reached
``=> Drain``                it makes no more steps. It still serves groups that were made before, without requests
``Left``                    no group will name it. When all workers have left, a ``final`` Average comes
``=> Goodbye``              it goes. A connection that ends without is a crash
``=> Heartbeat``            answered by Alive. A worker that is silent for its lease is Evicted
``Evicted``                 it is no member any more: its groups are aborted, and it must copy weights
``Refused``                 it is not, or no longer, part of this job; the connection is closed
==========================  ============================================================================================

Messages are MessagePack arrays that begin with the name of their class. A number out of its range makes the message
invalid, so nothing that decodes is negative, infinite or not a number.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from paceline.errors import GeneratorError

MAX_WORKERS = 4096
"""Worker numbers are below this: a number is a slot of the mesh through which workers average."""

MAX_STEPS_AT_ONCE = 1_000_000
MAX_ADDRESS = 1024
MAX_SECONDS = 1e9
MAX_RATE = 1e15

Worker = Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORKERS)]
Serial = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Epoch = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
RandomNumber = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
Bytes = Annotated[float, msgspec.Meta(ge=0, le=MAX_RATE)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=MAX_RATE)]
HostName = Annotated[str, msgspec.Meta(max_length=255)]
Model = Annotated[str, msgspec.Meta(max_length=255)]
Address = Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS)]


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# From a worker


class Join(_Message, frozen=True):
    """Become a worker of the job.

    ``worker`` is its number, or None for one that nobody had. ``address`` tells others where its weights can be
    averaged; the generator only passes it on. ``previous`` is the instance and number of its last Joined. ``stale``: it
    stood still, so its weights are old. ``fresh``: it has never had the job's weights. ``process`` is a random number
    of the process. ``model`` tells models apart that cannot be averaged with each other. The rest is what it knows of a
    former service, so that this one can go on where that one ended.
    """

    worker: Worker | None
    host: HostName
    address: Address
    previous: tuple[RandomNumber, Worker] | None
    stale: bool
    fresh: bool
    rate_bytes_per_s: Rate | None
    process: RandomNumber
    epoch_seen: Epoch = 0
    serial_seen: Serial = 0
    steps_seen: Count = 0
    highest_worker_seen: Worker = 0
    model: Model = ""


class Request(_Message, frozen=True):
    """Ask for a group. ``average_s`` and ``average_bytes`` are of its last group average, of ``group_size``; 0 if none.

    ``step_s`` is the duration of its last step, or None. ``steps`` counts its local steps since the last request.
    """

    step_s: Seconds | None
    average_s: Seconds
    average_bytes: Bytes
    group_size: Count
    steps: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEPS_AT_ONCE)]


class Finished(_Message, frozen=True):
    """It has averaged with its group, or could not."""

    serial: Serial
    ok: bool


class Drain(_Message, frozen=True):
    """It makes no more steps."""


class Heartbeat(_Message, frozen=True):
    """It is alive."""


class Ready(_Message, frozen=True):
    """It has copied the weights."""


class AskAverage(_Message, frozen=True):
    """It wants the mean of all workers' weights."""


class AverageFinished(_Message, frozen=True):
    """Its part of an Average is done, or failed."""

    serial: Serial
    ok: bool


class Goodbye(_Message, frozen=True):
    """It leaves."""


# From the service


class Joined(_Message, frozen=True):
    """The worker is a member, and says something at least once in ``lease_s``."""

    worker: Worker
    epoch: Epoch
    instance: RandomNumber
    copy: bool
    lease_s: float


class Solo(_Message, frozen=True):
    """No group this time."""


class Left(_Message, frozen=True):
    """It has drained."""


class Evicted(_Message, frozen=True):
    """It is not a member any more. The client joins again by itself."""

    epoch: Epoch
    reason: str


class Start(_Message, frozen=True):
    """These workers average now. ``addresses`` are in the order of ``members``. No other Start has this serial."""

    serial: Serial
    epoch: Epoch
    members: tuple[Worker, ...]
    addresses: tuple[Address, ...]


class Commit(_Message, frozen=True):
    """All members have averaged: each applies the result."""

    serial: Serial


class Abort(_Message, frozen=True):
    """The group or Average is void. A member that is still at it gives up."""

    serial: Serial
    reason: str


class Average(_Message, frozen=True):
    """All members sum; receivers use sum / len(contributors). See above."""

    serial: Serial
    epoch: Epoch
    members: tuple[Worker, ...]
    addresses: tuple[Address, ...]
    contributors: tuple[Worker, ...]
    receivers: tuple[Worker, ...]
    final: bool
    replaces: Serial | None


class Enough(_Message, frozen=True):
    """The workers have made the job's total of steps."""

    steps: Count


class Alive(_Message, frozen=True):
    """The answer to Heartbeat, and what a worker tells a later service."""

    steps: Count
    highest_worker: Worker


class Refused(_Message, frozen=True):
    """It is no part of this job, for good. Trying again does not help."""

    reason: str


# From the client itself


class Detached(_Message, frozen=True):
    """No service is connected. Until the next Joined each request is answered with Solo."""

    reason: str


ToService = Join | Request | Finished | Drain | Heartbeat | Ready | AskAverage | AverageFinished | Goodbye
ToWorker = Joined | Solo | Left | Evicted | Start | Commit | Abort | Average | Enough | Alive | Refused

_encoder = msgspec.msgpack.Encoder()
_to_service = msgspec.msgpack.Decoder(ToService)
_to_worker = msgspec.msgpack.Decoder(ToWorker)


def encode(message: ToService | ToWorker) -> bytes:
    """Return a message as MessagePack."""
    return _encoder.encode(message)


def decode_from_worker(body: bytes) -> ToService:
    """Read a worker's message."""
    try:
        message: ToService = _to_service.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise GeneratorError(f"sent an invalid message: {error}") from None
    return message


def decode_from_service(body: bytes) -> ToWorker:
    """Read a message of the service."""
    try:
        message: ToWorker = _to_worker.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise GeneratorError(f"sent an invalid message: {error}") from None
    return message
