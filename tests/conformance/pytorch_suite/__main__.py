"""Run PyTorch's distributed suite on a backend: ``python tests/conformance/pytorch_suite --backend paceline``.

Prints a line a test and a summary, writes the summary with all tracebacks to the report, and what the ranks print to a
file beside it. The exit code is 0 if nothing failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from suite import Verdict

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}


def main() -> int:
    """Run the tests named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="names of tests, or patterns like test_all_to_all* (default: all)")
    parser.add_argument("--backend", default=os.environ.get("PACELINE_TEST_BACKEND", "paceline"))
    parser.add_argument("--speak", default="gloo", help="the backend PyTorch's suite believes in (default: gloo)")
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--limit-s", type=int, default=180, help="time limit for one test (default: 180)")
    parser.add_argument("--report", type=Path, default=Path("out/conformance.txt"))
    parser.add_argument("--json", type=Path, help="write the verdicts here as well")
    options = parser.parse_args()
    os.environ.update(LOOPBACK, BACKEND=options.speak, WORLD_SIZE=str(options.world_size))

    from suite import names, run  # reads the environment

    chosen = [name for name in names() if not options.tests or any(fnmatch(name, test) for test in options.tests)]
    if unknown := [test for test in options.tests if not any(fnmatch(name, test) for name in chosen)]:
        parser.error(f"PyTorch's suite has no {', '.join(unknown)}")

    options.report.parent.mkdir(parents=True, exist_ok=True)
    terminal = os.fdopen(os.dup(1), "w", buffering=1)
    with options.report.with_suffix(".log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    verdicts = []
    started_s = time.monotonic()
    for name in chosen:
        verdict = run(name, options.backend, options.limit_s)
        verdicts.append(verdict)
        if verdict.outcome != "skipped":
            terminal.write(f"{verdict.outcome} {name} ({verdict.duration_s:.1f} s)\n")
    heading = f"PyTorch's distributed suite on {options.backend}, {options.world_size} ranks"
    summary = summarize(heading, verdicts, time.monotonic() - started_s)
    terminal.write(f"\n{summary}")
    failures = [verdict for verdict in verdicts if verdict.outcome == "failed"]
    details = "".join(f"\n{'=' * 120}\n{failure.name}\n{failure.reason}" for failure in failures)
    options.report.write_text(summary + details)
    if options.json:
        options.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts]))
    return 1 if failures else 0


def summarize(heading: str, verdicts: Sequence[Verdict], duration_s: float) -> str:
    """Counts, the names of failures with their last line, and the skipped tests by reason."""
    by_outcome = defaultdict(list)
    by_reason = defaultdict(list)
    for verdict in verdicts:
        by_outcome[verdict.outcome].append(verdict)
        if verdict.outcome == "skipped":
            by_reason[verdict.reason].append(verdict.name)
    counts = ", ".join(f"{len(by_outcome[outcome])} {outcome}" for outcome in ("passed", "failed", "skipped"))
    lines = [f"{heading}: {counts} in {duration_s:.0f} s"]
    lines += [f"  failed: {failure.name}: {_gist(failure.reason)}" for failure in by_outcome["failed"]]
    by_number = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    lines += [f"  skipped {len(skipped)}: {reason}" for reason, skipped in by_number]
    return "\n".join(lines) + "\n"


def _gist(traceback: str) -> str:
    """The last line that names an error; PyTorch's tracebacks go on with advice on how to repeat the test."""
    named = re.findall(r"^\w+(?:Error|Exception|Skip)?: .*", traceback, re.MULTILINE)
    return (named or traceback.strip().splitlines() or ["?"])[-1][:200]


if __name__ == "__main__":
    sys.exit(main())
