"""Which parameter goes where: buckets in the order of the forward pass, cut into equal shards. Pure.

A bucket is one flat buffer of one kind (dtype and device). Parameters lie in it one after another; it is padded so that
every rank's shard has the same length. A parameter may span shards: what a rank owns of it is a *piece*.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

ALIGNMENT = 16
"""Shards are multiples of this many elements, for vectorised additions."""

FIRST_BYTES = 250_000
"""The first bucket is at most this large: its reduce-scatter ends last and its all-gather is awaited first. So is the
last: nothing can be reduced before its gradients are there, and nothing is computed behind what arrives last."""

GROWTH = 1.5
"""The limit of a bucket is so many times that of the one before it, up to the threshold. With 2, the first layers wait
longer for their whole bucket than fewer buckets save. Towards the end limits halve: there it is the links that wait,
and where that matters they take longer for a bucket than its layers."""


@dataclass(frozen=True)
class Shape:
    """What a layout needs to know of a parameter; only parameters of the same kind share a bucket."""

    numel: int
    element_bytes: int
    kind: Hashable = None

    @property
    def size_bytes(self) -> int:
        """Of the whole parameter."""
        return self.numel * self.element_bytes


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket, in elements."""

    index: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Piece:
    """The elements ``start`` to ``end`` of a parameter, found at ``offset`` of a shard."""

    index: int
    start: int
    end: int
    offset: int

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.end - self.start


@dataclass(frozen=True)
class Layout:
    """A bucket: its slots, and the length of a shard in elements."""

    slots: tuple[Slot, ...]
    shard_numel: int
    num_ranks: int

    @property
    def numel(self) -> int:
        """Of the whole buffer, padding included."""
        return self.shard_numel * self.num_ranks

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What a rank's shard holds, in order."""
        begin, end = rank * self.shard_numel, (rank + 1) * self.shard_numel
        found = []
        for slot in self.slots:
            first, last = max(begin, slot.offset), min(end, slot.offset + slot.numel)
            if first < last:
                found.append(Piece(slot.index, first - slot.offset, last - slot.offset, first - begin))
        return tuple(found)


@dataclass
class _Filling:
    limit_bytes: int
    size_bytes: int = 0
    indexes: list[int] = field(default_factory=list)


def lay_out(
    shapes: Sequence[Shape],
    order: Sequence[int],
    threshold_bytes: int,
    num_ranks: int,
    first_bytes: int = FIRST_BYTES,
) -> list[Layout]:
    """Fill buckets up to the threshold, in this order, the first and the last ones less.

    A larger parameter has a bucket of its own, which does not count as one of the first: an embedding is large, and
    computes next to nothing, so what follows it is awaited as soon.

    >>> [len(bucket.slots) for bucket in lay_out([Shape(10, 4)] * 16, range(16), 160, num_ranks=2, first_bytes=40)]
    [1, 1, 2, 3, 4, 3, 1, 1]
    """
    opened: dict[Hashable, _Filling] = {}
    filled: list[_Filling] = []
    growing_bytes: float = min(threshold_bytes, first_bytes)
    left_bytes = sum(shapes[index].size_bytes for index in order)
    for index in order:
        shape = shapes[index]
        bucket = opened.get(shape.kind)
        if bucket is None or bucket.size_bytes + shape.size_bytes > bucket.limit_bytes:
            if filled and filled[-1].size_bytes <= filled[-1].limit_bytes:
                growing_bytes = min(threshold_bytes, GROWTH * growing_bytes)
            bucket = opened[shape.kind] = _Filling(int(min(growing_bytes, (first_bytes + left_bytes) / 2)))
            filled.append(bucket)
        bucket.indexes.append(index)
        bucket.size_bytes += shape.size_bytes
        left_bytes -= shape.size_bytes
    return [_layout([shapes[index] for index in bucket.indexes], bucket.indexes, num_ranks) for bucket in filled]


def _layout(shapes: Sequence[Shape], indexes: Sequence[int], num_ranks: int) -> Layout:
    slots, offset = [], 0
    for shape, index in zip(shapes, indexes, strict=True):
        slots.append(Slot(index, offset, shape.numel))
        offset += shape.numel
    shard = -(-offset // (num_ranks * ALIGNMENT)) * ALIGNMENT
    return Layout(tuple(slots), shard, num_ranks)
