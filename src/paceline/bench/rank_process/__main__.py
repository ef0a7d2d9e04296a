"""Runs this folder as a program: ``python .../rank_process SOCKET RANK``."""

import importlib
import sys
from pathlib import Path

# The folder above goes last, so that nothing in it can take the place of a module of the library measured.
FOLDER = Path(__file__).resolve().parent
sys.path[:] = [*sys.path[1:], str(FOLDER.parent)]

importlib.import_module(f"{FOLDER.name}.loop").main(sys.argv[1:])
