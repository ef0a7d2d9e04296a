"""The group generator over the network: jobs, crashes, pauses, hostile peers, and the service's own death."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from generator_workers import SECRET, Mesh, RawWorker, SimulatedWorker, wait_until
from paceline.errors import GeneratorError, RefusedError, UsageError
from paceline.policy.groups import Formation, Rules
from paceline.train.decentralized.generator import GeneratorClient, GeneratorService
from paceline.train.decentralized.generator.connecting import Link
from paceline.train.decentralized.generator.messages import (
    Abort,
    AskAverage,
    Average,
    AverageFinished,
    Commit,
    Detached,
    Drain,
    Evicted,
    Finished,
    Heartbeat,
    Joined,
    Refused,
    Request,
    Solo,
    Start,
)
from paceline.train.decentralized.generator.service import MAX_STRANGERS
from paceline.train.decentralized.generator.wire import parse_address

RULES = Rules(group_size=2, lease_s=5, patience_s=0.5, longest_average_s=5)
REQUEST = Request(0.1, 0.0, 0.0, 0, 1)


@pytest.fixture
def serve() -> Iterator[Callable[..., GeneratorService]]:
    services = []

    def start(rules: Rules = RULES, **options: Any) -> GeneratorService:
        service = GeneratorService(rules=rules, **{"secret": SECRET, "settle_s": 0.0, "grace_s": 0.2, **options})
        service.start()
        services.append(service)
        return service

    yield start
    RawWorker.crash_all()
    for service in services:
        service.stop()
        assert not service.is_running


def finish(workers: list[SimulatedWorker]) -> None:
    """Wait for all that have not been killed. They end with the same weight."""
    for worker in workers:
        wait_until(lambda worker=worker: not worker.is_alive(), f"{worker.name} ends")  # type: ignore[misc]
    ended = [worker for worker in workers if worker.has_ended]
    assert all(worker.has_ended or worker.has_crashed for worker in workers)
    assert len({round(worker.weight, 6) for worker in ended}) == 1


# A job


@pytest.mark.parametrize("formation", [Formation.FIRST_COME, Formation.DIVISION, Formation.INTER_INTRA])
def test_a_job_of_workers_with_random_speeds(serve: Callable[..., GeneratorService], formation: Formation) -> None:
    rules = Rules(group_size=2, formation=formation, lease_s=20, patience_s=2)
    service = serve(rules, total_steps=400, adapt_group_size=True, link_aware=True)
    rng, mesh = random.Random(1), Mesh()
    workers = [
        SimulatedWorker(mesh, [service.address], worker=rank, host=f"host{rank // 2}", step_s=rng.uniform(0.001, 0.01))
        for rank in range(8)
    ]
    finish(workers)
    assert sum(worker.steps for worker in workers) >= 400
    assert all(worker.commits for worker in workers)
    wait_until(lambda: service.status()["workers"] == {}, "all have said goodbye")
    status = service.status()
    assert status["aborted"] == 0
    assert status["steps"] == sum(worker.steps for worker in workers)


@pytest.mark.parametrize("phase", ["compute", "arrived", "in_group", "averaging", "left"])
def test_a_worker_is_killed(serve: Callable[..., GeneratorService], phase: str) -> None:
    service, mesh = serve(total_steps=200), Mesh()
    workers = [
        SimulatedWorker(mesh, [service.address], worker=rank, crash_in=phase if rank == 0 else "") for rank in range(4)
    ]
    finish(workers)
    assert workers[0].has_crashed
    assert all(worker.has_ended for worker in workers[1:])


def test_a_newcomer_is_killed_while_it_copies(serve: Callable[..., GeneratorService]) -> None:
    service, mesh = serve(), Mesh()
    workers = [SimulatedWorker(mesh, [service.address], worker=rank, max_steps=100) for rank in range(3)]
    wait_until(lambda: workers[0].commits, "there is work")
    newcomer = SimulatedWorker(mesh, [service.address], fresh=True, crash_in="copying")
    wait_until(lambda: newcomer.has_crashed, "the newcomer copies")
    finish([*workers, newcomer])


def test_a_newcomer_gets_the_weights_and_takes_part(serve: Callable[..., GeneratorService]) -> None:
    service, mesh = serve(total_steps=1000), Mesh()
    workers = [SimulatedWorker(mesh, [service.address], worker=rank, weight=1e6) for rank in range(3)]
    wait_until(lambda: workers[0].commits, "there is work")
    newcomer = SimulatedWorker(mesh, [service.address], fresh=True, weight=-1e9)
    finish([*workers, newcomer])
    assert newcomer.copies == 1
    assert newcomer.commits
    assert newcomer.weight > 1e6, "nothing of its first weights is left"


def test_a_worker_that_joins_at_the_last_second(serve: Callable[..., GeneratorService]) -> None:
    service, mesh = serve(), Mesh()
    workers = [SimulatedWorker(mesh, [service.address], worker=rank, max_steps=5) for rank in range(2)]
    last = RawWorker(service.address)
    last.join(5)  # keeps the job from its end
    wait_until(lambda: service.status()["workers"] == {"left": 2, "compute": 1}, "the others have left")
    newcomer = SimulatedWorker(mesh, [service.address], fresh=True, weight=1e9, max_steps=0)
    wait_until(lambda: newcomer.heard, "it has joined")
    last.crash()
    finish([*workers, newcomer])
    assert newcomer.weight < 1e6


def test_all_but_one_leave(serve: Callable[..., GeneratorService]) -> None:
    service, mesh = serve(), Mesh()
    workers = [SimulatedWorker(mesh, [service.address], worker=rank, max_steps=3 if rank else 300) for rank in range(4)]
    finish(workers)
    assert workers[0].steps == 300


def test_a_paused_worker_is_evicted_and_copies(serve: Callable[..., GeneratorService]) -> None:
    service = serve(Rules(group_size=2, lease_s=0.5, patience_s=0.2))
    mesh = Mesh()
    workers = [SimulatedWorker(mesh, [service.address], worker=rank, max_steps=10**9) for rank in range(2)]
    wait_until(lambda: workers[0].commits, "there is work")
    paused = RawWorker(service.address)
    first = paused.join(2)
    paused.hear(Evicted)
    again = paused.join(2, previous=(first.instance, 2), stale=True)
    assert again.copy
    average = paused.hear(Average)
    assert average.receivers == (2,)
    for worker in workers:
        worker.max_steps = 0
    paused.crash()
    finish(workers)


def test_a_client_whose_process_stood_still_copies(serve: Callable[..., GeneratorService], tmp_path: Path) -> None:
    service, mesh = serve(Rules(group_size=2, lease_s=1.0, patience_s=0.3)), Mesh()
    program = f"""
import sys; sys.path[:0] = {sys.path!r}
from generator_workers import Mesh, SimulatedWorker
worker = SimulatedWorker(Mesh(), [{service.address!r}], worker=9, max_steps=10**9)
while True:
    message = worker.heard and print(type(worker.heard.pop(0)).__name__, flush=True)
"""
    workers = [SimulatedWorker(mesh, [service.address], worker=rank, max_steps=10**9) for rank in range(2)]
    wait_until(lambda: workers[0].commits, "there is work")
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, cwd=tmp_path)
    try:
        wait_until(lambda: _knows(service, 9), "it has joined")
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: not _knows(service, 9), "it is evicted")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: "copying" in service.status()["workers"], "it copies")  # type: ignore[operator]
    finally:
        process.kill()
        process.wait()
    for worker in workers:
        worker.max_steps = 0
    finish(workers)


def test_a_dead_workers_children_do_not_keep_it_alive(serve: Callable[..., GeneratorService], tmp_path: Path) -> None:
    service = serve(Rules(lease_s=10_000), grace_s=0.1)
    program = f"""
import os, sys, time; sys.path[:0] = {sys.path!r}
from generator_workers import SECRET, wait_until
from paceline.train.decentralized.generator import GeneratorClient
client = GeneratorClient([{service.address!r}], SECRET, worker=9, host="h", address="a", on_message=print, fresh=True)
wait_until(lambda: client.is_attached, "it is attached")
child = os.fork()
if child:
    open("child", "w").write(str(child))
    os.rename("child", "ready")
time.sleep(1000)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, cwd=tmp_path)
    try:
        wait_until((tmp_path / "ready").exists, "it has forked")
        assert _knows(service, 9)
        process.kill()
        wait_until(lambda: not _knows(service, 9), "its death is noticed")
    finally:
        process.kill()
        process.wait()
        os.kill(int((tmp_path / "ready").read_text()), signal.SIGKILL)


def test_steps_made_alone_are_reported_later(serve: Callable[..., GeneratorService]) -> None:
    first = serve()
    port = parse_address(first.address)[1]
    first.stop()
    inbox: queue.Queue[object] = queue.Queue()
    client = GeneratorClient(
        [first.address], SECRET, worker=0, host="h", address="a", on_message=inbox.put, fresh=False
    )
    told: list[object] = []

    def next_of(kind: type) -> None:
        while not isinstance(message := inbox.get(timeout=60), kind):
            told.append(message)

    for steps in (3, 4):
        client.request(steps=steps)
        next_of(Solo)
    assert [type(message) for message in told] in ([], [Detached])
    second = serve(port=port)
    next_of(Joined)
    client.request(steps=5)
    next_of(Solo)
    assert second.status()["steps"] == 12
    client.close()


def _knows(service: GeneratorService, worker: int) -> bool:
    with service._lock:
        return worker in service._running_job._members


# The service dies


class Command:
    """``paceline generator`` in a process of its own."""

    def __init__(self, folder: Path, port: int = 0, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from paceline.cli.main import run; run()", "generator", "--listen",
             f"127.0.0.1:{port}", "--secret-file", "secret", "--lease", "3s", "--patience", "1s", "--group-size", "2",
             *options],
            cwd=folder, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on 127.0.0.1:"), line
        self.address = line.split()[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_workers_survive_the_services_death_and_find_its_successor(tmp_path: Path) -> None:
    command, mesh = Command(tmp_path), Mesh()
    secret = (tmp_path / "secret").read_bytes().strip()
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    workers = [
        SimulatedWorker(mesh, [command.address], secret=secret, max_steps=10**9, weight=5.0, fresh=False)
        for _ in range(4)
    ]
    try:
        wait_until(lambda: all(worker.commits for worker in workers), "all have averaged")
        numbers = {worker.client.worker for worker in workers}
        assert numbers == {1, 2, 3, 4}
        command.kill()
        for worker in workers:
            wait_until(lambda worker=worker: not worker.client.is_attached, "the death is noticed")  # type: ignore[misc]
        steps = [worker.steps for worker in workers]
        for worker, before in zip(workers, steps, strict=True):
            wait_until(lambda w=worker, b=before: w.steps > b + 5, "training goes on alone")  # type: ignore[misc]
        command = Command(tmp_path, parse_address(command.address)[1])
        commits = [worker.commits for worker in workers]
        newcomer = SimulatedWorker(mesh, [command.address], secret=secret, max_steps=10**9, fresh=True)
        for worker, before in zip(workers, commits, strict=True):
            wait_until(lambda w=worker, b=before: w.commits > b + 2, "groups are formed again")  # type: ignore[misc]
        assert {worker.client.worker for worker in workers} == numbers
        assert not any(worker.copies for worker in workers)
        wait_until(lambda: newcomer.commits, "the newcomer takes part")
        assert newcomer.client.worker == 5
        for worker in [*workers, newcomer]:
            worker.max_steps = 0
        finish([*workers, newcomer])
        command.process.send_signal(signal.SIGTERM)
        output, _ = command.process.communicate(timeout=60)
        assert command.process.returncode == 0
        assert "averages of" in output
    finally:
        command.kill()


def test_a_service_that_stands_still_is_left_and_found_again(tmp_path: Path) -> None:
    command, mesh = Command(tmp_path), Mesh()
    secret = (tmp_path / "secret").read_bytes().strip()
    workers = [SimulatedWorker(mesh, [command.address], secret=secret, max_steps=10**9, lease_s=1.0) for _ in range(3)]
    try:
        wait_until(lambda: all(worker.commits for worker in workers), "all have averaged")
        command.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: not any(worker.client.is_attached for worker in workers), "its silence is noticed")
        command.process.send_signal(signal.SIGCONT)
        wait_until(lambda: all(worker.client.is_attached for worker in workers), "all are back")
        commits = [worker.commits for worker in workers]
        wait_until(lambda: all(w.commits > c for w, c in zip(workers, commits, strict=True)), "groups are formed")
        for worker in workers:
            worker.max_steps = 0
        finish(workers)
    finally:
        command.process.send_signal(signal.SIGCONT)
        command.kill()


def test_a_service_that_dies_before_the_final_average(serve: Callable[..., GeneratorService]) -> None:
    first, mesh = serve(), Mesh()
    workers = [SimulatedWorker(mesh, [first.address], worker=rank, max_steps=5 + 5 * rank) for rank in range(3)]
    last = RawWorker(first.address)
    last.join(9)  # keeps the job from its end
    wait_until(lambda: first.status()["workers"] == {"left": 3, "compute": 1}, "the others have left")
    first.stop()
    second = serve(port=parse_address(first.address)[1], settle_s=2.0)
    assert second.instance != first.instance
    finish(workers)
    assert len({worker.weight for worker in workers}) == 1


def test_an_average_is_asked_for_again_at_the_next_service(serve: Callable[..., GeneratorService]) -> None:
    first = serve()
    inbox: queue.Queue[object] = queue.Queue()
    client = GeneratorClient([first.address], SECRET, worker=0, host="h", address="a", on_message=inbox.put, fresh=True)
    told: list[object] = []

    def next_of(kind: type) -> Any:
        while not isinstance(message := inbox.get(timeout=60), kind):
            told.append(message)
        return message

    next_of(Joined)
    client.ask_average()
    next_of(Average)
    first.stop()
    serve(port=parse_address(first.address)[1])
    next_of(Joined)
    average = next_of(Average)
    client.average_finished(average.serial, True)
    assert next_of(Commit).serial == average.serial
    assert client._asks == 0
    client.close()


def test_a_standby_serves_until_the_first_is_back(serve: Callable[..., GeneratorService]) -> None:
    first, second, mesh = serve(), serve(), Mesh()
    addresses = [first.address, second.address]
    workers = [
        SimulatedWorker(mesh, addresses, worker=rank, max_steps=10**9, lease_s=0.5, weight=float(rank))
        for rank in range(3)
    ]
    wait_until(lambda: all(worker.commits for worker in workers), "there is work")
    assert second.status()["workers"] == {}
    first.stop()
    wait_until(lambda: sum(second.status()["workers"].values()) == 3, "all have moved")  # type: ignore[attr-defined]
    back = serve(port=parse_address(first.address)[1])
    wait_until(lambda: sum(back.status()["workers"].values()) == 3, "all are back")  # type: ignore[attr-defined]
    commits = [worker.commits for worker in workers]
    wait_until(lambda: all(w.commits > c for w, c in zip(workers, commits, strict=True)), "groups are formed")
    for worker in workers:
        worker.max_steps = 0
    finish(workers)
    assert not any(worker.copies for worker in workers)


# Hostile and careless peers


def test_a_wrong_secret_is_refused_for_good(serve: Callable[..., GeneratorService]) -> None:
    service = serve()
    inbox: queue.Queue[object] = queue.Queue()
    client = GeneratorClient(
        [service.address], b"a secret of another job", worker=0, host="h", address="a", on_message=inbox.put, fresh=True
    )
    refused = inbox.get(timeout=60)
    assert isinstance(refused, Refused)
    assert f"{service.address} does not know this job's secret" in refused.reason
    client.request()
    client.close()
    with pytest.raises(RefusedError):
        RawWorker(service.address, b"yet another secret, too")


def test_two_jobs_on_one_host(serve: Callable[..., GeneratorService]) -> None:
    other_secret, mesh = b"the secret of another job", Mesh()
    first, second = serve(total_steps=50), serve(total_steps=50, secret=other_secret)
    jobs = [(first, SECRET), (second, other_secret)]
    workers = [
        [SimulatedWorker(Mesh(), [service.address], worker=rank, max_steps=20, secret=secret) for rank in range(1)]
        for service, secret in jobs
    ]
    lost = SimulatedWorker(mesh, [second.address], worker=0)
    wait_until(lambda: lost.refused, "it is refused")
    for job in workers:
        finish(job)


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x40" + b"x" * 64, b"\0\0\0\0", b"\xff" * 100, b"\0\0\0\x40half"],
    ids=["http", "wrong proof", "empty", "too long", "half a frame"],
)
def test_strangers_do_no_harm(serve: Callable[..., GeneratorService], data: bytes) -> None:
    service = serve()
    stranger = socket.create_connection(parse_address(service.address), timeout=60)
    stranger.sendall(data)
    worker = RawWorker(service.address)
    assert worker.join(0).worker == 0
    with contextlib.suppress(OSError):  # it may be closed already
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1000):
            pass
    stranger.close()
    worker.say(REQUEST)
    assert worker.hear() == Solo()


def test_many_strangers_do_not_keep_workers_out(serve: Callable[..., GeneratorService]) -> None:
    service = serve()
    where = parse_address(service.address)
    strangers = [socket.create_connection(where, timeout=60) for _ in range(MAX_STRANGERS + 20)]
    worker = RawWorker(service.address)
    assert worker.join(0).worker == 0
    assert len(service._strangers) <= MAX_STRANGERS
    for stranger in strangers:
        stranger.close()


def test_many_workers_may_connect_at_once(serve: Callable[..., GeneratorService]) -> None:
    service = serve()
    links = [Link(service.address, SECRET) for _ in range(2 * MAX_STRANGERS)]

    def serve_all() -> bool:
        for link in links:
            ready, _, _ = select.select([link.socket], [], [], 0)
            link.serve(select.POLLIN * bool(ready) | select.POLLOUT)
        return all(link.is_open for link in links)

    wait_until(serve_all, "all are authenticated")
    for link in links:
        link.close()


@pytest.mark.parametrize("data", [b"\xff" * 8, b"\0\0\0\x05hello", b"\0\0\0\0"])
def test_bad_bytes_of_a_worker_end_its_connection_only(serve: Callable[..., GeneratorService], data: bytes) -> None:
    service = serve()
    victim, hostile = RawWorker(service.address), RawWorker(service.address)
    victim.join(0)
    hostile.join(1)
    hostile.socket.sendall(data)
    assert hostile.is_closed_by_the_service()
    wait_until(lambda: service.status()["workers"] == {"compute": 1}, "it is forgotten")
    victim.say(REQUEST)
    assert victim.hear() == Solo()


def test_an_invalid_message_ends_the_connection(serve: Callable[..., GeneratorService]) -> None:
    service = serve()
    hostile = RawWorker(service.address)
    hostile.join(1)
    hostile.socket.sendall(hostile.session.seal(b"\x93\xa8Finished\xff\xc3"))  # serial -1
    assert hostile.is_closed_by_the_service()


def test_a_replayed_message_ends_the_connection(serve: Callable[..., GeneratorService]) -> None:
    service = serve()
    worker = RawWorker(service.address)
    worker.join(1)
    sealed = worker.session.seal(b"\x91\xa9Heartbeat")
    worker.socket.sendall(sealed)
    worker.hear()
    worker.socket.sendall(sealed)
    assert worker.is_closed_by_the_service()


def test_a_liar_among_workers(serve: Callable[..., GeneratorService]) -> None:
    service, mesh = serve(total_steps=300), Mesh()
    workers = [SimulatedWorker(mesh, [service.address], worker=rank) for rank in range(3)]
    liar = RawWorker(service.address)
    liar.join(9)
    wait_until(lambda: workers[0].commits, "there is work")
    base = max(one.serial for one in workers[0].heard if isinstance(one, Start))
    for serial in range(base, base + 200):
        liar.say(Finished(serial, serial % 2 == 0)).say(AverageFinished(serial, True))
    liar.crash()
    finish(workers)
    assert service.status()["aborted"] == 0


def test_a_service_that_hangs_is_noticed() -> None:
    """It accepts connections, and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        inbox: queue.Queue[object] = queue.Queue()
        client = GeneratorClient(
            [f"127.0.0.1:{listener.getsockname()[1]}"], SECRET, worker=0, host="h", address="a", on_message=inbox.put,
            fresh=True, lease_s=0.3,
        )  # fmt: skip
        client.request()
        told = {type(inbox.get(timeout=60)) for _ in range(2)}
        assert told == {Detached, Solo}
        client.close()


def test_an_average_that_is_asked_for_by_a_client(serve: Callable[..., GeneratorService]) -> None:
    service = serve()
    first, second = RawWorker(service.address), RawWorker(service.address)
    first.join(0)
    second.join(1)
    first.say(AskAverage())
    average = first.hear(Average)
    assert second.hear(Average) == average
    assert average.addresses == ("nowhere", "nowhere")
    for worker in (first, second):
        worker.say(AverageFinished(average.serial, True))
    assert first.hear(Commit).serial == second.hear(Commit).serial == average.serial
    first.say(Heartbeat()).say(Drain())
    second.crash()
    assert first.hear(Average).final


def test_on_message_may_fail_and_close_may_be_called_from_it(serve: Callable[..., GeneratorService]) -> None:
    service, closed = serve(), threading.Event()
    clients: list[GeneratorClient] = []

    def on_message(message: object) -> None:
        if isinstance(message, Solo):
            clients[0].close()
            closed.set()
        elif isinstance(message, Joined):
            clients[0].request()
            raise RuntimeError("the worker's own mistake")

    clients.append(
        GeneratorClient(
            [service.address], SECRET, worker=0, host="h", address="a", on_message=lambda _: None, fresh=True
        )
    )
    clients[0]._on_message = on_message
    clients[0].request()
    assert closed.wait(60)
    wait_until(lambda: service.status()["workers"] == {}, "it has said goodbye")


# Mistakes of whoever starts it


def test_a_port_in_use_and_other_mistakes(serve: Callable[..., GeneratorService]) -> None:
    service = serve()
    host, port = parse_address(service.address)
    with pytest.raises(GeneratorError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; give"):
        GeneratorService(host, port, SECRET).start()
    with pytest.raises(UsageError, match="use 16 or more"):
        GeneratorService(secret=b"")
    with pytest.raises(UsageError, match="total_steps is 0"):
        GeneratorService(secret=SECRET, total_steps=0)
    unstarted = GeneratorService(secret=SECRET)
    for question in (lambda: unstarted.address, lambda: unstarted.instance, unstarted.status):
        with pytest.raises(UsageError, match="start"):
            question()
    unstarted.stop()
    with pytest.raises(UsageError, match="started already"):
        service.start()


def test_a_client_refuses_what_the_service_would(serve: Callable[..., GeneratorService]) -> None:
    service = serve()
    fields: dict[str, Any] = {"worker": 0, "host": "h", "address": "a", "on_message": print, "fresh": True}
    for addresses, changes, sentence in [
        ([], {}, "at least one generator"),
        (["here"], {}, "not an address"),
        ([service.address], {"worker": 4096}, "from 0 to 4095"),
        ([service.address], {"lease_s": 0.0}, "above 0"),
        ([service.address], {"rate_bytes_per_s": float("nan")}, "above 0"),
        ([service.address], {"address": "a" * 1025}, "1025 characters"),
    ]:
        with pytest.raises(UsageError, match=sentence):
            GeneratorClient(addresses, SECRET, **{**fields, **changes})
    client = GeneratorClient([service.address], SECRET, **fields)
    wait_until(lambda: client.is_attached, "it is attached")
    for number in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="must be 0 or more"):
            client.request(step_s=number)
    client.request(steps=3 * 10**6, step_s=1e300, average_s=1e300, average_bytes=1e300, group_size=2)
    client.request(steps=0)
    client.request(steps=0)
    wait_until(lambda: service.status()["steps"] == 3 * 10**6, "all steps are reported")
    client.close()


def test_an_abort_names_the_worker(serve: Callable[..., GeneratorService]) -> None:
    service = serve()
    first, second = RawWorker(service.address), RawWorker(service.address)
    first.join(0)
    second.join(1)
    first.say(REQUEST)
    second.say(REQUEST)
    start = first.hear(Start)
    second.crash()
    abort = first.hear(Abort)
    assert abort.serial == start.serial
    assert "worker 1 (host raw) lost its connection" in abort.reason
