"""A new algorithm in twenty lines: written, proven, broken, priced against the others, drawn.

python examples/new_algorithm.py [PICTURE.png]
"""

import sys
from pathlib import Path

import numpy as np

from paceline import Cluster, Collective, Kind, ProofError, Schedule, Transfers, algorithm, compare, plan, verify


@algorithm(Kind.ALL_REDUCE)
def both_ways(collective: Collective) -> tuple[int, Transfers]:
    """Half of the buffer goes round the ring one way, half the other way, at the same time.

    Any n. Steps: 2(n - 1), with two sends and two receives of a rank in each: for ranks with two ports.
    """
    n = collective.num_ranks
    hop, owner = np.ogrid[: n - 1, :n]
    right = Transfers(step=hop, source=(owner + hop) % n, destination=(owner + hop + 1) % n, chunk=owner)
    left = right.relabelled(ranks=[-rank % n for rank in range(n)], chunks=range(n, 2 * n))
    all_gather = Transfers.overlay([right, left])
    return 2 * n, Transfers.sequence([all_gather.mirrored(reduce=True), all_gather])


def main() -> None:
    """Prove it, break it, price it, draw it."""
    collective = Collective(Kind.ALL_REDUCE, num_ranks=8)
    schedule = both_ways(collective)
    proof = verify(schedule)
    print(f"proven: {proof.num_messages} messages, at most {proof.most_sends_at_once} sends of a rank at once")

    without_step_3 = schedule.transfers.selected(schedule.transfers.step != 3)
    try:
        verify(Schedule(collective, schedule.num_chunks, without_step_3, "broken"))
    except ProofError as error:
        print(f"refused: {error}")

    lan = Cluster.preset("lan8")
    for entry in compare(collective, lan, size_bytes=64e6):
        print(f"{entry.algorithm:>18}: {entry.cost.exposed_s:.3f} s, {entry.cost.ratio:.3f} of the limit")

    if len(sys.argv) > 1:
        from paceline.draw.spacetime import draw_spacetime

        draw_spacetime(plan(collective, lan, 64e6, "both_ways"), Path(sys.argv[1]))
        print(f"drew {sys.argv[1]}")


if __name__ == "__main__":
    main()
