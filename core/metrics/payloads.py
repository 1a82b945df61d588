"""Images, texts, histograms, curves and files as events, in one form for all trackers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, bfloat16

from ...events import Event, LogCurve, LogFile, LogHistogram, LogImage, LogText, Run


def log_image(run: Run, name: str, image: Any) -> None:
    if _is_wanted(run, LogImage, name):
        pixels = to_image(image)
        values = _array("log_image", image)
        if np.issubdtype(values.dtype, np.floating) and not ((values >= -0.01) & (values <= 1.01)).all():
            run.warn(f"The image {name!r} has values outside of 0 to 1, which are clipped: scale it first.")
        run.emit(LogImage(name, pixels))


def log_figure(run: Run, name: str, figure: Any) -> None:
    if not _is_wanted(run, LogImage, name):
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    original = figure.canvas
    try:
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        pixels = np.array(canvas.buffer_rgba())[..., :3].copy()
    finally:
        figure.set_canvas(original)
    run.emit(LogImage(name, pixels))


def log_text(run: Run, name: str, text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"log_text takes a str, got {type(text).__name__}.")
    if _is_wanted(run, LogText, name):
        run.emit(LogText(name, text))


def log_histogram(run: Run, name: str, values: Any) -> None:
    if _is_wanted(run, LogHistogram, name):
        run.emit(LogHistogram(name, _numbers("log_histogram", values)))


def log_curve(run: Run, name: str, labels: Any, scores: Any) -> None:
    if not _is_wanted(run, LogCurve, name):
        return
    positive, numbers = _numbers("log_curve", labels), _numbers("log_curve", scores)
    if positive.shape != numbers.shape:
        raise ValueError(f"log_curve needs a score per label, got {positive.size} labels and {numbers.size} scores.")
    if not np.isin(positive, (0, 1)).all():
        raise ValueError("log_curve takes labels that are 0 or 1, or True or False.")
    lowest, highest = numbers.min(), numbers.max()
    if lowest < 0 or highest > 1:
        raise ValueError(f"log_curve takes scores from 0 to 1, got {lowest:g} to {highest:g}: use a sigmoid.")
    run.emit(LogCurve(name, positive.astype(bool), numbers))


def log_file(run: Run, name: str, path: str | Path) -> None:
    if not _is_wanted(run, LogFile, name):
        return
    if not Path(path).is_file():
        raise ValueError(f"log_file takes the path of a file; {path} is not a file.")
    run.emit(LogFile(name, Path(path)))


def to_image(image: Any) -> np.ndarray[Any, Any]:
    channels_first = isinstance(image, Tensor)
    pixels = _array("log_image", image)
    if pixels.ndim == 2:
        pixels, channels_first = pixels[..., None], False
    if pixels.ndim != 3 or pixels.shape[0 if channels_first else 2] not in (1, 3, 4) or not pixels.size:
        raise ValueError(
            f"log_image takes a tensor of shape (channels, height, width), an array of shape (height, width, channels) "
            f"with 1, 3 or 4 channels, or shape (height, width); got {tuple(pixels.shape)}. Log one image of a batch."
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
        raise TypeError(f"The name of a logged value must be a non-empty string, got {name!r}.")
    return bool(run.bus.signal(kind).chain)


def _array(verb: str, values: Any) -> np.ndarray[Any, Any]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == bfloat16 else values).numpy()  # NumPy has no bfloat16
    array: np.ndarray[Any, Any] = np.array(values)  # a copy: the original may change before it is written
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{verb} takes a tensor or an array of numbers, got {type(values).__name__}.")
    return array


def _numbers(verb: str, values: Any) -> np.ndarray[Any, Any]:
    array = _array(verb, values).reshape(-1)
    if not array.size:
        raise ValueError(f"{verb} takes at least one number, got none.")
    return array
