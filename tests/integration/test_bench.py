"""The bench with real processes: every operation, every way to fail, and nothing left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.bench import peers
from paceline.bench.contenders import Contender
from paceline.bench.crew import Crew, crews
from paceline.bench.figures import Operation
from paceline.bench.measure import Effort, interleave
from paceline.bench.rank_process.messages import Block, Prepare, Prepared, Timed
from paceline.errors import ContenderError
from paceline.lab import unavailable

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

# A rank that communicates with nobody. FAULT says what goes wrong, and with which rank.
TOY = """
import os, sys, time
from paceline.bench.rank_process.loop import main
from paceline.bench.rank_process.messages import Ready

class Toy:
    def __init__(self, setup):
        self.rank = int(os.environ["RANK"])
        self.ready = Ready(self.rank, setup.num_ranks, {"toy": "1"})
        self.fault = os.environ.get("FAULT", "") if self.rank == 1 else ""
        if self.fault == "refuse":
            raise RuntimeError("I would rather not")
    def prepare(self, order):
        return 3 if self.fault == "wrong" else 0
    def run(self):
        if self.fault == "die":
            os._exit(7)
        if self.fault == "hang":
            time.sleep(1000)
        time.sleep(0.001)
    def barrier(self):
        pass
    def close(self):
        pass

main(sys.argv[1:], Toy)
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(TOY)
    return tmp_path / "toy.py"


def _ignore(what: str, share: float) -> None:
    del what, share


def _measure_toys(toy: Path, fault: str, timeout_s: float = 20.0) -> list[int]:
    contenders = [Contender("well"), Contender("ill", {"FAULT": fault})]
    with crews(contenders, 2, program=toy, timeout_s=timeout_s) as started:
        samples = interleave(started, Prepare("toy", 4, "float32"), Effort(iterations=7, rounds=3), _ignore)
        assert [one.count for one in samples] == [7, 7]
        assert all(len(one.rounds) == 3 for one in samples)
        return [one.wrong for one in samples]


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = _children()
    yield
    assert _children() <= before


def test_contenders_take_turns_and_wrong_elements_are_counted(toy: Path) -> None:
    assert _measure_toys(toy, "wrong") == [0, 3]


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("refuse", "ill: rank 1 failed while joining its group: RuntimeError: I would rather not"),
        ("die", r"ill: rank 1 died while toy of 4 float32 \(exit code 7\)"),
        ("hang", "ill: no answer for 1 s while toy of 4 float32: rank 1 hangs in iteration 0; --timeout waits longer"),
    ],
)
def test_a_fault_is_a_sentence_with_contender_and_rank(toy: Path, fault: str, sentence: str) -> None:
    with pytest.raises(ContenderError, match=sentence):
        _measure_toys(toy, fault, timeout_s=1.0 if fault == "hang" else 20.0)


def test_a_program_that_does_not_start_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit('no such luck')")
    with (
        pytest.raises(ContenderError, match=r"toy: rank 0 ended while starting \(exit code 1\).*no such luck"),
        crews([Contender("toy")], 2, program=tmp_path / "broken.py"),
    ):
        pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped_is_named(toy: Path, number: signal.Signals) -> None:
    what = r"died while resting \(killed by SIGKILL\)" if number is signal.SIGKILL else ".* rank 1 is stopped or stuck"
    with pytest.raises(ContenderError, match=f"toy: .*{what}"):
        _ask_after_signal(toy, number)


def _ask_after_signal(toy: Path, number: signal.Signals) -> None:
    with crews([Contender("toy")], 2, program=toy, timeout_s=2.0) as (crew,):
        os.kill(crew.lines[1].pid, number)
        crew.ask(Block(0, 10), Timed, "resting")


@pytest.fixture(scope="module")
def gloo() -> Iterator[Crew]:
    with crews([Contender("gloo")], 2) as (crew,):
        yield crew


@needs_torch
@pytest.mark.parametrize("operation", [operation.value for operation in Operation])
def test_every_operation_runs_and_is_right(gloo: Crew, operation: str) -> None:
    count = 0 if operation == "barrier" else 10_000
    assert [one.wrong for one in gloo.ask(Prepare(operation, count, "float32"), Prepared, operation)] == [0, 0]
    for timed in gloo.ask(Block(1, 3), Timed, operation):
        assert len(timed.durations_ns) == 3
        assert min(timed.durations_ns) > 0
        assert timed.loop_ns >= sum(timed.durations_ns)


@needs_torch
@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "uint8"])
def test_other_types(gloo: Crew, dtype: str) -> None:
    assert [one.wrong for one in gloo.ask(Prepare("allreduce", 5000, dtype), Prepared, dtype)] == [0, 0]


@pytest.mark.parametrize("name", list(peers.MPI_PEERS))
def test_mpi_peers(name: str) -> None:
    if not peers.installed(name):
        pytest.skip(f"{name} is not in the cache: paceline bench --peers {name} installs it")
    with crews([Contender(name)], 2) as (crew,):
        for operation in Operation:
            count = 0 if operation is Operation.BARRIER else 1000
            prepared = crew.ask(Prepare(operation.value, count, "float32"), Prepared, operation.value)
            assert [one.wrong for one in prepared] == [0, 0]
            assert len(crew.ask(Block(0, 3), Timed, operation.value)) == 2


def _bench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from paceline.cli.main import run; run()", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60, check=False)


@needs_torch
def test_the_command_prints_saves_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = _bench(
        "allreduce", "--backend", "gloo", "--sizes", "4KB,16KB", "--iterations", "4", "--rounds", "2",
        "--json", "a.json", "--plot", "a.png", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # a progress bar is for terminals
    assert [line.split()[:5] for line in done.stdout.splitlines()[1:3]] == [
        ["4000", "1000", "float32", "sum", "gloo"],
        ["16000", "4000", "float32", "sum", "gloo"],
    ]
    saved = json.loads((tmp_path / "a.json").read_text())
    assert [row["time"]["count"] for row in saved["rows"]] == [4, 4]
    assert saved["machine"]["command"].endswith("--plot a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


@needs_torch
@pytest.mark.parametrize("kind", ["sleep", "compute"])
def test_ranks_pause_before_each_call(kind: str, tmp_path: Path) -> None:
    effort = ["--iterations", "4", "--rounds", "2", "--memory", "huge", "--json", "a.json"]
    done = _bench("allgather", "--backend", "gloo", "--sizes", "4KB", f"--{kind}", "5ms", *effort, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"each rank {kind}s for 5 ms" in done.stdout
    assert "tensors in huge pages" in done.stdout
    saved = json.loads((tmp_path / "a.json").read_text())
    assert saved["pause"] == {"kind": kind, "seconds": 0.005}
    (row,) = saved["rows"]
    assert row["time"]["count"] == 4
    assert row["wrong"] == 0
    assert row["arrival_s"] > 0  # two ranks never call in the same nanosecond


@needs_torch
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_in_the_lab_there_is_a_limit(tmp_path: Path) -> None:
    effort = ["--iterations", "2", "--rounds", "2"]
    done = _bench(
        "broadcast", "--backend", "gloo", "--lab", "lan4", "--sizes", "1MB", *effort, "--json", "a.json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert row["limit_s"] == pytest.approx(1e6 * 1514 / 1448 / 125e6)
    assert row["wrong"] == 0
    assert sum(row["sent_bytes"]) == pytest.approx(sum(row["received_bytes"]), rel=0.02)
    assert len(row["sent_bytes"]) == 4
    assert min(row["received_bytes"][1:]) > 1e6 * 1500 / 1460, "every rank but the root receives the megabyte"


@needs_torch
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_algorithms_beside_each_other_and_another_collective_at_the_same_time(tmp_path: Path) -> None:
    effort = ["--iterations", "2", "--rounds", "2", "--json", "a.json"]
    question = ["--sizes", "1MB", "--algorithm", "ring,direct", "--beside", "reducescatter", "--loss", "0.5%"]
    done = _bench("allgather", "--lab", "lan4", *question, *effort, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "a.json").read_text())
    assert [row["contender"] for row in found["rows"]] == ["ring", "direct", "gloo"]
    assert [row["wrong"] for row in found["rows"]] == [0, 0, 0]
    assert (found["subject"], found["beside"], found["loss"]) == ("ring", "reducescatter", 0.005)
    for row in found["rows"]:
        assert min(row["sent_bytes"]) > 2 * 3 / 4 * 1e6, "each host sends three quarters for either"
    assert "allgather beside reducescatter on a group of its own" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sizes", "64MB:4KB"], "ends before it begins"),
        (["--peers", "nccl"], "no peer 'nccl' to measure against; there are gloo, openmpi, mpich"),
        (["--backend", "gloo", "--peers", "gloo"], "each contender is measured once"),
        (["--lab", "lan8", "--ranks", "3"], "lan8 has 8 ranks on 8 hosts, not 3"),
        (["--cluster", "lan2x4", "--ranks", "2"], "lan2x4 has 8 ranks on 2 hosts, not 2"),
        (["--lab", "lan8", "--peers", "openmpi"], "openmpi is measured on one host only: leave out --lab"),
        (["--json", "nowhere/a.json"], "there is no folder"),
        (["--memory", "vast"], "--memory is one of torch, huge, not 'vast'"),
        (["--sleep", "20ms", "--compute", "20ms"], "either --sleep or --compute"),
        (["--sleep", "20ms", "--late", "1:1s"], "leave --sleep and --compute out"),
        (["--sleep", "1min"], "--sleep is more than 0 and at most 10 s"),
        (["--beside", "barrier"], "--beside is one of allgather, allreduce, alltoall, broadcast, reducescatter"),
        (["--beside", "allgather", "--peers", "openmpi"], "openmpi runs one collective at a time here"),
        (["--loss", "1%"], "--loss is of packets between the lab's hosts: give --lab, too"),
        (["--loss", "2", "--lab", "lan4"], "--loss is a share from 0 to less than 100%"),
        (["--late", "1:1s", "--algorithm", "ring,direct"], "--late and --late-sweep take one --algorithm"),
        (["--algorithm", "ring,ring"], "each contender is measured once, but they are ring, ring"),
    ],
)
def test_bad_arguments_are_sentences(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    done = _bench("allreduce", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@needs_torch
def test_an_unknown_backend_is_a_sentence(tmp_path: Path) -> None:
    done = _bench("allreduce", "--backend", "nosuch", "--peers", "none", cwd=tmp_path)
    assert done.returncode == 2
    assert "failed while joining its group: AssertionError: Unknown backend type nosuch" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_ranks_end_with_the_controller(number: signal.Signals, toy: Path, tmp_path: Path) -> None:
    script = tmp_path / "controller.py"
    script.write_text(
        "import sys, time\nfrom pathlib import Path\n"
        "from paceline.bench.contenders import Contender\nfrom paceline.bench.crew import crews\n"
        f"with crews([Contender('toy')], 2, program=Path({str(toy)!r})) as (crew,):\n"
        "    print(*[line.pid for line in crew.lines], flush=True)\n    time.sleep(60)\n"
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": folder},
        ) as process,
    ):
        assert process.stdout is not None
        watched = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
        assert len(watched) == 2
        process.send_signal(number)
        assert process.wait(20) != 0
        for pidfd in watched:
            _wait_for_end(pidfd)
        assert not list(Path(folder).iterdir())


def _wait_for_end(pidfd: int) -> None:
    ready, _, _ = select.select([pidfd], [], [], 20)
    os.close(pidfd)
    assert ready, "a rank outlived its controller"


@needs_torch
def test_the_benchmark_measures_a_case(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "collectives.py"
    effort = ["--only", "barrier, 2 ranks", "--seconds", "0.05", "--rounds", "2", "--no-install", "--json", "a.json"]
    command = [sys.executable, str(script), "--backend", "gloo", *effort]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    goals = int(re.findall(r"(\d+) goals: 0 missed, \1 not measured", done.stdout)[0])  # this one is against Gloo
    assert goals > 1, "goals that were left out count, too"
    (run,) = json.loads((tmp_path / "a.json").read_text())
    assert run["operation"] == "barrier"
    ours = next(row for row in run["rows"] if row["contender"] == "gloo")
    ratio = {"of_medians": 0.5, "of_means": 0.5, "least": 0.25, "most": 0.75}
    better = {"of_medians": 50.0, "of_means": 50.0, "least": 40.0, "most": 60.0}
    run["subject"] = ours["contender"] = "paceline"
    run["rows"] = [
        ours,
        {**ours, "contender": "openmpi", "over_subject": ratio},
        {**ours, "contender": "gloo", "over_subject": better},
    ]
    (tmp_path / "a.json").write_text(json.dumps([run]))
    command = [sys.executable, str(script), "--only", "barrier, 2 ranks", "--read", "a.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert "openmpi" in done.stdout
    assert "0.250-0.750" in done.stdout
    assert f"{goals} goals: 0 missed, {goals - 1} not measured" in done.stdout
    assert done.returncode == 1, "the goals of cases that were left out are not reached"
