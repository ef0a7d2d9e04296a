"""Where there can be no lab, a sentence says why and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import LabError
from paceline.lab import Lab, available


def _with_all_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: "Name:\tpython\nCapEff:\t000001ffffffffff\n")


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _with_all_capabilities(monkeypatch)
    monkeypatch.setattr(available, "_MORE_PLACES", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert available.unavailable() == "the lab needs the command 'ip'; install iproute2"
    (tmp_path / "ip").touch(mode=0o755)
    assert available.unavailable() == "the lab needs the command 'tc'; install iproute2"
    with pytest.raises(LabError, match="'tc'"), Lab(hosts=2):
        pass
    (tmp_path / "tc").touch(mode=0o755)
    assert available.unavailable() is None


@pytest.mark.parametrize("capabilities", ["0000000000000000", "0000000000200000", "0000000000001000"])
def test_half_of_the_rights_are_none(capabilities: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: f"Name:\tpython\nCapEff:\t{capabilities}\n")
    assert "needs root" in str(available.unavailable())


def test_another_system_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert "needs Linux" in str(available.unavailable())
