"""The generator's job: what workers are told, with a clock of the test's own and lists for connections."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policy.groups import GroupGenerator, Rules
from paceline.train.decentralized.generator.averages import MAX_ATTEMPTS
from paceline.train.decentralized.generator.job import Job, Settings
from paceline.train.decentralized.generator.messages import (
    MAX_WORKERS,
    Abort,
    Alive,
    AskAverage,
    Average,
    AverageFinished,
    Commit,
    Drain,
    Enough,
    Evicted,
    Finished,
    Goodbye,
    Heartbeat,
    Join,
    Joined,
    Left,
    Ready,
    Refused,
    Request,
    Solo,
    Start,
    ToWorker,
    decode_from_service,
    encode,
)

NOW_MS = 1_800_000_000_000
REQUEST = Request(0.1, 0.0, 0.0, 0, 1)


class Connection:
    """A worker's end: what it was told, in order."""

    def __init__(self, bench: Bench, process: int) -> None:
        self.name = f"connection {process}"
        self.bench = bench
        self.process = process
        self.inbox: list[ToWorker] = []
        self.is_closed = False

    def send(self, message: ToWorker) -> None:
        assert decode_from_service(encode(message)) == message
        self.inbox.append(message)

    def close(self, reason: str) -> None:
        assert reason
        self.is_closed = True

    def join(self, worker: int | None = None, **changes: Any) -> Connection:
        fields: dict[str, Any] = {
            "worker": worker, "host": "host", "address": f"address {self.process}", "previous": None, "stale": False,
            "fresh": False, "rate_bytes_per_s": None, "process": self.process,
        }  # fmt: skip
        self.say(Join(**{**fields, **changes}))
        return self

    def say(self, message: Any) -> Connection:
        self.bench.job.receive(self, message, self.bench.now_s, NOW_MS)
        return self

    def take(self) -> list[ToWorker]:
        told, self.inbox = self.inbox, []
        return told

    def lose(self) -> None:
        self.bench.job.closed(self, self.bench.now_s)


class Bench:
    """A job, its clock, and the connections to it."""

    def __init__(self, rules: Rules | None = None, **settings: Any) -> None:
        self.now_s = 0.0
        self.rules = rules or Rules(group_size=2, patience_s=10, lease_s=30, window_rounds=0)
        self.job = Job(GroupGenerator(self.rules), 7, NOW_MS, Settings(**{"settle_s": 0.0, **settings}))
        self.processes = 0

    def connect(self) -> Connection:
        self.processes += 1
        return Connection(self, self.processes)

    def workers(self, count: int) -> list[Connection]:
        """So many workers of a process group."""
        found = [self.connect().join(worker) for worker in range(count)]
        for number, worker in enumerate(found):
            [joined] = worker.take()
            assert isinstance(joined, Joined)
            assert (joined.worker, joined.copy) == (number, False)
        return found

    def wait(self, seconds: float) -> None:
        """Let time pass, as the service does."""
        end_s = self.now_s + seconds
        while self.job.next_tick_s <= end_s:
            assert self.job.next_tick_s >= self.now_s
            self.now_s = self.job.next_tick_s
            self.job.tick(self.now_s)
            assert self.job.next_tick_s > self.now_s, "the service would not sleep"
        self.now_s = end_s


def only(told: list[ToWorker], kind: type[Any]) -> Any:
    """The one message there is."""
    assert [type(message) for message in told] == [kind]
    return told[0]


def averages(connection: Connection) -> list[Average]:
    return [message for message in connection.take() if isinstance(message, Average)]


# Groups


def test_a_group_starts_and_commits_with_everybodys_address() -> None:
    bench = Bench()
    first, second = bench.workers(2)
    first.say(REQUEST)
    assert first.take() == []
    second.say(REQUEST)
    start = only(first.take(), Start)
    assert start == only(second.take(), Start)
    assert start.members == (0, 1)
    assert start.addresses == ("address 1", "address 2")
    first.say(Finished(start.serial, True))
    assert first.take() == []
    second.say(Finished(start.serial, True))
    assert first.take() == second.take() == [Commit(start.serial)]


def test_serials_and_epochs_are_above_those_of_every_former_service() -> None:
    bench = Bench()
    former = {"previous": (99, 0), "epoch_seen": NOW_MS + 12, "serial_seen": NOW_MS * 1000 + 12345}
    first = bench.connect().join(0, **former)
    second = bench.connect().join(1)
    assert only(first.take(), Joined).epoch > NOW_MS + 12
    second.take()
    first.say(REQUEST)
    second.say(REQUEST)
    assert only(first.take(), Start).serial > NOW_MS * 1000 + 12345


def test_a_lie_about_a_former_service_is_not_believed() -> None:
    bench = Bench()
    liar = bench.connect().join(0, previous=(99, 0), epoch_seen=2**53 - 1, serial_seen=2**53 - 1)
    assert only(liar.take(), Joined).epoch < NOW_MS + 1000


def test_enough_is_said_once_to_all_and_to_those_who_come_later() -> None:
    bench = Bench(total_steps=5)
    first, second = bench.workers(2)
    first.say(Request(0.1, 0, 0, 0, 4))
    assert first.take() == []
    second.say(Request(0.1, 0, 0, 0, 1))
    assert Enough(5) in first.take()
    assert Enough(5) in second.take()
    third = bench.connect().join(2)
    assert [type(message) for message in third.take()] == [Joined, Enough]


def test_steps_of_a_former_service_count() -> None:
    bench = Bench(total_steps=100, settle_s=1.0)
    first = bench.connect().join(0, previous=(99, 0), steps_seen=99)
    first.say(Heartbeat())
    assert first.take()[-1] == Alive(99, 0)
    bench.wait(2)
    second = bench.connect().join(1, previous=(99, 1), steps_seen=10**9)
    assert [type(message) for message in second.take()] == [Joined], "steps are learnt in the beginning only"


# Numbers


def test_numbers_are_given_once() -> None:
    bench = Bench()
    first, second = bench.connect().join(), bench.connect().join()
    assert [only(each.take(), Joined).worker for each in (first, second)] == [1, 2]
    second.say(Goodbye())
    assert second.is_closed
    assert only(bench.connect().join().take(), Joined).worker == 3


def test_numbers_of_a_process_group_are_left_out() -> None:
    bench = Bench(first_number=0)
    bench.workers(3)
    assert only(bench.connect().join().take(), Joined).worker == 3


def test_numbers_run_out_with_a_sentence() -> None:
    bench = Bench(first_number=MAX_WORKERS - 1)
    assert only(bench.connect().join().take(), Joined).worker == MAX_WORKERS - 1
    refused = bench.connect().join()
    assert "4096 worker numbers of this job are used up" in only(refused.take(), Refused).reason
    assert refused.is_closed


def test_a_newcomer_waits_until_workers_of_a_former_service_are_back() -> None:
    bench = Bench(settle_s=3.0)
    newcomer = bench.connect().join(fresh=True)
    bench.wait(1)
    old = bench.connect().join(previous=(99, 1), highest_worker_seen=5)
    assert only(old.take(), Joined).worker == 1
    assert newcomer.take() == []
    assert bench.job.is_attached(newcomer)
    bench.wait(3)
    joined = newcomer.take()[0]
    assert isinstance(joined, Joined)
    assert joined.worker == 6
    assert joined.copy


def test_a_late_worker_of_a_former_service_gets_another_number_if_its_own_is_taken() -> None:
    bench = Bench()
    assert only(bench.connect().join().take(), Joined).worker == 1
    late = bench.connect().join(previous=(99, 1))
    joined = only(late.take(), Joined)
    assert (joined.worker, joined.copy) == (2, False)


def test_a_second_process_with_a_number_replaces_the_first_for_good() -> None:
    bench = Bench()
    first, other = bench.workers(2)
    second = bench.connect().join(0, fresh=True)
    assert "another process has joined as worker 0" in only(first.take(), Refused).reason
    assert first.is_closed
    assert second.take()[0] == Joined(0, bench.job._generator.epoch, 7, True, 30)
    again = Connection(bench, first.process).join(0, previous=(7, 0))
    assert "number of its own" in only(again.take(), Refused).reason
    del other


def test_a_worker_that_reconnects_keeps_number_and_weights() -> None:
    bench = Bench()
    first, second = bench.workers(2)
    first.say(REQUEST)
    second.say(REQUEST)
    start = only(second.take(), Start)
    first.lose()
    again = Connection(bench, first.process).join(0, previous=(7, 0))
    joined = only(again.take(), Joined)
    assert (joined.worker, joined.copy) == (0, False)
    aborted = only(second.take(), Abort)
    assert aborted.serial == start.serial
    assert "worker 0 (host host) joined anew" in aborted.reason


# Workers that die


def test_a_lost_connection_aborts_the_group_after_a_grace() -> None:
    bench = Bench()
    first, second = bench.workers(2)
    first.say(REQUEST)
    second.say(REQUEST)
    start = only(second.take(), Start)
    first.lose()
    bench.wait(0.9)
    assert second.take() == []
    bench.wait(0.2)
    assert only(second.take(), Abort).serial == start.serial


def test_a_silent_worker_is_evicted_and_copies_when_it_is_back() -> None:
    bench = Bench()
    silent, other = bench.workers(2)
    for _ in range(4):
        bench.wait(10)
        other.say(Heartbeat())
    assert "silent for its lease" in only(silent.take(), Evicted).reason
    silent.say(REQUEST)
    silent.say(Finished(3, True))
    assert silent.take() == [], "what it says before it has joined again is ignored"
    silent.join(0, previous=(7, 0))
    joined, average = silent.take()
    assert isinstance(joined, Joined)
    assert joined.copy
    assert isinstance(average, Average)
    assert (average.contributors, average.receivers) == ((1,), (0,))


def test_silent_workers_that_copy_or_have_left_are_evicted_too() -> None:
    bench = Bench()
    left, other = bench.workers(2)
    left.say(Drain())
    only(left.take(), Left)
    copying = bench.connect().join(2, fresh=True)
    for _ in range(6):
        bench.wait(8)
        other.say(Heartbeat())
    assert isinstance(left.take()[-1], Evicted)
    assert isinstance(copying.take()[-1], Evicted)
    assert bench.job.status(bench.now_s)["workers"] == {"compute": 1}


# Newcomers


def test_a_newcomer_copies_before_it_is_in_groups() -> None:
    bench = Bench()
    first, second = bench.workers(2)
    newcomer = bench.connect().join(2, fresh=True)
    joined, average = newcomer.take()
    assert isinstance(joined, Joined)
    assert joined.copy
    assert isinstance(average, Average)
    assert (average.members, average.contributors, average.receivers) == ((0, 1, 2), (0, 1), (2,))
    assert average.addresses == ("address 1", "address 2", "address 3")
    newcomer.say(REQUEST)
    assert newcomer.take() == [Solo()]
    for worker in (first, second, newcomer):
        assert averages(worker) in ([average], [])
        worker.say(AverageFinished(average.serial, True))
    assert newcomer.take() == [Commit(average.serial)]
    newcomer.say(Ready())
    assert newcomer.take() == []
    first.take()
    newcomer.say(REQUEST)
    first.say(REQUEST)
    assert only(newcomer.take(), Start).members == (0, 2)


def test_nobody_copies_in_the_beginning_and_the_first_fresh_worker_does_not_either() -> None:
    bench = Bench()
    first = bench.connect().join(fresh=True)
    assert not only(first.take(), Joined).copy
    second = bench.connect().join(fresh=True)
    assert [type(message) for message in second.take()] == [Joined, Average]


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({}, False),
        ({"previous": (99, 2)}, False),
        ({"previous": (7, 2)}, True),
        ({"stale": True}, True),
        ({"fresh": True}, True),
    ],
)
def test_who_copies(changes: dict[str, Any], copies: bool) -> None:
    bench = Bench()
    bench.workers(2)
    joined = bench.connect().join(2, **changes).take()[0]
    assert isinstance(joined, Joined)
    assert joined.copy is copies


def test_a_copy_is_made_again_when_a_contributor_dies_or_the_receiver_fails() -> None:
    bench = Bench()
    _, second = bench.workers(2)
    newcomer = bench.connect().join(2, fresh=True)
    [average] = averages(newcomer)
    second.lose()
    bench.wait(2)
    [again] = averages(newcomer)
    assert again.replaces == average.serial
    assert (again.contributors, again.receivers) == ((0,), (2,))
    newcomer.say(AverageFinished(average.serial, True))  # of the former: ignored
    newcomer.say(AverageFinished(again.serial, False))
    [third] = averages(newcomer)
    assert third.replaces == again.serial


def test_a_copy_that_always_fails_is_given_up() -> None:
    bench = Bench()
    [first] = bench.workers(1)
    newcomer = bench.connect().join(2, fresh=True)
    for _ in range(MAX_ATTEMPTS):
        [average] = averages(newcomer)
        for worker in (first, newcomer):
            worker.say(AverageFinished(average.serial, worker is first))
    aborted = only(newcomer.take(), Abort)
    assert aborted.serial == average.serial
    assert "worker 2 could not finish it" in aborted.reason
    newcomer.say(AskAverage())
    assert [one.receivers for one in averages(newcomer)] == [(2,)]


def test_a_newcomer_keeps_its_weights_when_nobody_is_left_to_copy_from() -> None:
    bench = Bench()
    [first] = bench.workers(1)
    newcomer = bench.connect().join(2, fresh=True)
    newcomer.take()
    first.say(Goodbye())
    bench.wait(2)
    joined = only(newcomer.take(), Joined)
    assert (joined.worker, joined.copy) == (2, False)
    newcomer.say(REQUEST)
    assert newcomer.take() == [Solo()]


# Averages of all workers


def test_workers_that_ask_meanwhile_share_the_next_average() -> None:
    bench = Bench()
    workers = bench.workers(4)
    workers[0].say(AskAverage())
    first = [averages(worker) for worker in workers]
    assert all(told == first[0] for told in first)
    [average] = first[0]
    assert average.receivers == (0,)
    assert average.contributors == average.members == (0, 1, 2, 3)
    assert not average.final
    for worker in workers[1:3]:
        worker.say(AskAverage())
        assert averages(worker) == []
    for worker in workers:
        worker.say(AverageFinished(average.serial, True))
    [second] = averages(workers[3])
    assert second.receivers == (1, 2)
    assert second.serial > average.serial
    assert second.replaces is None


def test_an_average_whose_receiver_is_gone_is_aborted() -> None:
    bench = Bench()
    first, second = bench.workers(2)
    first.say(AskAverage())
    [average] = averages(second)
    first.say(Goodbye())
    assert only(second.take(), Abort).serial == average.serial


def test_an_average_that_takes_too_long_is_made_again() -> None:
    bench = Bench(Rules(group_size=2, lease_s=1000, longest_average_s=60))
    first, second = bench.workers(2)
    first.say(AskAverage())
    [average] = averages(first)
    first.say(AverageFinished(average.serial, True))
    bench.wait(61)
    [again] = averages(second)[1:]
    assert again.replaces == average.serial
    assert again.receivers == (0,)  # also who had finished it: the result was not committed


def test_an_average_fails_at_once_for_all_when_one_could_not_finish_it() -> None:
    bench = Bench()
    first, second, third = bench.workers(3)
    for worker in (first, second):
        worker.say(AskAverage())
    [alone] = averages(first)
    for worker in (first, second, third):
        worker.say(AverageFinished(alone.serial, True))
    first.say(AskAverage())
    [both] = averages(third)[1:]
    assert both.receivers == (1,)
    second.say(AverageFinished(both.serial, True))
    third.say(AverageFinished(both.serial, False))  # it receives nothing, but the others may wait for its part
    [again] = averages(third)
    assert again.replaces == both.serial
    assert again.receivers == (0, 1)
    for worker in (first, second, third):
        worker.say(AverageFinished(again.serial, True))
        worker.say(AverageFinished(both.serial, False))  # of the former: ignored
    assert first.take()[-1] == second.take()[-1] == third.take()[-1] == Commit(again.serial)


def test_another_model_than_that_of_the_first_worker_is_refused() -> None:
    bench = Bench()
    first = bench.connect().join(0, model="90 elements")
    refused = bench.connect().join(1, model="101 elements")
    assert "101 elements here, 90 elements there" in only(refused.take(), Refused).reason
    assert isinstance(bench.connect().join(2, model="90 elements").take()[0], Joined)
    first.say(Goodbye())
    bench.connect().join(2, model="90 elements").say(Goodbye())
    assert isinstance(bench.connect().join(3, model="101 elements").take()[0], Joined)  # nobody else is left


def test_the_final_average_comes_when_all_have_left() -> None:
    bench = Bench(total_steps=1)
    first, second = bench.workers(2)
    first.say(Drain())
    assert first.take() == [Left()]
    second.say(Drain())
    left, average = second.take()
    assert left == Left()
    assert average == only(first.take(), Average)
    assert isinstance(average, Average)
    assert average.final
    assert average.contributors == average.receivers == (0, 1)
    first.say(AverageFinished(average.serial, True))
    assert first.take() == []
    second.say(AverageFinished(average.serial, True))
    assert first.take() == second.take() == [Commit(average.serial)]
    for worker in (first, second):
        worker.say(Goodbye())
        assert worker.is_closed
    late = bench.connect().join(fresh=True)
    late.say(REQUEST)


def test_a_final_average_is_made_again_without_a_worker_that_dies() -> None:
    bench = Bench()
    workers = bench.workers(3)
    for worker in workers:
        worker.say(Drain())
    [average] = averages(workers[0])
    workers[0].say(AverageFinished(average.serial, True))
    workers[2].lose()
    bench.wait(2)
    [again] = averages(workers[0])
    assert again.final
    assert again.replaces == average.serial
    assert again.contributors == again.receivers == (0, 1)


def test_who_joins_during_the_final_average_copies_and_gets_another_one() -> None:
    bench = Bench()
    first, second = bench.workers(2)
    for worker in (first, second):
        worker.say(Drain())
    [final] = averages(first)
    late = bench.connect().join(fresh=True)
    assert [type(message) for message in late.take()] == [Joined]
    for worker in (first, second):
        worker.say(AverageFinished(final.serial, True))
    [copy] = averages(late)
    assert (copy.contributors, copy.receivers, copy.final) == ((0, 1), (3,), False) or copy.receivers == (2,)
    second.say(Goodbye())
    [again] = averages(late)
    for worker in (first, late):
        worker.say(AverageFinished(again.serial, True))
    late.say(Ready())
    late.say(Drain())
    last = averages(late)[-1]
    assert last.final
    assert len(last.receivers) == 2


def test_who_comes_after_the_end_is_told_so() -> None:
    bench = Bench(total_steps=1)
    [first] = bench.workers(1)
    first.say(REQUEST)
    first.say(Drain())
    [final] = averages(first)
    late = bench.connect().join(fresh=True)
    first.say(AverageFinished(final.serial, True))
    first.say(Goodbye())
    assert "the job has ended after 1 steps" in late.take()[-1].reason  # type: ignore[union-attr]
    assert late.is_closed
    later = bench.connect().join(fresh=True)
    assert "the job has ended after 1 steps" in only(later.take(), Refused).reason


def test_a_job_does_not_end_while_a_lost_worker_may_come_back_or_a_service_is_new() -> None:
    bench = Bench(settle_s=3.0)
    first, second = bench.workers(2)
    second.lose()
    first.say(Drain())
    assert averages(first) == []
    bench.wait(2)
    assert averages(first) == [], "a former service's workers may be on their way"
    bench.wait(2)
    assert [one.final for one in averages(first)] == [True]


# Lies, and everything at once


def test_serials_of_others_change_nothing() -> None:
    bench = Bench()
    first, second, liar = bench.workers(3)
    first.say(REQUEST)
    second.say(REQUEST)
    start = only(first.take(), Start)
    for ok in (True, False):
        liar.say(Finished(start.serial, ok)).say(AverageFinished(start.serial, ok)).say(Ready())
    assert liar.take() == []
    first.say(Finished(start.serial, True)).say(Finished(start.serial, True))
    assert first.take() == []
    second.say(Finished(start.serial, True))
    assert first.take() == [Commit(start.serial)]


def test_status_counts() -> None:
    bench = Bench()
    first, second = bench.workers(2)
    first.say(REQUEST)
    second.say(REQUEST)
    serial = only(first.take(), Start).serial
    first.say(Finished(serial, True))
    second.say(Finished(serial, True)).say(Drain())
    status = bench.job.status(bench.now_s)
    assert status["workers"] == {"compute": 1, "left": 1}
    assert (status["steps"], status["committed"], status["mean_group_size"]) == (2, 1, 2.0)


def test_a_group_that_waits_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    rules = Rules(group_size=2, window_rounds=1, patience_s=20, lease_s=1000)
    bench = Bench(rules)
    workers = bench.workers(4)
    for pair in ((0, 1), (2, 3)):  # the end of the block makes a group of workers of both pairs
        for number in pair:
            workers[number].say(REQUEST)
        serial = workers[pair[0]].take()[-1].serial  # type: ignore[union-attr]
        for number in pair:
            workers[number].say(Finished(serial, True))
    for worker in workers[:2]:
        worker.say(REQUEST)
    bench.wait(19)
    warnings = [record.getMessage() for record in caplog.records if "waits" in record.getMessage()]
    assert len(warnings) <= 1
    if bench.job._generator.waits(bench.now_s):
        assert "(host host)" in warnings[0]


def test_a_worker_that_is_evicted_in_its_final_average_gets_another_one() -> None:
    bench = Bench()
    [first] = bench.workers(1)
    first.say(Drain())
    [final] = averages(first)
    bench.wait(100)
    assert isinstance(first.take()[-1], Evicted)
    first.join(0, previous=(7, 0), stale=True).say(Drain())
    [again] = averages(first)
    assert again.final
    assert again.serial > final.serial


@given(st.integers(0, 2**32))
def test_any_order_of_events_ends_in_one_mean_for_all(seed: int) -> None:
    """Workers do anything at any time, and die, come back and lie. In the end those that are left get the mean."""
    rng = random.Random(seed)
    bench = Bench(Rules(group_size=rng.choice([2, 3]), patience_s=2, lease_s=8, longest_average_s=20), settle_s=1.0)
    alive: list[Connection] = []
    copies: set[int] = set()
    finals: set[int] = set()
    ended: set[int] = set()

    def serve(worker: Connection, faithful: bool) -> None:
        for message in worker.take():
            ok = faithful or rng.random() < 0.9
            if isinstance(message, Average):
                (finals if message.final else copies).add(message.serial)
                worker.say(AverageFinished(message.serial, ok))
            elif isinstance(message, Start):
                worker.say(Finished(message.serial, ok))
            elif isinstance(message, (Commit, Abort)) and message.serial in finals:
                ended.add(worker.process)
            elif isinstance(message, Commit) and message.serial in copies:
                worker.say(Ready())
            elif isinstance(message, Refused):
                alive.remove(worker)
            elif isinstance(message, Evicted):
                worker.join(worker.process, stale=True, previous=(7, worker.process))

    for _ in range(rng.randrange(5, 60)):
        action = rng.random()
        if not alive or action < 0.15:
            alive.append(bench.connect())
            alive[-1].join(bench.processes, fresh=rng.random() < 0.5)
        worker = rng.choice(alive)
        if action < 0.2:
            worker.lose()
            alive.remove(worker)
        elif action < 0.3:
            bench.wait(rng.uniform(0, 5))
        elif action < 0.4:
            worker.say(AskAverage())
        elif action < 0.45:
            worker.say(Ready())
        elif action < 0.5:
            worker.say(Drain())
        elif action < 0.55:
            worker.say(Finished(rng.randrange(100), True))
        elif action < 0.8:
            worker.say(REQUEST)
        else:
            serve(worker, faithful=False)
    for _ in range(100):
        for worker in alive.copy():
            serve(worker, faithful=True)
            worker.say(Heartbeat()).say(Drain())
        bench.wait(1)
    assert ended.issuperset(worker.process for worker in alive)
    assert bench.job.status(bench.now_s)["workers"] == ({"left": len(alive)} if alive else {})
