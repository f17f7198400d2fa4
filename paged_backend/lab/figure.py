"""Figures: drawn with matplotlib, where it is installed, into an image file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paged_backend.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'paged-backend[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_kind(path: Path) -> None:
    """Raise ConfigError without matplotlib, and for a file whose ending is of no kind of image that it can write."""
    kinds = [f".{kind}" for kind in sorted(new_figure(1, 1).canvas.get_supported_filetypes())]
    if path.suffix and path.suffix.lower() not in kinds:
        raise ConfigError(f"{path} cannot be drawn: its name must end in one of {', '.join(kinds)}")


def save(figure: Figure, path: Path) -> None:
    """Write an image. Raises ConfigError for a kind of file that cannot be written, OSError where no file can be."""
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be drawn: {error}") from error
