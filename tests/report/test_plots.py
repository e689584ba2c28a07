from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from nsa.report.plots import Panel, draw, running_mean
from tests.report.pictures import BLUE, ORANGE, height_of, pixels, size


def test_the_running_mean_does_not_lag() -> None:
    line = [float(value) for value in range(100)]
    assert running_mean(line, 5)[5:-5] == pytest.approx(line[5:-5])
    assert running_mean([1.0, 2.0, 6.0], 1) == pytest.approx([1.5, 3.0, 4.0])


def test_a_spike_of_one_step_in_fifty_thousand_is_visible(tmp_path: Path) -> None:
    steps = range(50_000)
    spiky = [3.0 + 20 * (step == 33_333) for step in steps]
    draw([Panel("loss", {"run": (steps, spiky)})], tmp_path / "spike.png")
    image = imread(tmp_path / "spike.png")[..., :3]
    column = image[:, 411:423]  # two thirds of the way; the running mean's edges lie outside
    blue = (column[..., 2] - column[..., 0] > 0.1).any(-1)
    assert blue.sum() > 200, "the faint line rises through the picture"


def test_curves_share_axes_and_panels_are_side_by_side(tmp_path: Path) -> None:
    line = ([0.0, 1.0], [0.0, 1.0])
    draw([Panel("a", {"one": line})], tmp_path / "one.png")
    both = Panel("a", {"one": line, "$two_{": ([0.0, 1.0], [1.0, 0.0])}, marked=True)
    draw([both, Panel("b", {"layer 0": line}, ordered=True)], tmp_path / "two.png")
    assert pixels(tmp_path / "one.png", BLUE) > 300
    assert pixels(tmp_path / "one.png", ORANGE) == 0
    assert pixels(tmp_path / "two.png", ORANGE) > 300
    assert height_of(tmp_path / "two.png", ORANGE) > 200
    assert size(tmp_path / "two.png")[0] == 2 * size(tmp_path / "one.png")[0]


def test_an_unknown_picture_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.xyz: .*(xyz|Format)"):
        draw([Panel("a", {"one": ([0.0], [0.0])})], tmp_path / "x.xyz")
