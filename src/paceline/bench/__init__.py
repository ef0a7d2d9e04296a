"""Measures collectives: a subject and its peers in one interleaved run, against the limit of the links.

``cli/bench.py`` and ``benchmarks/`` are its users. :func:`paceline.bench.measure.measure` is the whole of it; the
other files are what it is made of.
"""
