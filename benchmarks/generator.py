"""How fast the group generator answers: requests per second on one core, and the time of one request.

    python benchmarks/generator.py [--workers 1024] [--requests 100000]

Simulated workers, eight a host, make steps of 1 s (give or take 5%; one in sixteen is 5 times slower) and average for
0.1 s. Only calls of the generator are timed. *requests a second* is by processor time, and includes what a request
causes later (finished, tick). *p99* is by the clock, of a request alone. Goals: 20,000 requests a second, and
a p99 below 5 ms.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.policy.group_messages import Commit, Message, Solo, Start
from paceline.policy.groups import Formation, GroupGenerator, Rules

GOAL_PER_S = 20_000
GOAL_P99_S = 5e-3
PER_HOST = 8


@dataclass
class Times:
    """Seconds in the generator: of each request and the last event by the clock, of everything by processor time."""

    requests_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    last_s: float = 0.0

    def call(self, event: Callable[..., Sequence[Message]], *arguments: object) -> Sequence[Message]:
        """Time an event."""
        begin, begin_processor = time.perf_counter(), time.thread_time()
        messages = event(*arguments)
        self.last_s = time.perf_counter() - begin
        self.total_s += time.thread_time() - begin_processor
        return messages


def measure(formation: Formation, num_workers: int, num_requests: int, link_aware: bool) -> Times:
    """Run workers until so many requests were made."""
    rng = random.Random(1)
    hosts = [f"host{worker // PER_HOST}" for worker in range(num_workers)]
    rates = {host: 1e9 if place % 2 else 2e8 for place, host in enumerate(dict.fromkeys(hosts))}
    generator = GroupGenerator(Rules(formation=formation), rate_bytes_per_s=rates if link_aware else None)
    for worker, host in enumerate(hosts):
        generator.join(worker, host, 0.0)
    events = [(rng.random(), worker, -1) for worker in range(num_workers)]
    heapq.heapify(events)
    times = Times()
    next_tick_s = 0.0
    while len(times.requests_s) < num_requests:
        now_s, worker, serial = heapq.heappop(events)
        said: list[Message] = []
        if now_s >= next_tick_s:
            said += times.call(generator.tick, now_s)
            next_tick_s = now_s + 0.01
        if serial < 0:
            said += times.call(generator.request, worker, now_s, 1)
            times.requests_s.append(times.last_s)
        else:
            said += times.call(generator.finished, worker, serial, True, now_s, 1)
        for message in said:
            for member in message.to:
                if isinstance(message, Start):
                    heapq.heappush(events, (now_s + 0.1, member, message.serial))
                elif isinstance(message, (Commit, Solo)):
                    step_s = rng.uniform(0.95, 1.05) * (1 if member % 16 else 5)
                    heapq.heappush(events, (now_s + step_s, member, -1))
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=1024, help="(default: 1024)")
    parser.add_argument("--requests", type=int, default=100_000, help="a row (default: 100000)")
    options = parser.parse_args()
    print(f"# {options.workers} workers, groups of 4, {options.requests} requests")
    print(f"{'formation':<14}{'links':<12}{'requests a second':>18}{'median':>10}{'p99':>10}{'longest':>10}")
    missed = False
    for formation in Formation:
        for link_aware in (False, True):
            times = measure(formation, options.workers, options.requests, link_aware)
            ordered = sorted(times.requests_s)
            per_s, p99_s = len(ordered) / times.total_s, ordered[len(ordered) * 99 // 100]
            missed = missed or per_s < GOAL_PER_S or p99_s > GOAL_P99_S
            figures = f"{ordered[len(ordered) // 2] * 1e6:>7.0f} us{p99_s * 1e6:>7.0f} us{ordered[-1] * 1e3:>7.1f} ms"
            print(f"{formation.value:<14}{'two classes' if link_aware else 'alike':<12}{per_s:>18,.0f}{figures}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
