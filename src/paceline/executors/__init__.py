"""What runs proven schedules: the C++ engine (``native``)."""
