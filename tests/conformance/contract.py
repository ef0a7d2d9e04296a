"""What a backend is asked for, in values that make wrong results show, and what Gloo does not have of it."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from ranks import BACKEND

WORLD_SIZES = (1, 2, 3, 4)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)

# Each is skipped on Gloo and tested everywhere else. The words appear in `needs(...)` and `has(...)`.
GLOO_LACKS = frozenset(
    {
        "int16",  # every collective: "Invalid scalar type"
        "complex gather",  # "Invalid scalar type", in gather alone
        "bool SUM",  # adds bytes: true + true is stored as 2
        "PREMUL_SUM",
        "unusual types",  # uint16, float8 and the like: "Invalid scalar type", even where nothing is added
        "stacked outputs",  # all_gather_single into (n, ...) rather than (n * ..., ...): "invalid tensor size"
        "uneven lists",  # in all_gather and all_to_all: "invalid tensor size"
        "futures of reduce_scatter",  # "getFuture not implemented"
        "strided tensors",  # reads and writes the wrong elements, silently
    }
)


def has(feature: str, backend: str = BACKEND) -> bool:
    """Whether the backend is expected to have a feature."""
    return backend != "gloo" or feature not in GLOO_LACKS


def needs(feature: str) -> pytest.MarkDecorator:
    """Skip the test on Gloo, which lacks the feature."""
    return pytest.mark.skipif(not has(feature), reason=f"Gloo lacks: {feature}")


def dtypes_here(*dtypes: torch.dtype) -> list[torch.dtype]:
    """Those of the types that the backend is expected to serve."""
    return [dtype for dtype in dtypes if dtype is not torch.int16 or has("int16")]


def numbers(rank: int, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small numbers that differ by rank and place; sums and products of a few are exact in every type."""
    size = torch.Size((shape,) if isinstance(shape, int) else shape)
    integers = (torch.arange(size.numel()) * 7 + rank * 3).remainder(5) + 1
    if dtype is torch.bool:
        return integers.remainder(2).bool().reshape(size)
    if dtype.is_complex:
        return torch.complex(integers.double(), -2.0 * rank * integers.double()).to(dtype).reshape(size)
    return integers.to(dtype).reshape(size)


def same(result: torch.Tensor, wanted: torch.Tensor, what: object = "", roundings: int = 0) -> None:
    """Equal in type, shape and every element but for so many roundings. Bytes of booleans count: a 2 is no true."""
    if result.dtype is torch.bool:
        assert result.dtype is wanted.dtype, what
        result, wanted = result.view(torch.uint8), wanted.view(torch.uint8)
    rtol = roundings * torch.finfo(wanted.dtype).eps if roundings else 0.0
    assert_close(result, wanted, rtol=rtol, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")
