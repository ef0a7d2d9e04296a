"""The numbers of workers: given once, kept through reconnections, taken over by a new process if it says so. Pure."""

from __future__ import annotations

from paceline.train.decentralized.generator.messages import MAX_WORKERS, Join


class WorkerNumbers:
    """Which process has which number. A number is never given to a second worker of a job."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._process_of: dict[int, int] = {}
        self._replaced: set[int] = set()  # processes whose number another process has

    @property
    def highest(self) -> int:
        """No number above this has been given."""
        return max(0, self._next - 1)

    def known(self, join: Join) -> int | None:
        """Return the number that a worker has already, or None if it needs a new one."""
        if join.worker is not None:
            return join.worker
        if join.previous is None:
            return None
        number = join.previous[1]
        return number if self._process_of.get(number, join.process) == join.process else None

    def refusal(self, join: Join) -> str | None:
        """Return why this process gets no number, or None if it does."""
        if join.process in self._replaced:
            return "another process has joined with this worker's number: give each process a number of its own"
        if self.known(join) is None and self._next >= MAX_WORKERS:
            return (
                f"all {MAX_WORKERS} worker numbers of this job are used up, and none is used twice: "
                "start the job anew from a checkpoint"
            )
        return None

    def take(self, join: Join) -> int:
        """Return the number of a process that has joined. A former process with it is never served again."""
        known = self.known(join)
        number = self._next if known is None else known
        if self._process_of.setdefault(number, join.process) != join.process:
            self._replaced.add(self._process_of[number])
            self._process_of[number] = join.process
        self._skip_taken()
        return number

    def leave_out(self, highest: int) -> None:
        """A former service has given numbers up to this one."""
        self._next = max(self._next, highest + 1)
        self._skip_taken()

    def _skip_taken(self) -> None:
        while self._next in self._process_of:
            self._next += 1
