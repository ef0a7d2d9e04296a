"""What one rank of a contender runs.

It is started by path, also inside an MPI's own environment, where Paceline is not installed: so it imports nothing
but msgspec, numpy and the library it measures.
"""
