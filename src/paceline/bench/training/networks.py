"""The clusters whose ratio of communication to computation is replayed: 64 GPUs, 16 hosts of four."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """What an all-reduce costs there: seconds a byte, and a start-up that the lab does not replay."""

    name: str
    all_reduce_s_per_byte: float
    start_up_s: float
    source: str


NETWORKS = {
    "10gbe": Network("10gbe", 1.70e-9, 7.0e-3, "1.70 ns a byte, published for 64 GPUs on 10 GbE"),
    "100gb": Network("100gb", 0.170e-9, 0.81e-3, "0.170 ns a byte, assumed: a tenth of what 10 GbE takes"),
}
"""Start-ups are MG-WFBP's constants for 64 ranks."""
