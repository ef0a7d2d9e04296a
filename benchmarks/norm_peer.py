"""NORM, a reliable-multicast library that is neither MPI nor Gloo: a file to 7 receivers in the lab (root, libnorm1).

    apt-get install libnorm1
    python benchmarks/norm_peer.py --json norm.json
    python benchmarks/norm_peer.py --rates 350 --parity 0,4      # fewer settings

Host 0 of `lan8` has the file in memory and sends it with NORM (NACK-Oriented Reliable Multicast, RFC 5740) to all other
hosts, which keep it in memory. A transfer lasts from the moment when the sender enqueues the file until the last
receiver has it, on the monotonic clock that all hosts of a lab share. Then each receiver checks the contents.

NORM sends at a fixed rate. At too high a rate packets are lost, and their repair takes longer than a lower rate would.
So rates are swept, each without parity and with some that is sent ahead, with segments that fit into a packet and with
larger ones, which the kernel cuts: they cost NORM less work. The three settings with the shortest medians are measured
again, in turns; the best of those is the result. `of the limit` is the time in which the bytes cross one
link, with TCP's headers as in the rows of `paceline bench`, over the time measured.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import select
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from paceline.ir.cluster import ETHERNET_WIRE_FACTOR
from paceline.lab import Lab

GROUP, PORT = "239.192.77.1", 6003
BLOCK_SEGMENTS = 64
BUFFER_BYTES = 64 << 20  # what sender and receivers may hold for repairs
SOCKET_BYTES = 4 << 20
PATIENCE_S = 60.0
_FINALISTS = 3
_RX_OBJECT_COMPLETED = 20
_GRTT_S = 0.005  # NORM assumes 500 ms before it has measured, and waits multiples of it before it repairs


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("session", ctypes.c_void_p),
        ("sender", ctypes.c_void_p),
        ("object", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Setting:
    """How NORM sends: bits a second, parity segments sent ahead in every block of 64, and the size of a segment."""

    rate_mbit_per_s: float
    parity: int
    segment_bytes: int
    size_bytes: int

    def __str__(self) -> str:
        how = f"segments of {self.segment_bytes} B, {self.parity} parity segments ahead"
        return f"{self.rate_mbit_per_s:g} Mbit/s, {how}"


@dataclass
class Measured:
    """Seconds of each transfer with a setting, and receivers that did not have it in time."""

    setting: Setting
    seconds: list[float] = field(default_factory=list)
    missing: int = 0

    @property
    def median_s(self) -> float:
        """Infinite where some receiver never had the file."""
        return statistics.median(self.seconds) if self.seconds and not self.missing else float("inf")


def contents(size_bytes: int) -> bytes:
    """The file: the same bytes in every process, which do not repeat every few packets."""
    block = b"".join(zlib.crc32(number.to_bytes(4, "little")).to_bytes(4, "little") for number in range(25_013))
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def load_norm() -> ctypes.CDLL:
    """NORM's library, with the types of what is called."""
    try:
        norm = ctypes.CDLL("libnorm.so.1")
    except OSError:
        raise SystemExit("libnorm.so.1 is not installed: apt-get install libnorm1") from None
    handle, number, real, yes = ctypes.c_void_p, ctypes.c_uint, ctypes.c_double, ctypes.c_bool
    small = ctypes.c_uint16
    types: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "NormCreateInstance": (handle, (yes,)),
        "NormCreateSession": (handle, (handle, ctypes.c_char_p, small, ctypes.c_uint32)),
        "NormSetMulticastInterface": (yes, (handle, ctypes.c_char_p)),
        "NormSetTxRate": (None, (handle, real)),
        "NormSetGrttEstimate": (None, (handle, real)),
        "NormSetGrttMax": (None, (handle, real)),
        "NormSetBackoffFactor": (None, (handle, real)),
        "NormSetAutoParity": (None, (handle, ctypes.c_ubyte)),
        "NormSetTxSocketBuffer": (yes, (handle, number)),
        "NormSetRxSocketBuffer": (yes, (handle, number)),
        "NormSetTxCacheBounds": (None, (handle, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint32)),
        "NormStartSender": (yes, (handle, ctypes.c_uint16, ctypes.c_uint32, small, small, small, ctypes.c_uint8)),
        "NormStartReceiver": (yes, (handle, ctypes.c_uint32)),
        "NormDataEnqueue": (handle, (handle, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_char_p, number)),
        "NormGetNextEvent": (yes, (handle, ctypes.POINTER(_Event), yes)),
        "NormObjectGetSize": (ctypes.c_int64, (handle,)),
        "NormDataAccessData": (handle, (handle,)),
    }
    for name, (result, arguments) in types.items():
        function = getattr(norm, name)
        function.restype, function.argtypes = result, arguments
    return norm


def open_session(norm: ctypes.CDLL, node: int) -> tuple[Any, Any]:
    """An instance and a session of the group."""
    instance = norm.NormCreateInstance(False)
    session = norm.NormCreateSession(instance, GROUP.encode(), PORT, node)
    if not session or not norm.NormSetMulticastInterface(session, b"eth0"):
        raise SystemExit("NORM cannot make a session")
    return instance, session


def send(setting: Setting) -> None:
    """Host 0: send the file once for each line that comes in, and say when it began."""
    norm = load_norm()
    instance, session = open_session(norm, 1)
    norm.NormSetGrttEstimate(session, _GRTT_S)
    norm.NormSetBackoffFactor(session, 1.0)
    norm.NormSetTxRate(session, setting.rate_mbit_per_s * 1e6)
    norm.NormSetTxCacheBounds(session, 4 * setting.size_bytes, 1, 8)
    norm.NormStartSender(session, 1, BUFFER_BYTES, setting.segment_bytes, BLOCK_SEGMENTS, max(setting.parity, 8), 0)
    norm.NormSetTxSocketBuffer(session, SOCKET_BYTES)
    norm.NormSetAutoParity(session, setting.parity)
    data, event = contents(setting.size_bytes), _Event()
    say("ready")
    for _ in sys.stdin:
        while norm.NormGetNextEvent(instance, ctypes.byref(event), False):
            pass
        begin = time.monotonic()
        if not norm.NormDataEnqueue(session, data, len(data), None, 0):
            raise SystemExit("NORM does not take the file")
        say(repr(begin))


def receive(setting: Setting, node: int) -> None:
    """Any other host: say when each file was complete."""
    norm = load_norm()
    instance, session = open_session(norm, node)
    norm.NormStartReceiver(session, BUFFER_BYTES)
    norm.NormSetRxSocketBuffer(session, SOCKET_BYTES)
    expected, event = zlib.crc32(contents(setting.size_bytes)), _Event()
    say("ready")
    while norm.NormGetNextEvent(instance, ctypes.byref(event), True):
        if event.type == _RX_OBJECT_COMPLETED:
            end = time.monotonic()
            size = norm.NormObjectGetSize(event.object)
            found = zlib.crc32(ctypes.string_at(norm.NormDataAccessData(event.object), size))
            say(repr(end) if found == expected else "wrong")


def say(line: str) -> None:
    """Tell the controller."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def measure(setting: Setting, repeats: int) -> Measured:
    """Transfers with one setting, one after the other, in a lab of their own."""
    with Lab.preset("lan8") as lab:
        parts = [
            lab.hosts[number].popen(
                [sys.executable, __file__, "--part", str(number), *_spelled(setting)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for number in range(8)
        ]
        for part in parts:
            if _line(part) != "ready":
                raise SystemExit("a part did not start")
        time.sleep(0.5)  # for the groups to be joined
        found = Measured(setting)
        for _ in range(repeats):
            _tell(parts[0])
            begin = float(_line(parts[0]))
            deadline = time.monotonic() + PATIENCE_S
            ends = [_line_until(part, deadline) for part in parts[1:]]
            found.missing += sum(end is None for end in ends)
            if found.missing:
                return found
            found.seconds.append(max(float(end) for end in ends if end) - begin)
            time.sleep(0.3)  # until the sender has flushed
        return found


def _spelled(setting: Setting) -> Iterator[str]:
    yield from ("--rates", str(setting.rate_mbit_per_s), "--parity", str(setting.parity))
    yield from ("--segments", str(setting.segment_bytes), "--bytes", str(setting.size_bytes))


def _tell(part: subprocess.Popen[str]) -> None:
    assert part.stdin is not None
    part.stdin.write("go\n")


def _line(part: subprocess.Popen[str]) -> str:
    assert part.stdout is not None
    return part.stdout.readline().strip()


def _line_until(part: subprocess.Popen[str], deadline: float) -> str | None:
    """The next line of a part; None where none has come in time."""
    assert part.stdout is not None
    ready, _, _ = select.select([part.stdout], [], [], max(0.0, deadline - time.monotonic()))
    if not ready:
        return None
    line = _line(part)
    if line in ("", "wrong"):
        raise SystemExit("a receiver has the wrong bytes" if line else "a receiver has died")
    return line


def main() -> None:
    """Sweep, then measure the best setting again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="300,350,400,440,465", help="Mbit/s that NORM sends at, with commas")
    parser.add_argument("--parity", default="0,4", help="parity segments ahead a block, with commas")
    parser.add_argument("--segments", default="1408,8000", help="bytes of a segment, with commas")
    parser.add_argument("--bytes", type=int, default=64_000_000, help="of the file")
    parser.add_argument("--sweeps", type=int, default=3, help="transfers with each setting")
    parser.add_argument("--rounds", type=int, default=3, help="of so many transfers with each of the best three")
    parser.add_argument("--json", type=Path, help="save all figures")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = [
        Setting(float(rate), int(parity), int(segment), options.bytes)
        for rate in options.rates.split(",")
        for parity in options.parity.split(",")
        for segment in options.segments.split(",")
    ]
    if options.part is not None:
        if options.part == 0:
            send(settings[0])
        else:
            receive(settings[0], options.part + 1)
        return
    swept = []
    for setting in settings:
        swept.append(measure(setting, options.sweeps))
        print(f"{setting}: {swept[-1].median_s:.3f} s, {swept[-1].missing} receivers without the file", flush=True)
    finalists = [one.setting for one in sorted(swept, key=lambda found: found.median_s)[:_FINALISTS]]
    again = {setting: Measured(setting) for setting in finalists}
    for _ in range(options.rounds):
        for setting in finalists:
            turn = measure(setting, options.sweeps)
            again[setting].seconds += turn.seconds
            again[setting].missing += turn.missing
    best = min(again.values(), key=lambda found: found.median_s)
    limit_s = options.bytes * ETHERNET_WIRE_FACTOR / 62.5e6
    seconds = sorted(best.seconds)
    print(
        f"NORM at {best.setting}: {options.bytes / 1e6:g} MB to 7 receivers in {best.median_s:.3f} s "
        f"({seconds[0]:.3f} to {seconds[-1]:.3f} in {len(seconds)}), {limit_s / best.median_s:.3f} of the limit"
    )
    if options.json is not None:
        found = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": sys.argv}
        rows = [
            {**vars(one.setting), "seconds": one.seconds, "missing": one.missing} for one in (*swept, *again.values())
        ]
        options.json.write_text(json.dumps({**found, "limit_s": limit_s, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
