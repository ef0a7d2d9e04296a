"""Runs one rank of a training: ``python rank_program.py SOCKET RANK``."""

import importlib
import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder: its files are not modules by themselves
    rank = importlib.import_module("paceline.bench.decentralized.rank")
    importlib.import_module("paceline.bench.rank_process.loop").main(sys.argv[1:], rank.TrainingRank)
