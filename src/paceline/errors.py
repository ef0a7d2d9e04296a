"""Every exception Paceline raises on purpose.

PacelineError
 ├─ UsageError            an argument makes no sense; the message says what to pass instead
 │   └─ UnsupportedError  the algorithm does not serve this collective or number of ranks
 ├─ FileFormatError       a schedule or cluster file is malformed, hostile or of another version
 ├─ LabError              the lab cannot be set up, or cannot run a command; the message says what it needs
 ├─ ContenderError        a contender of a benchmark cannot be had, died or hangs
 ├─ StepError             ranks of a DataParallel do different things in one step; the message names them
 ├─ GeneratorError        the group generator cannot be reached, or what it or a worker sent breaks the protocol
 │   └─ RefusedError      the other side is no part of this job: a wrong secret, another version, a former process
 ├─ MessageError          a message of a collective over another backend failed; the message names the peer
 └─ ScheduleError         a schedule breaks a rule of the schedule language
     └─ ProofError        a well-formed schedule does not do what its collective promises
"""

from __future__ import annotations


class PacelineError(Exception):
    """The root: catch it to catch everything of Paceline's own."""


class UsageError(PacelineError, ValueError):
    """An argument makes no sense; the message says what to pass instead."""


class UnsupportedError(UsageError):
    """The algorithm does not serve this collective or this number of ranks."""


class FileFormatError(PacelineError, ValueError):
    """A schedule or cluster file is malformed, hostile or of another version."""


class LabError(PacelineError):
    """The lab cannot be set up, or cannot run a command; the message says what it needs."""


class ContenderError(PacelineError, RuntimeError):
    """A contender of a benchmark cannot be had, died, hangs or answers nonsense; the message names it and its rank."""


class StepError(PacelineError, RuntimeError):
    """Ranks of a DataParallel do different things in one step; the message names them, and says how to go on."""


class GeneratorError(PacelineError, RuntimeError):
    """The group generator cannot listen or be reached, or a peer broke its protocol; the message names the peer."""


class RefusedError(GeneratorError):
    """The other side will never serve this process: the secret or the version differs. Trying again does not help."""


class MessageError(PacelineError, RuntimeError):
    """A message of a collective that runs over another backend failed; the message names the peer and the reason."""


class ScheduleError(PacelineError, ValueError):
    """A schedule breaks a rule of the schedule language (ranges, order of steps, sizes of columns)."""


class ProofError(ScheduleError):
    """A well-formed schedule does not implement its collective.

    ``rule`` is one of the rules of :mod:`paceline.ir.verify`. ``transfer`` is the index of the transfer to
    blame, or None where a transfer is missing; ``ranks`` and ``chunk`` say where it shows.
    """

    def __init__(self, message: str, *, rule: str, transfer: int | None, ranks: tuple[int, ...], chunk: int) -> None:
        super().__init__(message)
        self.rule = rule
        self.transfer = transfer
        self.ranks = ranks
        self.chunk = chunk
