from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from paceline.bench.contenders import Contender
from paceline.bench.figures import Operation, Ratio, Summary, limit_s
from paceline.bench.late import LateQuestion, _cut, late_contender
from paceline.bench.late_report import draw_late, late_caption, late_table
from paceline.bench.measure import Question, Samples
from paceline.bench.rank_process.messages import Timed
from paceline.bench.results import Machine, Results, Row
from paceline.errors import UsageError
from paceline.ir.cluster import Cluster


def test_exposed_is_from_the_last_call_to_the_last_end() -> None:
    samples = Samples()
    early = Timed(durations_ns=[900, 800], loop_ns=3000, begins_ns=[100, 2000])
    late = Timed(durations_ns=[300, 200], loop_ns=3100, begins_ns=[600, 2500])
    samples.add([early, late])
    assert samples.rounds == [pytest.approx([400e-9, 300e-9])]  # 1000 - 600, and 2800 - 2500
    assert samples.arrivals_s == pytest.approx([500e-9, 500e-9])
    assert samples.loop_s == pytest.approx(3100e-9)


def test_without_late_ranks_an_iteration_lasts_as_on_its_slowest_rank() -> None:
    samples = Samples()
    samples.add([Timed([5, 9], 20), Timed([7, 8], 21)])
    assert samples.rounds == [pytest.approx([7e-9, 9e-9])]
    assert samples.arrivals_s == []


def test_the_limit_is_one_buffer_once_a_rank_is_late_enough() -> None:
    cluster = Cluster.preset("lan8")
    one_buffer_s = 64e6 * 1514 / 1448 / 62.5e6
    assert limit_s(Operation.ALL_REDUCE, cluster, 64_000_000) == pytest.approx(1.75 * one_buffer_s)
    assert limit_s(Operation.ALL_REDUCE, cluster, 64_000_000, {3: 5.0}) == pytest.approx(one_buffer_s)


def test_contenders_by_name() -> None:
    assert late_contender("gloo", {3: 1.0}) == Contender("gloo")
    assert late_contender("paceline", {3: 1.0}) == Contender("paceline")
    told = late_contender("paceline", {3: 1.0, 1: 0.5}, "stragglar")
    assert told.environment == {"PACELINE_ALGORITHM": "stragglar", "PACELINE_LATE": "1,3"}
    ring, messages = late_contender("ring", {3: 1.0}), late_contender("messages", {3: 1.0})
    assert (ring.backend, ring.messages, ring.environment["PACELINE_ALGORITHM"]) == (
        "paceline",
        False,
        "allreduce:ring",
    )
    assert (messages.backend, messages.messages) == ("gloo", True)
    cut = _cut(late_contender("messages", {3: 1.0}, "late_ranks"), {3: 1.0}, 4)
    assert (cut.name, cut.backend, cut.environment["PACELINE_ALGORITHM"]) == ("messages k=4", "gloo", "late_ranks/4")
    told = _cut(late_contender("paceline", {3: 1.0}), {3: 1.0}, 8)
    assert told.environment == {"PACELINE_ALGORITHM": "allreduce:stragglar/8", "PACELINE_LATE": "3"}


def _question(operation: Operation = Operation.ALL_REDUCE, num_ranks: int = 4) -> Question:
    return Question(operation, [4000], num_ranks, Contender("paceline"))


@pytest.mark.parametrize(("sweep", "points"), [(None, 1), ("delay", 8), ("size", 1), ("ranks", 2), ("pieces", 1)])
def test_how_many_points_a_sweep_has(sweep: str | None, points: int) -> None:
    assert LateQuestion(_question(), {3: 1.0}, sweep).num_points == points


def test_questions_that_make_no_sense() -> None:
    for question, late, sweep, sentence in (
        (_question(Operation.BROADCAST), {1: 1.0}, None, "measured with allreduce"),
        (_question(), {4: 1.0}, None, "rank 4 cannot be late"),
        (_question(), {}, None, "at least one rank"),
        (_question(), dict.fromkeys(range(4), 1.0), None, "not all of them"),
        (_question(num_ranks=2), {1: 1.0}, "ranks", "goes from 3 to --ranks, which is 2"),
        (_question(), {1: 1.0}, "hosts", "takes one of delay, size, ranks, pieces"),
    ):
        with pytest.raises(UsageError, match=sentence):
            LateQuestion(question, late, sweep)


def _results(sweep: str | None) -> Results:
    rows = []
    for point in range(1, 4):
        for name, time_s in (("paceline", 1.25), ("gloo", 2.5)):
            ratio = Ratio(2.0, 2.1, 1.9, 2.2) if name == "gloo" else None
            summary = Summary(time_s, time_s - 0.1, time_s + 0.1, 1.0, 9.0, time_s, 12)
            cut = sweep == "pieces" and name == "paceline"
            rows.append(
                Row(
                    contender=f"{name} k={point}" if cut else name, num_ranks=point if sweep == "ranks" else 8,
                    size_bytes=1000 * point if sweep == "size" else 1000, count=250, time=summary,
                    algbw_bytes_per_s=1e9, busbw_bytes_per_s=1.75e9, wrong=0, limit_s=1.0,
                    share_of_limit=1.0 / time_s, over_subject=ratio,
                    late_s={3: 0.5 * point if sweep == "delay" else 0.5}, arrival_s=0.5, pieces=point if cut else None,
                )
            )  # fmt: skip
    versions = {"paceline": {"torch": "2.13.0"}, "gloo": {"torch": "2.13.0"}}
    return Results(
        operation="allreduce", redop="sum", dtype="float32", num_ranks=8, place="lan8", subject="paceline",
        versions=versions, environment={"paceline": {"A": "b"}}, rounds=5, machine=Machine.here(), rows=rows,
        sweep=sweep,
    )  # fmt: skip


def test_the_table_names_each_point_once() -> None:
    out = io.StringIO()
    Console(file=out, width=150).print(late_table(_results("delay")))
    head, first, second, third, *_ = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert head == "ranks size late contender exposed 25% 75% n #wrong of limit / first (rounds)"
    assert first == "8 1000 3:500 ms paceline 1.25 s 1.15 s 1.35 s 12 0 0.800"
    assert second == "gloo 2.5 s 2.4 s 2.6 s 12 0 0.400 2x (1.9-2.2)"
    assert third.startswith("8 1000 3:1 s paceline")
    text = "\n".join(late_caption(_results("delay")))
    assert "paceline: torch 2.13.0, A=b" in text
    assert "from the moment the last rank calls until the last rank is done" in text


@pytest.mark.parametrize("sweep", [None, "delay", "size", "ranks", "pieces"])
def test_every_sweep_is_drawn_and_saved(sweep: str | None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_late(_results(sweep), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    _results(sweep).save(tmp_path / "a.json")
    assert msgspec.json.decode((tmp_path / "a.json").read_bytes(), type=Results) == _results(sweep)
