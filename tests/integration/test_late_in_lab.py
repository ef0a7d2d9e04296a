"""A late rank between hosts is found by itself, planned around, and forgotten when it recovers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.lab import Lab

RANK = Path(__file__).with_name("late_lab_rank.py")


@pytest.mark.lab(hosts=4, up="500mbit", down="500mbit")
def test_a_late_rank_is_found_and_recovers(lab: Lab) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    told = {"PACELINE_LATENCY": "10us"}  # what is measured on a busy machine may make 4 MB too small for decisions
    ranks = [host.popen([sys.executable, str(RANK)], env=told, **pipes) for host in lab.hosts]
    ended = [rank.communicate(timeout=120) for rank in ranks]
    said = [json.loads(out) for out, err in ended if out or pytest.fail(err)]
    choices = said[0]["choices"]
    assert len(choices) == 40
    assert all(choice.split(":")[0] == "2" for choice in choices[8:16]), choices
    assert choices[-8:] == [""] * 8, choices
    for one in said:
        assert any("late 2" in line and "stragglar(late=2" in line for line in one["chosen"]), one
    assert all(one["choices"] == [] for one in said[1:])
    assert "rank 2 arrives" in ended[0][1]
    assert "rank 2 arrives in time again" in ended[0][1]
