"""Layouts: every element has one place, and every rank's pieces together are everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.train.dear.buckets import ALIGNMENT, Shape, lay_out

shapes = st.lists(st.builds(Shape, st.integers(1, 500), st.sampled_from([2, 4, 8]), st.sampled_from("ab")), min_size=1)


@given(shapes, st.integers(1, 5000), st.integers(1, 9), st.data())
def test_pieces_of_all_ranks_are_every_element_once(
    found: list[Shape], threshold_bytes: int, num_ranks: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(found))))
    layouts = lay_out(found, order, threshold_bytes, num_ranks, first_bytes=threshold_bytes // 2)
    seen: dict[int, list[int]] = {}
    for layout in layouts:
        assert layout.numel == layout.shard_numel * num_ranks
        assert layout.shard_numel % ALIGNMENT == 0
        assert len({found[slot.index].kind for slot in layout.slots}) == 1
        size_bytes = sum(found[slot.index].size_bytes for slot in layout.slots)
        assert size_bytes <= threshold_bytes or len(layout.slots) == 1
        for rank in range(num_ranks):
            ends = 0
            for piece in layout.pieces(rank):
                assert ends <= piece.offset <= piece.offset + piece.numel <= layout.shard_numel
                ends = piece.offset + piece.numel
                seen.setdefault(piece.index, []).extend(range(piece.start, piece.end))
    assert {index: list(range(shape.numel)) for index, shape in enumerate(found)} == dict(sorted(seen.items()))


@given(shapes, st.integers(1, 5000))
def test_buckets_follow_the_order(found: list[Shape], threshold_bytes: int) -> None:
    order = list(reversed(range(len(found))))
    layouts = lay_out(found, order, threshold_bytes, 2)
    assert [layout.slots[0].index for layout in layouts] == sorted(
        (layout.slots[0].index for layout in layouts), key=order.index
    )
    for layout in layouts:
        indexes = [slot.index for slot in layout.slots]
        assert indexes == sorted(indexes, key=order.index)


def test_the_first_and_the_last_buckets_are_small() -> None:
    layouts = lay_out([Shape(100, 4)] * 40, range(40), 2_000, 2, first_bytes=800)
    assert [len(layout.slots) for layout in layouts] == [2, 3, 4, 5, 5, 5, 5, 5, 4, 2]


def test_a_model_that_fits_a_small_bucket_has_one() -> None:
    assert [len(layout.slots) for layout in lay_out([Shape(100, 4)] * 2, range(2), 2_000, 2, first_bytes=800)] == [2]


def test_what_follows_a_large_parameter_is_still_one_of_the_first() -> None:
    shapes = [Shape(1000, 4), *[Shape(100, 4)] * 13]
    layouts = lay_out(shapes, range(14), 2_000, 2, first_bytes=800)
    assert [len(layout.slots) for layout in layouts] == [1, 2, 3, 4, 3, 1]


@given(shapes, st.integers(1, 5000), st.integers(1, 5000))
def test_what_leaves_first_is_small(found: list[Shape], threshold_bytes: int, first_bytes: int) -> None:
    last = lay_out(found, range(len(found)), threshold_bytes, 2, first_bytes)[-1]
    size_bytes = sum(found[slot.index].size_bytes for slot in last.slots)
    assert size_bytes <= first_bytes or len(last.slots) == 1 or len({shape.kind for shape in found}) > 1
