"""An all-reduce whose reduce-scatter goes on while finished chunks are multicast.

A port that sends at full speed all the time needs one buffer time, since each rank has to send (n - 1)/n of a buffer as
partial sums and 1/n as results. A ring whose ranks all send partial sums in every step has no room for a multicast: a
rank that takes the time for one delays all behind it. So the steps get holes that move round the ring with the sums.

In step s, the ranks r with r - s = d (mod n) lie on *diagonal* d. A partial sum that starts at rank r in step s is at
rank r + 1 in step s + 1, and so stays on its diagonal for the n - 1 steps of its way. Diagonals 1 to n - 1 carry one
sum after the other; diagonal 0 carries none, and there a rank multicasts. So in each step n - 1 ranks send sums,
the remaining one multicasts a chunk that it has summed, and no rank ever sends two messages in a step.
"""

from __future__ import annotations

import numpy as np

from paceline.algorithms.registry import Draft, algorithm
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfers


@algorithm(Kind.ALL_REDUCE, min_ranks=2, multicast=True)
def multicast_ring(collective: Collective, *, pieces: int = 1) -> Draft:
    """Reduce-scatter round the ring with a hole in each step, in which one rank multicasts what it has summed.

    Any n >= 2, n ``pieces`` chunks; best with ``pieces`` a multiple of n - 1. Steps: about n ``pieces``, and one more
    in which the last n chunks are multicast. Bytes: a rank sends one buffer and receives 2(n - 1)/n. Where a port
    receives at least twice as fast as it sends, it takes about the time to send one buffer. Lateness: as for the ring.

    Source: Paceline's own, from the multicast all-gather of Khalilov et al., 2024.
    """
    ranks = collective.num_ranks
    cycles, rest = divmod(pieces, ranks - 1)
    num_turns = cycles * ranks + (rest + 1 if rest else 0)

    # In each turn, a diagonal carries one sum from its first rank all the way to the owner. The owner that follows from
    # turn and diagonal has one turn in n without a sum, which would be on diagonal 0.
    turn, diagonal = (grid.ravel() for grid in np.mgrid[:num_turns, 1:ranks])
    owner = (diagonal - turn - 1) % ranks
    turns_without = (turn - 1 - (-owner - 1) % ranks) // ranks + 1
    piece = turn - turns_without
    wanted = piece < pieces
    turn, diagonal, owner, piece = (column[wanted] for column in (turn, diagonal, owner, piece))
    chunk = owner * pieces + piece

    hop = np.arange(ranks - 1)[:, None]
    num_sums, num_messages = len(chunk), len(chunk) * (ranks - 1)
    after_sums = num_turns * (ranks - 1)
    multicast_at = np.minimum((turn + 1) * (ranks - 1) + diagonal, after_sums)
    others = (owner[:, None] + np.arange(1, ranks)) % ranks
    return ranks * pieces, Transfers(
        step=np.concatenate(((turn * (ranks - 1) + hop).ravel(), multicast_at)),
        source=np.concatenate((((owner + 1 + hop) % ranks).ravel(), owner)),
        destination=np.concatenate((((owner + 2 + hop) % ranks).ravel(), others.ravel())),
        chunk=np.concatenate((np.tile(chunk, ranks - 1), chunk)),
        reduce=np.arange(num_messages + num_sums) < num_messages,
        first=np.concatenate((np.arange(num_messages), num_messages + (ranks - 1) * np.arange(num_sums + 1))),
    )
