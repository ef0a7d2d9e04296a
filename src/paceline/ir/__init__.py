"""The schedule language: collectives, clusters, transfers, schedules; their proof, their price, their files.

Imports nothing of Paceline's but errors and units.
"""
