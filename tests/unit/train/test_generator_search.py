"""Where a worker looks for its generator, and when."""

from __future__ import annotations

from paceline.train.decentralized.generator.search import ServiceSearch


def test_all_addresses_in_turn_with_growing_pauses() -> None:
    search, now_s, pauses = ServiceSearch(["a", "b", "c"]), 0.0, []
    for _ in range(10):
        for address in ("a", "b", "c"):
            assert search.next_address() == address
            assert search.next_s <= now_s
            assert search.failed(now_s, 30.0) == (address == "c")
        pauses.append(search.next_s - now_s)
        now_s = search.next_s
    assert 0 < pauses[0] <= 0.05
    assert 0.5 <= pauses[-1] <= 1.0


def test_only_earlier_addresses_while_a_later_one_serves() -> None:
    search = ServiceSearch(["a", "b", "c"])
    search.found("c", 10.0, 30.0)
    assert search.next_s == 40.0
    assert search.next_address() == "a"
    assert not search.failed(40.0, 30.0)
    assert search.next_address() == "b"
    assert search.failed(41.0, 30.0)
    assert search.next_s == 71.0
    search.found("a", 72.0, 30.0)
    assert search.next_address() is None
    search.lost(73.0)
    assert (search.next_address(), search.next_s) == ("a", 73.0)


def test_an_address_of_another_job_is_left_out() -> None:
    search = ServiceSearch(["a", "b", "c"])
    assert not search.refused(0.0, 30.0)
    assert search.next_address() == "b"
    search.found("c", 0.0, 30.0)
    assert search.refused(0.0, 30.0)
    assert search.next_address() is None
    search.lost(1.0)
    assert search.next_address() == "c"
    assert not search.is_hopeless
    assert search.refused(1.0, 30.0)
    assert search.is_hopeless
