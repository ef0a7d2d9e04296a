"""Settings that hold for all tests."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

from effort import examples

settings.register_profile(
    "paceline",
    examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)
settings.load_profile("paceline")

# In a shell's background Ctrl-C is ignored, and what a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["paceline.lab.pytest_plugin"]
