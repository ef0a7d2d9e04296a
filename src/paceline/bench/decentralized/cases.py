"""What can be asked for: schemes by name, slow workers and links, and the job that a rank gets."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec

from paceline.errors import UsageError
from paceline.train.decentralized.schemes import SCHEMES

ALONE = "alone"
"""Every worker trains by itself: what the others' batches are worth."""

DDP = {"ddp-gloo": "gloo", "ddp-paceline": "paceline"}
"""torch's DistributedDataParallel by backend, each with the best bucket size of a short probe."""

ALIASES = {
    "ripples-blocking": "ripples:overlap=false",
    "ripples-division": "ripples:formation=division",
    "ripples-first-come": "ripples:formation=first_come",
    "ripples-inter-intra": "ripples:formation=inter_intra",
    "ripples-link-aware": "ripples:link_aware=true",
    "ripples-plain": "ripples:link_aware=false",
}
"""Short names of schemes with options."""

USUAL_SCHEMES = ("ddp-gloo", "ddp-paceline", "ps", "adpsgd", "ripples", "ripples-blocking")

OWN_PACE = frozenset({"adpsgd", "eager", "ps-async", "ripples"})
"""Schemes whose workers make steps at their own pace and end whenever told. The others end after equally many steps."""

INPUTS, CLASSES = 64, 10
BLOCKS = 6
"""The shape of the model (task.py), whose width gives its size."""

_SLOW = re.compile(r"(half|\d{1,3}(?:\+\d{1,3})*):(\d+(?:\.\d+)?)x")
_WORDS = {"true": True, "false": False}

Value = bool | int | float | str


@dataclass(frozen=True)
class Contestant:
    """A scheme with its options, under the name it was asked for."""

    name: str
    scheme: str
    options: dict[str, Value] = field(default_factory=dict, hash=False)
    learning_rate: float | None = None

    @property
    def backend(self) -> str:
        """The process group's backend."""
        return DDP.get(self.scheme, "paceline")

    @property
    def own_pace(self) -> bool:
        """Whether workers make steps at their own pace."""
        return self.scheme in OWN_PACE or self.scheme == ALONE

    @classmethod
    def parse(cls, text: str) -> Contestant:
        """Read ``NAME`` or ``NAME:OPTION=VALUE:...``; the option ``lr`` is the learning rate.

        >>> Contestant.parse("ripples-blocking:group_size=4:lr=0.1").options
        {'overlap': False, 'group_size': 4}
        """
        name, *entries = text.strip().split(":")
        scheme, *given = ALIASES.get(name, name).split(":")
        if scheme not in (ALONE, *DDP, *SCHEMES):
            known = ", ".join((*DDP, *sorted(SCHEMES), *ALIASES, ALONE))
            raise UsageError(f"there is no scheme {name!r}: choose some of {known}")
        options: dict[str, Value] = {}
        for entry in (*given, *entries):
            option, equals, value = entry.partition("=")
            if not option or not equals or not value:
                raise UsageError(f"an option is written NAME:OPTION=VALUE, like ripples:group_size=4, not {text!r}")
            options[option] = _value(value)
        rate = options.pop("lr", None)
        if rate is not None and (not isinstance(rate, (int, float)) or rate <= 0):
            raise UsageError(f"{text!r}: lr is a positive number")
        if options and scheme in (ALONE, *DDP):
            raise UsageError(f"{scheme} has no option {next(iter(options))!r}: it takes lr")
        return cls(text.strip(), scheme, options, None if rate is None else float(rate))


def parse_schemes(text: str) -> list[Contestant]:
    """Read names with commas, each once."""
    found = [Contestant.parse(one) for one in text.split(",") if one.strip()]
    names = [one.name for one in found]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"--schemes takes names with commas, each once, not {text!r}")
    return found


def _value(text: str) -> Value:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


@dataclass(frozen=True)
class Slowness:
    """Some members, ``factor`` times slower than the rest. No numbers: the last half of them."""

    numbers: tuple[int, ...]
    factor: float

    def factors(self, count: int, what: str) -> list[float]:
        """Return how many times slower each of ``count`` members is."""
        chosen = self.numbers or tuple(range(count - count // 2, count))
        if max(chosen, default=0) >= count:
            raise UsageError(f"{what} {max(chosen)} cannot be slow: there are {what}s 0 to {count - 1}")
        return [self.factor if number in chosen else 1.0 for number in range(count)]


@dataclass(frozen=True)
class Scenario:
    """Which workers compute slowly, and which hosts have slow links."""

    name: str = "none"
    workers: Slowness | None = None
    links: Slowness | None = None

    def compute_factors(self, num_workers: int) -> list[float]:
        """Return how many times longer each worker computes."""
        return self.workers.factors(num_workers, "worker") if self.workers else [1.0] * num_workers

    def link_factors(self, num_hosts: int) -> list[float]:
        """Return how many times slower each host's link is."""
        return self.links.factors(num_hosts, "host") if self.links else [1.0] * num_hosts


def parse_scenarios(
    slow: list[str] | None, slow_links: list[str] | None, *, homogeneous: bool = True
) -> list[Scenario]:
    """Read ``0:2x``, ``0+1:5x``, ``half:2x`` or ``none``, several times or with commas: one scenario each.

    >>> [one.name for one in parse_scenarios(["0:2x,half:2x"], ["half:5x"])]
    ['none', '0:2x', 'half:2x', 'links half:5x']
    """
    found = [Scenario()] if homogeneous else []
    found += [
        Scenario() if entry == "none" else Scenario(entry, workers=_slowness(entry, "--slow"))
        for entry in _entries(slow)
    ]
    found += [Scenario(f"links {entry}", links=_slowness(entry, "--slow-links")) for entry in _entries(slow_links)]
    unique = list({one.name: one for one in found}.values())
    if not unique:
        raise UsageError("there is no scenario: name one with --slow or --slow-links, or leave --no-homogeneous out")
    return unique


def _entries(texts: list[str] | None) -> list[str]:
    return [entry.strip() for entry in ",".join(texts or []).split(",") if entry.strip()]


def _slowness(entry: str, option: str) -> Slowness:
    match = _SLOW.fullmatch(entry)
    if match is None or float(match.group(2)) < 1:
        raise UsageError(f"{option} takes NUMBER:FACTORx or half:FACTORx, like 0:2x, 0+3:5x or half:2x, not {entry!r}")
    who = match.group(1)
    numbers = () if who == "half" else tuple(sorted({int(one) for one in who.split("+")}))
    return Slowness(numbers, float(match.group(2)))


class Buckets(msgspec.Struct, frozen=True):
    """Bytes that DDP fuses; ``first`` is the size of its first bucket, 0: as the others. ``of`` says it in words."""

    size: int
    first: int
    of: str


def bucket_grid(vector_bytes: int) -> list[Buckets]:
    """Return DDP's defaults, and parts of the model of equal sizes."""
    grid = [Buckets(25 * 2**20, 2**20, "defaults")]
    return grid + [
        Buckets(-(-vector_bytes // parts), 0, f"1/{parts}" if parts > 1 else "whole") for parts in (1, 2, 4, 8)
    ]


class Job(msgspec.Struct, frozen=True):
    """What a rank trains. With ``probe``, DDP is timed with each of these buckets in place of a training."""

    scheme: str
    backend: str
    options: dict[str, Value]
    seed: int
    width: int
    compute_s: float
    compute_factors: list[float]
    jitter: float
    batch: int
    learning_rate: float
    lr_warmup: int
    momentum: float
    own_pace: bool
    folder: str
    port: int
    timeout_s: float
    buckets: Buckets | None = None
    probe: list[Buckets] = []


class Trained(msgspec.Struct, frozen=True):
    """What a rank reports of a job. Times of steps are medians; ``outside_s`` is the time that is no computation."""

    elapsed_s: float = 0.0
    steps: int = 0
    outside_s: float = 0.0
    wait_s: float | None = None
    finish_s: float = 0.0
    groups: dict[int, int] = {}
    failed_groups: int = 0
    sent_bytes: int | None = None
    processor_s: float = 0.0
    checksum: float | None = None  # None is what JSON makes of a number that is none
    loss: float | None = None
    accuracy: float | None = None
    probed_s: list[float] = []


def num_parameters(width: int) -> int:
    """Return the size of a model.

    >>> num_parameters(10)
    1420
    """
    return (INPUTS + 1) * width + BLOCKS * (width + 1) * width + CLASSES * (width + 1)
