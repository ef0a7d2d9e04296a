"""One shot: everybody sends everything to everybody, once."""

from __future__ import annotations

import numpy as np

from paceline.algorithms.registry import Draft, algorithm
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfers


@algorithm(Kind.ALL_REDUCE)
def one_shot(collective: Collective) -> Draft:
    """Every rank sends its whole buffer to all others, which add up what they get.

    Any n. Steps: 1. Bytes a rank sends and receives: n - 1 buffers; the fastest for a few ranks and a few bytes.
    Each rank sets aside the n - 1 buffers that arrive before its own is sent. Lateness: the late rank's
    own n - 1 buffers each way remain after its arrival.

    Source: folklore; "one-shot" kernels of GPU inference libraries.
    """
    distance, rank = np.ogrid[1 : collective.num_ranks, : collective.num_ranks]
    return 1, Transfers(
        step=0,
        source=rank + 0 * distance,
        destination=(rank + distance) % collective.num_ranks,
        chunk=0,
        reduce=True,
    )
