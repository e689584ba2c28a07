"""Pixel counts of a picture."""

from pathlib import Path

import numpy as np
from matplotlib.image import imread

BLUE, ORANGE = (0, 114, 178), (213, 94, 0)  # the first curve and the second


def pixels(path: Path, colour: tuple[int, int, int]) -> int:
    return int((np.abs(_image(path) - colour) <= 2).all(-1).sum())


def size(path: Path) -> tuple[int, int]:
    """Return width and height."""
    height, width = _image(path).shape[:2]
    return width, height


def _image(path: Path) -> np.ndarray:
    return np.rint(imread(path)[..., :3] * 255)
