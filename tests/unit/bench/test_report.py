from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from paceline.bench import peers
from paceline.bench.contenders import Contender
from paceline.bench.figures import Ratio, Summary
from paceline.bench.plot import draw_results
from paceline.bench.results import Machine, Results, Row
from paceline.bench.table import caption, results_table
from paceline.errors import UsageError


def _results(*, limit_s: float | None = 1.0) -> Results:
    rows = []
    for size in (4_000, 64_000_000):
        for name, time_s in (("paceline", 1.25), ("gloo", 2.5)):
            ratio = Ratio(2.0, 2.1, 1.9, 2.2) if name == "gloo" else None
            share = limit_s / time_s if limit_s else None
            summary = Summary(time_s, time_s - 0.1, time_s + 0.1, 1.0, 9.0, time_s, 12)
            rows.append(Row(name, 8, size, size // 4, summary, 1e9, 1.75e9, 0, limit_s, share, ratio))
    return Results(
        operation="allreduce", redop="sum", dtype="float32", num_ranks=8, place="lan8", subject="paceline",
        versions={"paceline": {"torch": "2.13.0"}, "gloo": {"torch": "2.13.0"}},
        environment={"paceline": {"PACELINE_ALGORITHM": "ring"}, "gloo": {}},
        rounds=5, machine=Machine.here(), rows=rows,
    )  # fmt: skip


def _printed(results: Results) -> str:
    out = io.StringIO()
    Console(file=out, width=150).print(results_table(results))
    return out.getvalue()


def test_the_table_has_nccl_tests_columns_and_the_ratios() -> None:
    head, first, second, *_ = _printed(_results()).splitlines()
    for name in ("size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong", "of limit", "/ paceline"):
        assert name in head
    assert " ".join(first.split()) == "4000 1000 float32 sum paceline 1.25 s 1.15 s 1.35 s 1.25 s 12 1 1.75 0 0.800"
    assert " ".join(second.split()) == "gloo 2.5 s 2.4 s 2.6 s 2.5 s 12 1 1.75 0 0.400 2x (1.9-2.2)"


def test_without_a_lab_there_is_no_limit() -> None:
    assert "limit" not in _printed(_results(limit_s=None))


def test_bytes_of_ports_are_columns_where_there_is_a_lab() -> None:
    results = _results()
    assert "all ports" not in _printed(results)
    sent, received = [8e6, 9e6], [40e6, 50e6]
    rows = [msgspec.structs.replace(row, sent_bytes=sent, received_bytes=received) for row in results.rows[:1]]
    counted = msgspec.structs.replace(results, rows=[*rows, *results.rows[1:]])
    head, first, second, *_ = _printed(counted).splitlines()
    for name in ("sent", "received", "all ports"):
        assert name in head
    assert "9 MB 50 MB 107 MB" in " ".join(first.split())
    assert " 0 - - - 0.400" in " ".join(second.split())
    assert any("the most that crossed a host's port" in line for line in caption(counted))


def test_the_caption_tells_of_losses_and_of_what_runs_beside() -> None:
    text = "\n".join(caption(msgspec.structs.replace(_results(), loss=0.01, beside="reducescatter")))
    assert "0.01 of the packets to a host lost" in text
    assert "allreduce beside reducescatter on a group of its own, 8 ranks on lan8" in text
    assert "when allreduce and reducescatter are both done" in text


def test_the_caption_says_where_when_and_how() -> None:
    results = _results()
    text = "\n".join(caption(results))
    for word in ("8 ranks on lan8", f"{results.machine.cores} cores", "torch 2.13.0", "PACELINE_ALGORITHM=ring"):
        assert word in text
    assert results.machine.command in text
    assert results.machine.date in text


def test_results_are_saved_and_drawn(tmp_path: Path) -> None:
    results = _results()
    results.save(tmp_path / "r.json")
    assert msgspec.json.decode((tmp_path / "r.json").read_bytes(), type=Results) == results
    pytest.importorskip("matplotlib")
    draw_results(results, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="cannot write"):
        results.save(tmp_path / "nowhere" / "r.json")


def test_the_variables_in_force_are_those_handed_down_and_the_contenders_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TRANSPORT", "tcp")
    monkeypatch.setenv("PACELINE_ALGORITHM", "bruck")
    found = Contender("paceline", {"PACELINE_ALGORITHM": "ring", "OTHER": "1"}).variables
    assert found["PACELINE_TRANSPORT"] == "tcp"
    assert found["PACELINE_ALGORITHM"] == "ring"
    assert "OTHER" not in found


def test_an_mpi_that_may_not_be_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert peers.folder("mpich") == tmp_path / "paceline" / "peers" / "mpich"
    with pytest.raises(UsageError, match=r"mpich is not installed in .*: leave --no-install out"):
        peers.ensure("mpich", install=False, say=print)
    peers.folder("mpich").mkdir(parents=True)
    assert not peers.installed("mpich")
