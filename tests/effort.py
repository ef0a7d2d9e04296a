"""How much the tests try: ``make test`` enough to trust a change, ``make thorough`` every combination, and more."""

from __future__ import annotations

import os
from typing import TypeVar

from hypothesis import settings

EFFORT = float(os.environ.get("EFFORT", "0.25"))
"""What numbers of examples are multiplied by. ``make thorough`` sets 20."""

THOROUGH = EFFORT >= 1
_CasesT = TypeVar("_CasesT")


def examples(number: int) -> settings:
    """So many examples with an effort of 1, and at least ten."""
    return settings(max_examples=max(10, round(number * EFFORT)))


def thorough(everything: _CasesT, otherwise: _CasesT) -> _CasesT:
    """Everything where time does not matter; otherwise a part in which each case still occurs."""
    return everything if THOROUGH else otherwise
