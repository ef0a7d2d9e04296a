from __future__ import annotations

import pytest

from paceline.bench.figures import Operation
from paceline.bench.sizes import elements, parse_sizes
from paceline.errors import UsageError


def test_a_range_goes_in_factors_and_ends_where_it_says() -> None:
    assert parse_sizes("4KiB:64KiB") == [4096, 16384, 65536]
    assert parse_sizes("4KB:64MB") == [4000 * 4**power for power in range(7)] + [64_000_000]
    assert parse_sizes("1KB:8KB:x2") == parse_sizes("1KB:8KB:2") == [1000, 2000, 4000, 8000]
    assert parse_sizes("1MB:1MB") == [1_000_000]


def test_a_list_is_sorted_and_has_each_size_once() -> None:
    assert parse_sizes("1MB, 4KB,1000KB") == [4000, 1_000_000]


@pytest.mark.parametrize(
    "text", ["", "4KB:", "64MB:4KB", "4KB:64MB:x1", "4KB:64MB:y", "1:2:3:4", "0", "0:4", "99999GB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_sizes(text)


def test_elements_fit_and_can_be_shared() -> None:
    assert elements(Operation.ALL_REDUCE, 4000, "float32", 3) == 1000
    assert elements(Operation.ALL_GATHER, 4000, "float32", 3) == 999
    assert elements(Operation.REDUCE_SCATTER, 1, "float64", 8) == 8
    assert elements(Operation.BROADCAST, 3, "float32", 2) == 1
    assert elements(Operation.BARRIER, 4000, "float32", 3) == 0
    with pytest.raises(UsageError, match="bfloat16"):
        elements(Operation.ALL_REDUCE, 4000, "complex64", 2)
