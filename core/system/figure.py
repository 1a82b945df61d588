"""A matplotlib figure that notebooks draw; imported where something is drawn, as matplotlib is an extra."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure that a cell shows as a picture, without pyplot, which keeps every figure alive and chooses a window."""

    def _repr_png_(self) -> bytes:
        """Return the picture, as IPython asks for it."""
        picture = BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
