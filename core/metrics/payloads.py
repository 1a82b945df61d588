"""Images, texts, histograms, curves and files, made into events that are the same for every tracker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, bfloat16

from ...events import Event, Run
from ...events.payloads import LogCurve, LogFile, LogHistogram, LogImage, LogText


def log_image(run: Run, name: str, image: Any) -> None:
    """Emit `LogImage`, where somebody wants it; see `heliograph.Run.log_image`."""
    if _is_wanted(run, LogImage, name):
        pixels = to_image(image)
        values = _array("log_image", image)
        if np.issubdtype(values.dtype, np.floating) and not ((values >= -0.01) & (values <= 1.01)).all():
            run.warn(f"The image {name!r} has values beyond 0 to 1, and is shown cut to these: scale it before.")
        _emit(run, LogImage(name, pixels))


def log_figure(run: Run, name: str, figure: Any) -> None:
    """Emit `LogImage` with a figure as it is now; see `heliograph.Run.log_figure`."""
    if not _is_wanted(run, LogImage, name):
        return
    if not hasattr(figure, "canvas"):
        raise TypeError(f"log_figure takes a Figure of matplotlib, got {type(figure).__name__}.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    former = figure.canvas
    try:
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        pixels = np.array(canvas.buffer_rgba())[..., :3].copy()
    finally:
        figure.set_canvas(former)
    _emit(run, LogImage(name, pixels))


def log_text(run: Run, name: str, text: str) -> None:
    """Emit `LogText`, where somebody wants it; see `heliograph.Run.log_text`."""
    if not isinstance(text, str):
        raise TypeError(f"log_text takes a text, got {type(text).__name__}.")
    if _is_wanted(run, LogText, name):
        _emit(run, LogText(name, text))


def log_histogram(run: Run, name: str, values: Any) -> None:
    """Emit `LogHistogram`, where somebody wants it; see `heliograph.Run.log_histogram`."""
    if _is_wanted(run, LogHistogram, name):
        _emit(run, LogHistogram(name, _numbers("log_histogram", values)))


def log_curve(run: Run, name: str, labels: Any, scores: Any) -> None:
    """Emit `LogCurve`, where somebody wants it; see `heliograph.Run.log_curve`."""
    if not _is_wanted(run, LogCurve, name):
        return
    positive, given = _numbers("log_curve", labels), _numbers("log_curve", scores)
    if positive.shape != given.shape:
        raise ValueError(f"log_curve takes a score for each label, got {positive.size} labels and {given.size} scores.")
    if not np.isin(positive, (0, 1)).all():
        raise ValueError("log_curve takes labels that are 0 or 1, or True or False.")
    if given.min() < 0 or given.max() > 1:
        raise ValueError(f"log_curve takes scores from 0 to 1, got {given.min():g} to {given.max():g}: use a sigmoid.")
    _emit(run, LogCurve(name, positive.astype(bool), given))


def log_file(run: Run, name: str, path: str | Path) -> None:
    """Emit `LogFile`, where somebody wants it; see `heliograph.Run.log_file`."""
    if not _is_wanted(run, LogFile, name):
        return
    if not Path(path).is_file():
        raise ValueError(f"log_file takes the path of a file, and there is none at {path}.")
    _emit(run, LogFile(name, Path(path)))


def to_image(image: Any) -> np.ndarray[Any, Any]:
    """Return an image as bytes of shape (height, width, 3).

    Raises:
        TypeError: it is not an image.
        ValueError: its shape is not one of an image.
    """
    channels_first = isinstance(image, Tensor)
    pixels = _array("log_image", image)
    if pixels.ndim == 2:
        pixels, channels_first = pixels[..., None], False
    if pixels.ndim != 3 or pixels.shape[0 if channels_first else 2] not in (1, 3, 4) or not pixels.size:
        raise ValueError(
            f"log_image takes a tensor of shape (channels, height, width), an array of shape (height, width, "
            f"channels), or either of shape (height, width), with 1, 3 or 4 channels; got {tuple(pixels.shape)}. Of a "
            f"batch, log one image, or a grid of them."
        )
    if channels_first:
        pixels = pixels.transpose(1, 2, 0)
    if pixels.dtype == bool:
        pixels = pixels * np.uint8(255)
    elif pixels.dtype != np.uint8:
        if not np.issubdtype(pixels.dtype, np.floating):
            raise TypeError(f"log_image takes bytes, or floats from 0 to 1, got {pixels.dtype}.")
        pixels = (np.clip(np.nan_to_num(pixels), 0, 1) * 255).round().astype(np.uint8)
    colours = pixels[..., :3] if pixels.shape[2] >= 3 else pixels.repeat(3, axis=2)
    return np.ascontiguousarray(colours)


def _is_wanted(run: Run, kind: type[Event], name: str) -> bool:
    if not isinstance(name, str) or not name:
        raise TypeError(f"What is logged needs a name to be found by, got {name!r}.")
    return bool(run.bus.signal(kind).chain)


def _emit(run: Run, event: Event) -> None:
    run.bus.signal(type(event)).emit(run, event)


def _array(verb: str, values: Any) -> np.ndarray[Any, Any]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == bfloat16 else values).numpy()  # NumPy has no bfloat16
    found: np.ndarray[Any, Any] = np.array(values)  # a copy: the original may change before it is written
    if found.dtype.kind not in "biuf":
        raise TypeError(f"{verb} takes a tensor or an array of numbers, got {type(values).__name__}.")
    return found


def _numbers(verb: str, values: Any) -> np.ndarray[Any, Any]:
    found = _array(verb, values).reshape(-1)
    if not found.size:
        raise ValueError(f"{verb} takes at least one number, got none.")
    return found
