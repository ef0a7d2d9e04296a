"""A lab in tests: the fixture ``lab``, a running :class:`paceline.lab.Lab`, skipped with a reason where there is none.

    @pytest.mark.lab("lan8", late={3: 0.5})              # a preset ...
    @pytest.mark.lab(hosts=3, up="100mbit", loss=0.01)   # ... or what Lab takes; without a marker, Lab()
    def test_training_goes_on(lab):
        assert lab.run([sys.executable, "train.py"], timeout_s=30) == 0

A project asks for it in its top ``conftest.py``: ``pytest_plugins = ["paceline.lab.pytest_plugin"]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from paceline.lab import Lab


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers", "lab(preset=None, **options): the hosts of the lab fixture: a preset's name, or arguments of Lab"
    )


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The lab that the test's marker ``lab`` describes, for the time of the test."""
    from paceline.lab import Lab, unavailable

    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    marker = request.node.get_closest_marker("lab")
    arguments = (marker.args, marker.kwargs) if marker is not None else ((), {})
    make = Lab.preset if arguments[0] else Lab
    with make(*arguments[0], **arguments[1]) as running:
        yield running
