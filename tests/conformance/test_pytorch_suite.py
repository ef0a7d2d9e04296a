"""PyTorch's own distributed tests. What Gloo passes with three ranks the backend must pass: a skip is a failure.

The whole suite, also with other numbers of ranks: ``make conformance``, or ``python tests/conformance/pytorch_suite``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from contract import needs

from ranks import BACKEND

SUITE = Path(__file__).with_name("pytorch_suite")
MUST_PASS = (SUITE / "must_pass.txt").read_text().split()
# Written for MPI, as no other backend had these for CPU tensors when they were.
EXCHANGES = ["test_all_to_all", "test_all_to_all_complex", "test_all_to_all_full_group", "test_all_to_all_group"]
EXCHANGES_SINGLE = [
    f"test_all_to_all_single_{kind}{suffix}"
    for kind in ("equal_split", "unequal_split")
    for suffix in ("", "_complex", "_full_group", "_group")
]
LIMIT_S = 300
pytestmark = pytest.mark.timeout(LIMIT_S + 60)
Verdicts = dict[str, dict[str, str]]


def _run(folder: Path, speak: str, tests: list[str]) -> Verdicts:
    options = ["--backend", BACKEND, "--speak", speak, "--limit-s", "60", "--report", str(folder / "report.txt")]
    command = [sys.executable, str(SUITE), *options, "--json", str(folder / "verdicts.json"), *tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode in (0, 1), done.stderr
    return {verdict["name"]: verdict for verdict in json.loads((folder / "verdicts.json").read_text())}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    return _run(tmp_path_factory.mktemp("as_gloo"), "gloo", MUST_PASS)


@pytest.fixture(scope="module")
def exchanges(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    return _run(tmp_path_factory.mktemp("as_mpi"), "mpi", ["test_all_to_all*"])


def _check(verdict: dict[str, str]) -> None:
    assert verdict["outcome"] == "passed", verdict["reason"]


@pytest.mark.parametrize("name", MUST_PASS)
def test_of_pytorch(name: str, verdicts: Verdicts) -> None:
    _check(verdicts[name])


@pytest.mark.parametrize("name", EXCHANGES_SINGLE)
def test_exchange_of_pytorch(name: str, exchanges: Verdicts) -> None:
    _check(exchanges[name])


@needs("uneven lists")
@pytest.mark.parametrize("name", EXCHANGES)
def test_uneven_exchange_of_pytorch(name: str, exchanges: Verdicts) -> None:
    _check(exchanges[name])
