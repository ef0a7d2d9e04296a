"""Links are measured by the first rank of each host, and everybody hears the same."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.observe.links import NOBODY, KnownLinks, Links, measure


class _Store:
    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout=10)
            return self._values[key].encode()


def test_all_ranks_agree_on_what_the_leaders_saw() -> None:
    hosts = ["a", "a", "b", "c", "b"]
    rates = {"a": 1e6, "b": 2e6, "c": 4e6}
    asked: set[tuple[int, int, int]] = set()
    store = _Store()

    def of_rank(rank: int) -> Links:
        def exchange(to: int, source: int, num_bytes: int) -> float:
            asked.add((rank, to, source))
            return 1e-3 if num_bytes == 1 else 1e-3 + num_bytes / rates[hosts[rank]]

        return measure(rank, hosts, exchange, store)

    with ThreadPoolExecutor(5) as pool:
        links = list(pool.map(of_rank, range(5)))
    assert links == [links[0]] * 5
    assert links[0].latency_s == 1e-3
    assert [round(rate) for rate in links[0].rate_bytes_per_s] == [1e6, 1e6, 2e6, 4e6, 2e6]
    assert asked == {(0, 2, 3), (2, 3, 0), (3, 0, 2)}


@pytest.mark.parametrize(("num_hosts", "most_senders"), [(2, 1), (8, 7), (9, 4), (20, 6)])
def test_hosts_take_turns_in_receiving_from_several(num_hosts: int, most_senders: int) -> None:
    """Messages between two ranks arrive in order; each is counted where it arrives."""
    ranks = 2 * num_hosts
    hosts = [f"host{rank // 2}" for rank in range(ranks)]
    letters = {(to, source): queue.SimpleQueue[int]() for to in range(ranks) for source in range(ranks)}
    received: dict[int, set[int]] = {rank: set() for rank in range(ranks)}
    store = _Store()

    def of_rank(rank: int) -> Links:
        def exchange(to: int, source: int, num_bytes: int) -> float:
            if to != NOBODY:
                letters[to, rank].put(num_bytes)
            if source != NOBODY:
                assert letters[rank, source].get(timeout=10) == num_bytes
            if to == NOBODY and num_bytes > 1:
                received[rank].add(source)
            return 1e-3 if num_bytes == 1 else 1e-3 + num_bytes / 1e6

        return measure(rank, hosts, exchange, store, down=True)

    with ThreadPoolExecutor(ranks) as pool:
        links = list(pool.map(of_rank, range(ranks)))
    assert links == [links[0]] * ranks
    assert len(links[0].down_bytes_per_s) == ranks
    assert all(down >= up for up, down in zip(links[0].rate_bytes_per_s, links[0].down_bytes_per_s, strict=True))
    assert all(letter.empty() for letter in letters.values())
    for rank in range(ranks):
        assert rank % 2 == 0 or not received[rank], "only the first rank of a host measures"
    assert max(map(len, received.values())) == most_senders
    assert min(len(received[rank]) for rank in range(0, ranks, 2)) >= most_senders - 1


def test_known_links_serve_any_part_of_their_hosts() -> None:
    known = KnownLinks()
    assert known.encode() == ""
    assert KnownLinks.decode("").of(["a"]) is None
    known.learn(["a", "a", "b", "c"], Links(1e-4, (10.0, 10.0, 20.0, 30.0)))
    other = KnownLinks.decode(known.encode())
    assert other.of(["a", "a", "b", "c"]) == Links(1e-4, (10.0, 10.0, 20.0, 30.0))
    assert other.of(["c", "b", "c"]) == Links(1e-4, (30.0, 20.0, 30.0))
    assert other.of(["a", "d"]) is None
    other.learn(["d", "a"], Links(3e-4, (40.0, 11.0)))
    assert other.of(["b", "a", "d"]) == Links(3e-4, (20.0, 11.0, 40.0))
    assert other.of(["a", "b"], down=True) is None
    other.learn(["a", "b"], Links(3e-4, (11.0, 20.0), (55.0, 60.0)))
    again = KnownLinks.decode(other.encode())
    assert again.of(["b", "a"], down=True) == Links(3e-4, (20.0, 11.0), (60.0, 55.0))
    assert again.of(["b", "d"], down=True) is None
    assert again.of(["b", "d"]) == Links(3e-4, (20.0, 40.0))
