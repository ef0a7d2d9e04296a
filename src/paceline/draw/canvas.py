"""The one place that knows matplotlib is optional."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


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
    if not path.absolute().parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.absolute().parent}")


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure in the format its name asks for."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
