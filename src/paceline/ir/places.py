"""Places: a chunk of a rank. Numbered chunk * n + rank; or, where few of them are touched, packed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Places:
    """The places that a set of moves touches. ``key[i]`` is chunk * n + rank of place i."""

    key: IndexArray
    read: IndexArray
    written: IndexArray

    @classmethod
    def of(cls, read: IndexArray, written: IndexArray, num_keys: int, others: IndexArray | None = None) -> Places:
        """Number the places that are read, written, or named besides; all of them if that is not many more."""
        if num_keys <= 4 * len(read) + 1024:
            return cls(np.arange(num_keys), read, written)
        extra = read[:0] if others is None else others
        key, place = np.unique(np.concatenate((read, written, extra)), return_inverse=True)
        place = place.reshape(-1)
        return cls(key, place[: len(read)], place[len(read) : 2 * len(read)])
