"""Ripples between the generator's messages and the training thread: each order in which they may come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import GeneratorError
from paceline.train.decentralized.generator.messages import (
    Abort,
    Average,
    Commit,
    Detached,
    Enough,
    Evicted,
    Joined,
    Refused,
    Solo,
    Start,
)
from paceline.train.decentralized.mesh import Mesh
from paceline.train.decentralized.schemes import ripples
from paceline.train.decentralized.schemes.scheme import GeneratorPlace, Worker
from paceline.train.decentralized.weights import Weights

LIMIT_S = 20.0
JOINED = Joined(0, 1, 5, copy=False, lease_s=30.0)
COPYING = Joined(0, 1, 5, copy=True, lease_s=30.0)


class FakeClient:
    """Notes what the worker says. The test says what the generator would."""

    def __init__(self, *_: object, on_message: Callable[[object], None], **__: object) -> None:
        self.said: list[tuple[Any, ...]] = []
        on_message(JOINED)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: self.said.append((name, *args, *options.values()))

    def count(self, name: str) -> int:
        return sum(one[0] == name for one in self.said)


class FakeMesh(Mesh):
    """Averages with a second worker whose weights are ``other``; or raises ``error``; or waits until given up."""

    def __init__(self) -> None:
        self.worker = 0
        self.other = 10.0
        self.error: Exception | None = None
        self.waits = False
        self.given_up: dict[int, threading.Event] = {}
        self.sent: dict[int, list[float]] = {}
        self.fails_to_give_up = False

    def reduce(
        self,
        vector: torch.Tensor,
        members: Sequence[int],
        number: int,
        *,
        mean: bool = True,
        addresses: Mapping[int, str] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        del members, addresses, timeout_s
        self.sent[number] = vector.tolist()
        if self.error is not None:
            raise self.error
        if self.waits and not self._event(number).wait(LIMIT_S):
            raise AssertionError("nobody gave up")
        if self._event(number).is_set():
            raise RuntimeError("given up")
        vector.add_(self.other)
        if mean:
            vector.div_(2)

    def give_up(self, number: int, reason: str) -> None:
        del reason
        self._event(number).set()
        if self.fails_to_give_up:
            raise RuntimeError("the group is broken")

    def close(self) -> None:
        pass

    def _event(self, number: int) -> threading.Event:
        return self.given_up.setdefault(number, threading.Event())


class Bench:
    """A worker with the weight 0, between a test that plays the generator and its training thread."""

    def __init__(self, **options: Any) -> None:
        self.module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.module.weight)
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)
        self.mesh = FakeMesh()
        self.worker = Worker(
            self.mesh, Weights(self.module, optimizer), optimizer, None, LIMIT_S, GeneratorPlace("a:1", b"s" * 16)
        )
        self.scheme = ripples.Ripples(self.worker, **options)
        self.client: Any = self.scheme._connected

    @property
    def weight(self) -> float:
        return float(self.module.weight.detach())

    def hear(self, *messages: object) -> None:
        for message in messages:
            self.scheme._on_message(message)

    def step(self) -> bool:
        """Make a step; return whether it asked for a group."""
        before = self.client.count("request")
        self.scheme.after_step()
        return bool(self.client.count("request") > before)

    def group(self, serial: int) -> None:
        """Average with a group, and commit it."""
        self.hear(Start(serial, 1, (0, 1), ("", "")))
        self.until(("finished", serial, True))
        self.hear(Commit(serial))
        self.settle()

    def until(self, said: tuple[Any, ...]) -> None:
        await_(lambda: said in self.client.said, f"{said} among {self.client.said}")

    def settle(self) -> None:
        """Wait until both threads have served what they have been told."""
        served = threading.Event()
        self.scheme._groups.put(served)
        assert served.wait(LIMIT_S)
        await_(self.scheme._globals.empty, "the averages' thread")


def await_(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.001)


def average(serial: int, *, final: bool = False, replaces: int | None = None, alone: bool = False) -> Average:
    contributors = (1,) if alone else (0, 1)
    return Average(serial, 1, (0, 1), ("", ""), contributors, (0,), final, replaces)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    monkeypatch.setattr(ripples, "GeneratorClient", FakeClient)
    made: list[Bench] = []

    def new(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield new
    for bench in made:
        bench.scheme.close()
        assert not any(thread.is_alive() for thread in bench.scheme._threads)


def in_thread(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run in a thread, as the training thread would; return it, and the error or None when it has ended."""
    ended: list[Any] = []

    def run() -> None:
        try:
            act()
            ended.append(None)
        except GeneratorError as error:
            ended.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, ended


def test_a_committed_average_is_applied_at_the_next_step(make: Callable[..., Bench]) -> None:
    bench = make()
    assert bench.step()
    assert not bench.step()
    bench.group(1)
    assert bench.weight == 0
    assert bench.step()
    assert bench.weight == 5
    bench.hear(Solo())
    assert bench.step()


def test_two_averages_between_two_steps_are_both_applied(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.group(1)
    bench.group(2)  # from the same snapshot: the first is not applied yet
    bench.step()
    assert bench.weight == 10


def test_an_aborted_group_changes_nothing(make: Callable[..., Bench]) -> None:
    bench = make()
    assert bench.step()
    bench.hear(Start(1, 1, (0, 1), ("", "")))
    bench.until(("finished", 1, True))
    bench.hear(Abort(1, "worker 1 has gone"))
    bench.settle()
    assert bench.step()
    assert bench.weight == 0


def test_the_end_of_an_average_of_all_does_not_make_a_worker_ask_twice(make: Callable[..., Bench]) -> None:
    bench = make()
    assert bench.step()
    bench.hear(average(7), Abort(7, "it took too long"))
    bench.settle()
    assert not bench.step()


@pytest.mark.parametrize("error", [RuntimeError("lost"), ValueError("of another kind")])
def test_a_group_that_fails_is_reported(make: Callable[..., Bench], error: Exception) -> None:
    bench = make()
    bench.mesh.error = error
    bench.step()
    bench.hear(Start(1, 1, (0, 1), ("", "")), average(2))
    bench.until(("finished", 1, False))
    bench.until(("average_finished", 2, False))
    assert bench.worker.statistics.failed_groups == 1


def test_a_worker_goes_on_though_an_operation_cannot_be_given_up(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.mesh.waits = bench.mesh.fails_to_give_up = True
    assert bench.step()
    bench.hear(Start(1, 1, (0, 1), ("", "")))
    bench.hear(Abort(1, "worker 1 has gone"))
    assert bench.step()
    bench.settle()


@pytest.mark.parametrize("loss", [Detached("gone"), Evicted(2, "silent")])
def test_what_is_under_way_is_given_up_with_the_generator(make: Callable[..., Bench], loss: object) -> None:
    bench = make()
    bench.mesh.waits = True
    assert bench.step()
    bench.hear(Start(1, 1, (0, 1), ("", "")), average(2))
    await_(lambda: bench.mesh.sent.keys() == {1, 2}, "both under way")
    bench.hear(loss)
    assert bench.step()
    bench.until(("finished", 1, False))
    bench.until(("average_finished", 2, False))
    bench.hear(Start(3, 1, (0, 1), ("", "")), loss)  # before it has begun
    bench.settle()
    assert bench.step()


def test_a_worker_that_copies_drops_what_was_averaged_with_its_old_weights(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.step()
    bench.hear(Start(1, 1, (0, 1), ("", "")))
    bench.until(("finished", 1, True))
    bench.hear(Evicted(2, "silent"), COPYING, Commit(1))
    bench.settle()
    assert not bench.step()
    bench.mesh.other = 40.0
    bench.hear(average(2, alone=True))
    bench.until(("average_finished", 2, True))
    bench.hear(Commit(2))
    await_(lambda: bench.scheme._replacement is not None, "the copy")
    assert bench.step()
    assert bench.weight == 40
    assert ("ready",) in bench.client.said


def test_a_worker_that_stands_still_for_its_group_gets_its_copy(make: Callable[..., Bench]) -> None:
    bench = make(overlap=False)
    thread, ended = in_thread(bench.scheme.after_step)
    await_(lambda: bench.client.count("request") == 1, "a request")
    bench.hear(Evicted(2, "silent"), COPYING)
    bench.mesh.other = 40.0
    bench.hear(average(2, alone=True))
    bench.until(("average_finished", 2, True))
    bench.hear(Commit(2))
    thread.join(LIMIT_S)
    assert ended == [None]
    assert bench.weight == 40


@pytest.mark.parametrize("last", [Solo(), Detached("gone"), Enough(5)])
def test_a_worker_that_stands_still_is_released(make: Callable[..., Bench], last: object) -> None:
    bench = make(overlap=False)
    thread, ended = in_thread(bench.scheme.after_step)
    await_(lambda: bench.client.count("request") == 1, "a request")
    bench.hear(last)
    thread.join(LIMIT_S)
    assert ended == [None]


def test_the_mean_of_all_is_asked_for_again_by_another_generator(make: Callable[..., Bench]) -> None:
    bench = make()
    means: list[float] = []
    thread, ended = in_thread(lambda: means.extend(bench.scheme.average().tolist()))
    await_(lambda: bench.client.count("ask_average") == 1, "the question")
    bench.hear(average(1))
    bench.until(("average_finished", 1, True))
    bench.hear(Detached("gone"), JOINED)
    await_(lambda: bench.client.count("ask_average") == 2, "the question again")
    bench.hear(average(2))
    bench.until(("average_finished", 2, True))
    bench.hear(Commit(2))
    thread.join(LIMIT_S)
    assert ended == [None]
    assert means == [5]
    assert bench.weight == 0


@pytest.mark.parametrize("final", [False, True])
def test_who_waits_for_an_average_that_is_given_up_gets_an_error(make: Callable[..., Bench], final: bool) -> None:
    bench = make()
    act, question = (bench.scheme.finish, "drain") if final else (bench.scheme.average, "ask_average")
    thread, ended = in_thread(act)
    await_(lambda: bench.client.count(question) == 1, question)
    bench.hear(average(1, final=final), Abort(1, "attempt 5: worker 1 could not finish it"))
    thread.join(LIMIT_S)
    assert len(ended) == 1
    assert "attempt 5: worker 1 could not finish it" in ended[0]


def test_who_waits_for_a_mean_without_a_generator_gets_an_error(make: Callable[..., Bench]) -> None:
    bench = make(lease_s=0.01)
    bench.hear(Detached("nobody answers"))
    thread, ended = in_thread(bench.scheme.average)
    thread.join(LIMIT_S)
    assert ended == ["there is no mean of all workers: nobody answers"]


def test_what_was_committed_counts_in_the_last_mean(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.step()
    bench.hear(Start(1, 1, (0, 1), ("", "")))
    bench.until(("finished", 1, True))
    thread, ended = in_thread(bench.scheme.finish)
    await_(lambda: bench.client.count("drain") == 1, "drain")
    bench.hear(Commit(1), average(2, final=True))
    bench.until(("average_finished", 2, True))
    assert bench.mesh.sent[2] == [5]
    bench.hear(Commit(2))
    thread.join(LIMIT_S)
    assert ended == [None]
    assert bench.weight == 7.5


def test_a_last_mean_without_its_commit_is_what_the_next_one_is_made_of(make: Callable[..., Bench]) -> None:
    bench = make()
    thread, ended = in_thread(bench.scheme.finish)
    await_(lambda: bench.client.count("drain") == 1, "drain")
    bench.hear(average(1, final=True))
    bench.until(("average_finished", 1, True))
    bench.hear(Detached("gone"), JOINED, average(2, final=True))
    bench.until(("average_finished", 2, True))
    assert bench.mesh.sent == {1: [0], 2: [5]}
    assert not ended
    bench.hear(Commit(2))
    thread.join(LIMIT_S)
    assert ended == [None]


def test_a_last_mean_is_taken_where_no_generator_is_left(make: Callable[..., Bench]) -> None:
    bench = make(lease_s=0.01)
    thread, ended = in_thread(bench.scheme.finish)
    await_(lambda: bench.client.count("drain") == 1, "drain")
    bench.hear(average(1, final=True))
    bench.until(("average_finished", 1, True))
    bench.hear(Detached("gone"))
    thread.join(LIMIT_S)
    assert ended == [None]
    assert bench.weight == 5


def test_a_worker_that_is_refused_says_why(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.hear(Refused("another process has joined as worker 0"))
    with pytest.raises(GeneratorError, match="another process has joined as worker 0"):
        bench.scheme.after_step()
    with pytest.raises(GeneratorError, match="another process has joined as worker 0"):
        bench.scheme.finish()


def test_a_worker_that_cannot_be_let_in_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())

    class Refusing(FakeClient):
        def __init__(self, *_: object, on_message: Callable[[object], None], **__: object) -> None:
            self.said = []
            on_message(Refused("a wrong secret"))

    monkeypatch.setattr(ripples, "GeneratorClient", Refusing)
    with pytest.raises(GeneratorError, match="a wrong secret"):
        Bench()
    assert not {thread for thread in threading.enumerate() if thread.is_alive()} - before
