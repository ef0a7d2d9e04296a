"""The command line, as a user meets it: a process, its output and its exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.bench.figures import Operation
from paceline.cli.main import run


def paceline(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    code = "from paceline.cli.main import run; run()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=cwd, timeout=100, check=False
    )


def test_version_and_help() -> None:
    assert paceline("--version").stdout.startswith("paceline 0.")
    for verb in ("plan", "verify", "compare", "tour", "demo"):
        done = paceline(verb, "--help")
        assert done.returncode == 0
        assert "Example" in done.stdout


def test_bench_names_its_verbs() -> None:
    done = paceline("bench", "--help")
    assert done.returncode == 0
    verbs = [line.split()[0] for line in done.stdout.partition("Commands:\n")[2].splitlines()]
    assert verbs == [*map(str, Operation), "training", "decentralized"]
    wrong = paceline("bench", "gather", "--sizes", "4KB")
    assert wrong.returncode == 2
    assert wrong.stderr == f"paceline: error: 'gather' cannot be measured; there are {', '.join(verbs)}\n"
    assert "bench [OPTIONS] COMMAND" in paceline("bench").stderr


def test_a_collective_is_known_however_it_is_written() -> None:
    for verb in ("allreduce", "all-reduce", "All_Reduce"):
        wrong = paceline("bench", verb, "--sizes", "64MB:4KB")
        assert wrong.returncode == 2
        assert "ends before it begins" in wrong.stderr


@pytest.mark.parametrize("ratio", ["0", "-1", "4/0", "nan", "1e999", "half"])
def test_a_ratio_is_a_positive_number(ratio: str) -> None:
    wrong = paceline("bench", "training", "--model", "uniform", "--ratio", ratio)
    assert wrong.returncode == 2
    assert wrong.stderr == (
        f"paceline: error: --ratio is communication over computation, like 1.2 or 4/3, not {ratio!r}\n"
    )


def test_plan_shows_proof_cost_and_ring(tmp_path: Path) -> None:
    done = paceline(
        "plan", "allreduce", "--ranks", "8", "--algorithm", "stragglar", "--late", "3", "--pieces", "1",
        "--json", "s.json", "--svg", "s.svg", "--png", "s.png", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for word in (
        "stragglar: allreduce of 8 ranks",
        "0>1:0+",
        "3>7:0+",
        "proven",
        "after arrival",
        "ring",
        "rank 3 late",
    ):
        assert word in done.stdout
    again = paceline("verify", "s.json", cwd=tmp_path)
    assert (again.returncode, "proven" in again.stdout) == (0, True)
    assert ElementTree.parse(tmp_path / "s.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_plan_takes_the_best_by_default() -> None:
    assert "stragglar: allreduce" in paceline("plan", "all-reduce", "--cluster", "lan8", "--late", "3:2s").stdout
    assert "multicast: broadcast" in paceline("plan", "broadcast", "--ranks", "12", "--root", "5").stdout


def test_several_late_ranks_in_either_way() -> None:
    for late in (["--late", "3:1s,5:2s"], ["--late", "3:1s", "--late", "5:2s"]):
        assert (
            "rank 3 late by 1 s, rank 5 late by 2 s"
            in paceline("plan", "allreduce", "--algorithm", "ring", *late).stdout
        )


def test_full_output_gets_a_sentence() -> None:
    code = "from paceline.cli.main import run; run()"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "plan", "allreduce"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode != 0
    assert "cannot write the output" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_too_large_is_named() -> None:
    done = paceline("plan", "allreduce", "--ranks", "4096")
    assert done.stdout.startswith("not priced, as their schedules would be too large: bruck, direct, ")
    none = paceline("plan", "alltoall", "--ranks", "2000")
    assert (none.returncode, "take fewer ranks" in none.stderr) == (2, True)


def test_plan_for_one_rank() -> None:
    done = paceline("plan", "allreduce", "--ranks", "1", "--algorithm", "ring")
    assert (done.returncode, "proven" in done.stdout) == (0, True)


def test_compare(tmp_path: Path) -> None:
    done = paceline("compare", "allreduce", "--ranks", "4", "--size", "1MB", "--late", "3:500ms")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert any("ring / it" in line for line in lines)
    assert sum(line.startswith(("ring", "stragglar", "bruck", "late_ranks", "doubling")) for line in lines) == 6
    drawn = paceline("compare", "barrier", "--ranks", "4", "--plot", str(tmp_path / "c.png"))
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "c.png").stat().st_size > 1000


def test_tour(tmp_path: Path) -> None:
    done = paceline("tour", "--picture", "d.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("proven", "refused", "[missing]", "[counted-twice]", "stragglar", "late_ranks"):
        assert word in done.stdout.replace("\n", "")
    assert (tmp_path / "d.png").stat().st_size > 1000


def test_verify_refuses_with_exit_code_1(tmp_path: Path) -> None:
    paceline("plan", "allreduce", "--ranks", "4", "--algorithm", "ring", "--json", "r.json", cwd=tmp_path)
    text = (tmp_path / "r.json").read_text()
    (tmp_path / "bad.json").write_text(text.replace("[true,", "[false,", 1))
    done = paceline("verify", "bad.json", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("paceline: refused: ring schedule, allreduce of 4 ranks: ")
    assert "transfer 0" in done.stderr


def test_names_from_files_are_no_markup(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('name = "[/bold]"\n[[hosts]]\ncount = 4\n')
    done = paceline("plan", "allreduce", "--cluster", "c.toml", "--json", "[red]r.json", cwd=tmp_path)
    assert (done.returncode, "[/bold]: 4 ranks" in done.stdout, "saved [red]r.json" in done.stdout) == (0, True, True)
    text = (tmp_path / "[red]r.json").read_text()
    (tmp_path / "s.json").write_text(text.replace('"algorithm":"', '"algorithm":"[/x]'))
    assert "[/x]" in paceline("verify", "s.json", cwd=tmp_path).stdout


WRONG = [
    (["plan", "allreduces"], "there is no collective 'allreduces'"),
    (["plan", "allreduce", "--late", "9"], "rank 9 cannot be late: the ranks are 0 to 7"),
    (["plan", "allreduce", "--late", "three"], "--late takes RANK or RANK:DURATION"),
    (["plan", "allreduce", "--late", "3:500"], "'500' is not a duration"),
    (["plan", "allreduce", "--late", "3:1e308s"], "lateness is 0 to"),
    (["plan", "allreduce", "--cluster", "x" * 5000], "there is no cluster"),
    (["plan", "allreduce", "--algorithm", "ring", "--pieces", "1000000"], "take fewer ranks or pieces"),
    (["plan", "allreduce", "--algorithm", "stragglar", "--late", "3", "--pieces", "100000"], "take fewer pieces"),
    (["plan", "allreduce", "--algorithm", "late_ranks", "--pieces", "1000"], "takes too long"),
    (["plan", "alltoall", "--ranks", "1025", "--algorithm", "pairwise"], "at most 1024 ranks"),
    (["plan", "allreduce", "--late", "3,3"], "names rank 3 twice"),
    (["plan", "allreduce", "--size", "64furlongs"], "is not a size; write it like 64MB"),
    (["plan", "allreduce", "--ranks", "0"], "ranks"),
    (["plan", "allreduce", "--ranks", "3", "--cluster", "lan8"], "lan8 has 8 ranks, not 3"),
    (["plan", "allreduce", "--cluster", "lan9"], "there is no cluster 'lan9'"),
    (["plan", "allreduce", "--cluster", "none.toml"], "cannot read none.toml"),
    (["plan", "allreduce", "--algorithm", "rign"], "there is no algorithm 'rign'"),
    (["plan", "allreduce", "--algorithm", "chain"], "chain is an algorithm for broadcast, reduce"),
    (["plan", "allreduce", "--pieces", "4"], "name it with --algorithm"),
    (["plan", "allreduce", "--algorithm", "bruck", "--pieces", "4"], "bruck has no parameter 'pieces'"),
    (["plan", "allreduce", "--png", "picture.gif"], "ends in .png"),
    (["plan", "allreduce", "--json", "schedule.txt"], "saved as .json"),
    (["plan", "broadcast", "--root", "8"], "root 8 is not one of the ranks"),
    (["plan", "allreduce", "--ranks", "99999"], "1 to 32768 ranks"),
    (["compare", "allreduce", "--plot", "no/such/folder/c.png"], "there is no folder"),
    (["verify", "none.json"], "cannot read none.json"),
    (["demo", "--picture", "demo.gif"], "a picture is saved as .png"),
    (["demo", "--picture", "no/such/folder/demo.png"], "there is no folder"),
    (["demo", "--picture", "folder.png"], "cannot write folder.png: Is a directory"),
    (["demo", "--late", "200"], "'200' is not a duration"),
    (["demo", "--late", "5min"], "--late is at most 10 s"),
    (["demo", "--rate", "fast"], "is not a rate"),
    (["demo", "--iterations", "2"], "--iterations"),
    (["demo", "--place", "moon"], "moon"),
    (["juggle"], "No such command"),
    (["plan"], "Missing argument"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG)
def test_wrong_arguments_get_a_sentence_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])  # in this process: starting one takes longer than these
    with pytest.raises(SystemExit) as end:
        run()
    assert end.value.code == 2
    assert sentence.lower() in capsys.readouterr().err.lower()


def test_a_process_says_it_without_a_traceback() -> None:
    for arguments, sentence in (WRONG[0], WRONG[-1]):
        done = paceline(*arguments)
        assert done.returncode == 2
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_gets_no_traceback() -> None:
    code = "from paceline.cli.main import run; run()"
    command = [sys.executable, "-c", code, "plan", "allreduce", "--ranks", "64", "--algorithm", "ring", "--all"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("ring: allreduce of 64 ranks")
        process.stdout.close()
        assert process.stderr.read() == ""
        process.wait(timeout=60)
