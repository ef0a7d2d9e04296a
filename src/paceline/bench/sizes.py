"""Which sizes to measure, and how many elements they are."""

from __future__ import annotations

import re

from paceline.bench.figures import SHARED, Operation
from paceline.errors import UsageError
from paceline.units import parse_size

ITEM_BYTES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int32": 4, "int64": 8,
}  # fmt: skip
_FACTOR = re.compile(r"x?([0-9]{1,4})")
_MOST_BYTES = 1 << 36


def parse_sizes(text: str) -> list[int]:
    """Bytes, ascending: ``4KB:64MB`` in factors of 4, ``4KB:64MB:x2``, or a list, ``4KB,1MB,64MB``.

    The end of a range is always measured, whether or not the factor meets it.
    """
    if ":" not in text:
        sizes = sorted({_size(part) for part in text.split(",")})
    else:
        parts = text.split(":")
        factor = _FACTOR.fullmatch(parts[2].strip()) if len(parts) == 3 else None
        if len(parts) > 3 or (len(parts) == 3 and (factor is None or int(factor.group(1)) < 2)):
            raise UsageError(f"--sizes takes FIRST:LAST or FIRST:LAST:xFACTOR, like 4KB:64MB:x2, not {text!r}")
        size, last, step = _size(parts[0]), _size(parts[1]), int(factor.group(1)) if factor else 4
        if size > last:
            raise UsageError(f"--sizes {text} ends before it begins; write the smaller size first")
        sizes = []
        while size < last:
            sizes.append(size)
            size *= step
        sizes.append(last)
    return sizes


def _size(text: str) -> int:
    size = parse_size(text)
    if not 1 <= size <= _MOST_BYTES:
        raise UsageError(f"a size to measure is 1 B to 64 GiB, not {text.strip()!r}")
    return size


def elements(operation: Operation, size_bytes: int, dtype: str, num_ranks: int, beside: Operation | None = None) -> int:
    """How many elements are measured: what fits into the size, and can be shared equally where ranks share."""
    if dtype not in ITEM_BYTES:
        raise UsageError(f"there is no dtype {dtype!r} to measure; take one of {', '.join(ITEM_BYTES)}")
    if operation is Operation.BARRIER:
        return 0
    unit = num_ranks if {operation, beside} & SHARED else 1
    return max(size_bytes // (ITEM_BYTES[dtype] * unit), 1) * unit
