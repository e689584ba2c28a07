"""What can be seen in a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.image import imread

BLUE, ORANGE = (0, 114, 178), (213, 94, 0)  # the first curve and the second


def pixels(path: Path, colour: tuple[int, int, int]) -> int:
    """How many are of that colour."""
    return int((np.abs(_image(path) - colour) <= 2).all(-1).sum())


def height_of(path: Path, colour: tuple[int, int, int]) -> int:
    """The rows between the highest and the lowest pixel of that colour."""
    rows = np.nonzero((np.abs(_image(path) - colour) <= 2).all(-1).any(-1))[0]
    return int(rows.max() - rows.min())


def size(path: Path) -> tuple[int, int]:
    """Width and height."""
    height, width = _image(path).shape[:2]
    return width, height


def _image(path: Path) -> np.ndarray:
    return np.rint(imread(path)[..., :3] * 255)
