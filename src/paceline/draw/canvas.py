"""The one place that knows matplotlib is optional."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches; no window, no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("pictures need matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def check_picture_path(path: Path) -> None:
    """Refuse what we cannot draw, or cannot draw to, before anything is computed."""
    new_figure(1, 1)
    if path.suffix not in FORMATS:
        raise UsageError(f"a picture is saved as {', '.join(FORMATS)}, not as {path.name}")
    try:
        if not path.absolute().parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no folder {path.absolute().parent}")
        is_new = not os.path.lexists(path)
        path.open("ab").close()  # the only sure way to know; what a file holds stays as it is
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; name a file elsewhere") from None


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure in the format its name asks for."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
