"""What the wrappers of :mod:`paceline.train` share: checks of what they are given, and whose a parameter is."""
