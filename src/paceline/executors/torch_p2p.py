"""Runs proven schedules over the point-to-point messages of any c10d backend: Gloo, MPI, NCCL.

Two ways, by what the backend's messages are like:

- **flow** (processor memory): a send is posted as soon as what it reads is there, whatever its step; receives are
  posted a step ahead. A message is waited for only when something needs it, so a late rank holds up those who need its
  data and nobody else.
- **batches** (everything else): the messages of a step are one batch, as NCCL wants it, whose kernels block a stream
  until the peer's batch runs. Waiting orders streams there and does not hold the processor up.

**Why neither can deadlock.** What a rank waits for before it posts the messages of a step belongs to earlier steps. So
the messages of the first unfinished step are all posted, on all ranks, and finish. Messages of two ranks are posted in
the same order by both.

Buffers are where the tensor is. A message is received where it belongs if it is a copy of neighbouring chunks, and that
place is not needed any more when the receive is posted; otherwise into scratch, until it is added or copied.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paceline.errors import MessageError, UsageError
from paceline.executors.messages import Message, MessageProgram, Run


class Work(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Return when it is done; on a stream, when whatever is queued next will find it done."""


class Wire(Protocol):
    """How this rank's messages travel. Messages of two ranks in one direction arrive in the order they are posted."""

    def send(self, data: torch.Tensor, peer: int) -> Work:
        """Start to send bytes."""

    def receive(self, data: torch.Tensor, peer: int) -> Work:
        """Start to receive bytes."""

    def batch(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> Work:
        """Start all of these at once; done when all are done."""


class GroupWire:
    """Messages of a process group, under a tag of their own where the backend has tags."""

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self._group, self._tag = group, tag

    def send(self, data: torch.Tensor, peer: int) -> Work:
        """Start to send to a rank of the group."""
        return _there(dist.isend(data, group=self._group, group_dst=peer, tag=self._tag))

    def receive(self, data: torch.Tensor, peer: int) -> Work:
        """Start to receive from a rank of the group."""
        return _there(dist.irecv(data, group=self._group, group_src=peer, tag=self._tag))

    def batch(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> Work:
        """Start a batch of the backend's."""
        posts = ((dist.isend, sends), (dist.irecv, receives))
        operations = [
            dist.P2POp(post, data, group=self._group, group_peer=peer, tag=self._tag)
            for post, messages in posts
            for data, peer in messages
        ]
        return _All(dist.batch_isend_irecv(operations))


class _All:
    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _there(work: Work | None) -> Work:
    if work is None:
        raise UsageError("this process is not in the process group: pass a group it belongs to")
    return work


_STEPS_AHEAD = 1
"""A rank posts the receives of so many steps after the one it is at: enough that a sender need not wait for it, and
few enough that the messages of a step have the links to themselves."""

Reduction = Callable[[torch.Tensor, torch.Tensor], object]

_REDUCTIONS: dict[str, Reduction] = {
    "SUM": lambda place, incoming: place.add_(incoming),
    "AVG": lambda place, incoming: place.add_(incoming),
    "PRODUCT": lambda place, incoming: place.mul_(incoming),
    "MIN": lambda place, incoming: torch.minimum(place, incoming, out=place),
    "MAX": lambda place, incoming: torch.maximum(place, incoming, out=place),
    "BAND": lambda place, incoming: place.bitwise_and_(incoming),
    "BOR": lambda place, incoming: place.bitwise_or_(incoming),
    "BXOR": lambda place, incoming: place.bitwise_xor_(incoming),
}
"""What a place becomes when something comes in; an average is a sum until its end."""


def op_name(op: Any) -> str:
    """``SUM`` of ``ReduceOp.SUM``; a sentence for what cannot be run."""
    for name in _REDUCTIONS:
        if op == getattr(dist.ReduceOp, name):
            return name
    raise UsageError(f"{op} cannot be run over messages: take one of {', '.join(_REDUCTIONS)}")


def run(program: MessageProgram, buffer: torch.Tensor, op: str, wire: Wire, *, batches: bool | None = None) -> None:
    """Run this rank's messages on a flat, contiguous buffer that holds all chunks of the collective.

    Chunk c of C is elements [c N // C, (c + 1) N // C) of N. Chunks that are not this rank's output hold anything
    afterwards. By default, ``batches`` are for buffers that are not in the processor's memory.
    """
    player = _Player(program, buffer, _REDUCTIONS[op], wire)
    if buffer.device.type != "cpu" if batches is None else batches:
        player.play_batches()
    else:
        player.play_flow()


def reduce_in_place(program: MessageProgram, tensor: torch.Tensor, op: str, exact: bool, wires: Sequence[Wire]) -> None:
    """All-reduce a tensor of any strides, in as many parts side by side as there are wires.

    ``exact`` says that the tensor's numbers are added without rounding.
    """
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    if op == "AVG" and not exact:
        flat.div_(program.num_ranks)  # before, as DDP does, so that small types do not overflow
    run_parts(program, flat, op, wires)
    if op == "AVG" and exact:
        flat.div_(program.num_ranks, rounding_mode="trunc")
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def run_parts(program: MessageProgram, buffer: torch.Tensor, op: str, wires: Sequence[Wire]) -> None:
    """Run the program on as many equal parts of the buffer as there are wires, side by side, in a thread each."""
    size, errors = buffer.numel(), []

    def play(part: int) -> None:
        try:
            with torch.no_grad():
                run(program, buffer[part * size // len(wires) : (part + 1) * size // len(wires)], op, wires[part])
        except Exception as error:
            errors.append(error)

    threads = [Thread(target=play, args=(part,), daemon=True) for part in range(1, len(wires))]
    for thread in threads:
        thread.start()
    play(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class _Player:
    """One run: works under way, scratch, and what is in memory already."""

    def __init__(self, program: MessageProgram, buffer: torch.Tensor, reduce: Reduction, wire: Wire) -> None:
        self.program, self.messages, self.wire, self.reduce = program, program.messages, wire, reduce
        self.buffer = buffer
        self.works: dict[int, Work] = {}  # posted, and not known to be done
        self.landing: dict[int, torch.Tensor] = {}  # where receives under way go
        self.in_place: set[int] = set()  # receives under way that go where they belong
        self.applied: set[int] = set()  # receives that are in memory
        self.done: set[int] = set()  # sends that are done
        self.unsent: dict[int, deque[int]] = defaultdict(deque)  # by peer
        self.scratch: dict[int, list[torch.Tensor]] = defaultdict(list)

    def play_flow(self) -> None:
        """Post whatever can be posted; wait for what is needed next."""
        steps = self.program.steps
        for sends, _ in steps:
            for index in sends:
                self.unsent[self.messages[index].peer].append(index)
        posted = 0
        for number, (sends, _) in enumerate(steps):
            while posted < min(number + 1 + _STEPS_AHEAD, len(steps)):
                for index in steps[posted][1]:
                    self._receive(index)
                posted += 1
            self._send_ready()
            for index in sends:
                for before in self.messages[index].writes_before:
                    self._apply(before)
        for _, receives in steps:
            for index in receives:
                self._apply(index)
        for index in list(self.works):
            self._await(index)

    def play_batches(self) -> None:
        """One batch a step, which is done before the next is posted."""
        for sends, receives in self.program.steps:
            outgoing = [(self._outgoing(self.messages[index]), self.messages[index].peer) for index in sends]
            incoming = [
                (self._landing(index, self.messages[index].direct), self.messages[index].peer) for index in receives
            ]
            outgoing = [(_bytes(data), peer) for data, peer in outgoing if data.numel()]
            incoming = [(_bytes(data), peer) for data, peer in incoming if data.numel()]
            if outgoing or incoming:
                peers = sorted({peer for _, peer in (*outgoing, *incoming)})
                self._guard(f"exchanging with ranks {peers}", lambda: self.wire.batch(outgoing, incoming).wait())  # noqa: B023
            for index in receives:
                self._take(index)

    def _send_ready(self) -> None:
        """Post every send that reads only what is in memory, to each peer in order."""
        for peer, queue in self.unsent.items():
            while queue and self.applied.issuperset(self.messages[queue[0]].writes_before):
                index = queue.popleft()
                data = self._outgoing(self.messages[index])
                if data.numel():
                    send = partial(self.wire.send, _bytes(data), peer)
                    self.works[index] = self._guard(f"sending to rank {peer}", send)
                else:
                    self.done.add(index)

    def _receive(self, index: int) -> None:
        """Post a receive: where it belongs if nobody needs that place any more, otherwise into scratch."""
        message = self.messages[index]
        free = self.applied.issuperset(message.writes_before) and self.done.issuperset(message.reads_before)
        data = self._landing(index, message.direct and free)
        if data.numel():
            receive = partial(self.wire.receive, _bytes(data), message.peer)
            self.works[index] = self._guard(f"receiving from rank {message.peer}", receive)

    def _apply(self, index: int) -> None:
        """Have a receive, and all that must be in memory before it, in memory; send what that allows."""
        wanted = [index]
        while wanted:
            message = self.messages[wanted[-1]]
            before = [other for other in message.writes_before if other not in self.applied]
            if wanted[-1] in self.applied:
                wanted.pop()
            elif before:
                wanted += before
            else:
                self._await(wanted[-1])
                for sent in message.reads_before:
                    self._await(sent)
                self._take(wanted.pop())
                self._send_ready()

    def _await(self, index: int) -> None:
        work, message = self.works.pop(index, None), self.messages[index]
        if work is not None:
            doing = "receiving from" if message.receives else "sending to"
            self._guard(f"{doing} rank {message.peer}", work.wait)
        if not message.receives:
            self.done.add(index)

    def _take(self, index: int) -> None:
        """Copy or add what has arrived in scratch to where it belongs."""
        message, data = self.messages[index], self.landing.pop(index)
        if index not in self.in_place:
            places = [self._place(run) for run in message.runs]
            parts = torch.split(data, [place.numel() for place in places])
            for one, place, part in zip(message.runs, places, parts, strict=True):
                if one.reduce:
                    self.reduce(place, part)
                else:
                    place.copy_(part)
            self.scratch[data.numel()].append(data)
        self.applied.add(index)

    def _landing(self, index: int, in_place: bool) -> torch.Tensor:
        message = self.messages[index]
        if in_place:
            self.in_place.add(index)
            data = self._place(message.runs[0])
        else:
            size = sum(self._place(run).numel() for run in message.runs)
            data = self.scratch[size].pop() if self.scratch[size] else self.buffer.new_empty(size)
        self.landing[index] = data
        return data

    def _outgoing(self, message: Message) -> torch.Tensor:
        parts = [self._place(run) for run in message.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _place(self, run: Run) -> torch.Tensor:
        size, chunks = self.buffer.numel(), self.program.num_chunks
        return self.buffer[run.first * size // chunks : run.last * size // chunks]

    def _guard(self, doing: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise MessageError(
                f"{self.program.algorithm} of {self.program.num_ranks} ranks: {doing} of the group failed: {reason}; "
                "look for the first rank that failed, and start the group anew"
            ) from error


def _bytes(data: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, which every backend can send, whatever the dtype."""
    return data.view(torch.uint8)
