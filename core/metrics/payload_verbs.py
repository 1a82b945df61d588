"""What a run shows besides numbers; what does it is imported when it is first used."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class PayloadVerbs:
    """The `log_...` verbs of a run; the protocol `heliograph.Run` documents them."""

    def log_image(self: Any, name: str, image: Any) -> None:
        """Show an image in every tracker."""
        from . import payloads

        payloads.log_image(self, name, image)

    def log_figure(self: Any, name: str, figure: Any) -> None:
        """Show a figure in every tracker."""
        from . import payloads

        payloads.log_figure(self, name, figure)

    def log_text(self: Any, name: str, text: str) -> None:
        """Show a text in every tracker."""
        from . import payloads

        payloads.log_text(self, name, text)

    def log_histogram(self: Any, name: str, values: Any) -> None:
        """Show the distribution of values in every tracker."""
        from . import payloads

        payloads.log_histogram(self, name, values)

    def log_curve(self: Any, name: str, labels: Any, scores: Any) -> None:
        """Show a precision-recall curve in every tracker."""
        from . import payloads

        payloads.log_curve(self, name, labels, scores)

    def log_file(self: Any, name: str, path: str | Path) -> None:
        """Keep a file with the run in every tracker."""
        from . import payloads

        payloads.log_file(self, name, path)
