"""The shape of the package: what imports what, what is public, what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import paceline

PACKAGE = Path(paceline.__file__).parent

# Each layer may import itself, the layers listed, and errors and units.
ALLOWED = {
    "ir": set(),
    "algorithms": {"ir"},
    "policy": {"algorithms", "ir"},
    "draw": {"policy", "algorithms", "ir"},
    "executors": {"_c10d", "ir"},
    "observe": set(),
    "lab": {"ir"},
    "train": {"backend", "config", "partial", "policy"},
    "integrations": {"train"},
    "bench": {"all_reduce", "config", "train", "lab", "draw", "policy", "algorithms", "ir"},
    "demo": {"backend", "observe", "train", "lab", "draw"},
    "cli": {"config", "train", "demo", "bench", "lab", "draw", "policy", "algorithms", "ir"},
}


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.startswith("paceline")}


def test_arrows_point_down() -> None:
    for layer, below in ALLOWED.items():
        for path in (PACKAGE / layer).rglob("*.py"):
            for name in _imports(path):
                parts = name.split(".")
                target = parts[1] if len(parts) > 1 else ""
                allowed = target in {layer, "errors", "units", "__version__"} | below
                assert allowed, f"{path.relative_to(PACKAGE)} imports {name}"


def test_every_folder_is_a_layer() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(ALLOWED)


def test_public_surface_is_sorted_and_frozen() -> None:
    assert paceline.__all__ == sorted(paceline.__all__)
    for name in paceline.__all__:
        assert hasattr(paceline, name)
    assert set(paceline.__all__) == {
        "ALGORITHMS", "Cluster", "Collective", "Cost", "DataParallel", "Decentralized", "FileFormatError", "GradScaler",
        "Host", "Kind", "Options",
        "PacelineError", "Plan", "Proof", "ProofError", "Schedule", "ScheduleError", "Transfer", "Transfers",
        "UnsupportedError", "UsageError", "algorithm", "all_reduce", "arrivals", "compare", "cost", "hooks", "load",
        "partial_all_reduce", "plan", "prove", "save", "verify",
    }  # fmt: skip


def test_importing_pulls_in_nothing_heavy() -> None:
    code = "import sys, paceline.cli.main; print([m for m in ('matplotlib', 'torch', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert paceline.__version__ == version("paceline")
