"""How fast the group generator answers: requests per second on one core, and the time of one request.

    python benchmarks/generator.py [--workers 1024] [--requests 100000] [--network]

Simulated workers, eight a host, make steps of 1 s (give or take 5%; one in sixteen is 5 times slower) and average for
0.1 s. Only calls of the generator are timed. *requests a second* is by processor time, and includes what a request
causes later (finished, tick). *p99* is by the clock, of a request alone. Goals: 20,000 requests a second, and
a p99 below 5 ms.

With ``--network`` the service runs in a process of its own, and this one has all workers, each with a connection. They
ask again as soon as they are answered, which gives *requests a second*: by the clock, and for one second of the
service's processor time. A request is four messages: Request, Start, Finished, Commit. Then they make steps of 1 s, and
*p99* is the time from the last request of a group's members to the arrival of Start.
"""

from __future__ import annotations

import argparse
import heapq
import logging
import multiprocessing
import random
import select
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from paceline.policy.group_messages import Commit, Message, Solo, Start
from paceline.policy.groups import Formation, GroupGenerator, Rules
from paceline.train.decentralized.generator import GeneratorService
from paceline.train.decentralized.generator.connecting import Link
from paceline.train.decentralized.generator.messages import Commit as WireCommit
from paceline.train.decentralized.generator.messages import Finished, Join, Joined, Request
from paceline.train.decentralized.generator.messages import Solo as WireSolo
from paceline.train.decentralized.generator.messages import Start as WireStart

GOAL_PER_S = 20_000
GOAL_P99_S = 5e-3
GOAL_NETWORK_PER_S = 5_000
PER_HOST = 8
NETWORK_S = 5.0
SECRET = b"the secret of a benchmark"


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


class NetworkWorkers:
    """Many workers in one thread, each with a connection to the service."""

    def __init__(self, address: str, count: int) -> None:
        self.selector = selectors.DefaultSelector()
        self.asked_s = [0.0] * count
        self.starts_s: list[float] = []
        self.requests = 0
        self.step_s = 0.0
        self._due: list[tuple[float, int]] = []
        self._links = [Link(address, SECRET) for _ in range(count)]
        for worker, link in enumerate(self._links):
            self.selector.register(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)
        joined = 0
        while joined < count:
            for key, _ in self.selector.select():
                link = self._links[key.data]
                was_open = link.is_open
                messages = link.serve(link.events)
                joined += sum(isinstance(message, Joined) for message in messages)
                if link.is_open and not was_open:
                    self.selector.modify(link.socket, selectors.EVENT_READ, key.data)
                    host = f"host{key.data // PER_HOST}"
                    link.send(Join(key.data, host, "address", None, False, False, None, key.data + 1))

    def ask(self, worker: int, now_s: float) -> None:
        """Send a request."""
        self.asked_s[worker] = now_s
        self.requests += 1
        self._links[worker].send(Request(1.0, 0.0, 0.0, 0, 1))

    def run(self, seconds: float) -> None:
        """Serve all workers for some time. Their first requests are spread over a step."""
        begin_s = time.perf_counter()
        self._due = [(begin_s + random.random() * self.step_s, worker) for worker in range(len(self._links))]
        heapq.heapify(self._due)
        while (now_s := time.perf_counter()) < begin_s + seconds:
            while self._due and self._due[0][0] <= now_s:
                self.ask(heapq.heappop(self._due)[1], now_s)
            wait_s = min(0.1, self._due[0][0] - now_s) if self._due else 0.1
            for key, _ in self.selector.select(max(0.0, wait_s)):
                for message in self._links[key.data].serve(select.POLLIN):
                    self._hear(key.data, message)

    def _hear(self, worker: int, message: object) -> None:
        now_s = time.perf_counter()
        if isinstance(message, WireStart):
            self.starts_s.append(now_s - max(self.asked_s[member] for member in message.members))
            self._links[worker].send(Finished(message.serial, True))
        elif isinstance(message, (WireCommit, WireSolo)):
            if self.step_s:
                heapq.heappush(self._due, (now_s + self.step_s * random.uniform(0.95, 1.05), worker))
            else:
                self.ask(worker, now_s)


def serve(pipe: Connection) -> None:
    """The service's process."""
    logging.disable()  # all workers go at once in the end
    service = GeneratorService(secret=SECRET, rules=Rules(), settle_s=0.0)
    service.start()
    pipe.send(service.address)
    while pipe.recv():
        pipe.send(time.process_time())
    service.stop()


def measure_network(num_workers: int) -> bool:
    """Print the figures over the network; return whether they reach the goals."""
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    process = context.Process(target=serve, args=(other_end,))
    process.start()

    def processor_s() -> float:
        pipe.send(True)
        seconds: float = pipe.recv()
        return seconds

    try:
        workers = NetworkWorkers(pipe.recv(), num_workers)
        before_s, begin_s = processor_s(), time.perf_counter()
        workers.run(NETWORK_S)
        used_s, took_s = processor_s() - before_s, time.perf_counter() - begin_s
        per_s, per_processor_s = workers.requests / took_s, workers.requests / used_s
        workers.step_s = 1.0
        workers.run(2.0)  # answers to what was asked before
        workers.starts_s.clear()
        workers.run(NETWORK_S)
        ordered = sorted(workers.starts_s)
        p99_s = ordered[len(ordered) * 99 // 100]
    finally:
        pipe.send(False)
        process.join()
    print(f"# over the network: {num_workers} workers, groups of 4, first come")
    print(
        f"requests a second      {per_s:>10,.0f}    for a second of the service's processor {per_processor_s:>10,.0f}"
    )
    print(f"Start, steps of 1 s    median {ordered[len(ordered) // 2] * 1e6:,.0f} us, p99 {p99_s * 1e6:,.0f} us")
    return per_s >= GOAL_NETWORK_PER_S and p99_s <= GOAL_P99_S


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=1024, help="(default: 1024)")
    parser.add_argument("--requests", type=int, default=100_000, help="a row (default: 100000)")
    parser.add_argument("--network", action="store_true", help="measure the service instead, over the network")
    options = parser.parse_args()
    if options.network:
        sys.exit(0 if measure_network(options.workers) else 1)
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
