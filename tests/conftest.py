"""Settings that hold for all tests."""

from __future__ import annotations

from importlib.metadata import entry_points

from hypothesis import HealthCheck, settings

settings.register_profile(
    "paceline", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], print_blob=True
)
settings.load_profile("paceline")

# The plugin announces itself once Paceline is installed with it; pytest refuses to load it a second time.
pytest_plugins = [] if entry_points(group="pytest11", name="paceline_lab") else ["paceline.lab.pytest_plugin"]
