"""Show how far a run is: bars in a terminal or a notebook, else plain lines."""

from .plugin import ProgressBar as ProgressBar
