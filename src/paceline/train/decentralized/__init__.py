"""Decentralised training by partial all-reduce: workers average their weights in small groups, whenever they arrive."""
