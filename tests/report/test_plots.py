from pathlib import Path
from typing import Any

import pytest
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.image import imread, imsave

from nsa.report.plots import Panel, _draw_panel, draw, running_mean
from tests.report.pictures import BLUE, ORANGE, pixels, size


def test_the_running_mean_does_not_lag() -> None:
    line = [float(value) for value in range(100)]
    assert running_mean(line, 5)[5:-5] == pytest.approx(line[5:-5])
    assert running_mean([1.0, 2.0, 6.0], 1) == pytest.approx([1.5, 3.0, 4.0])


def test_curves_share_axes_and_panels_are_side_by_side(tmp_path: Path) -> None:
    line = ([0.0, 1.0], [0.0, 1.0])
    draw([Panel("a", {"one": line})], tmp_path / "one.png")
    both = Panel("a", {"one": line, "$two_{": ([0.0, 1.0], [1.0, 0.0])}, marked=True)
    draw([both, Panel("b", {"layer 0": line}, ordered=True)], tmp_path / "two.png")
    assert pixels(tmp_path / "one.png", BLUE) > 300
    assert pixels(tmp_path / "one.png", ORANGE) == 0
    assert pixels(tmp_path / "two.png", ORANGE) > 300
    width, height = size(tmp_path / "two.png")
    assert width == 2 * size(tmp_path / "one.png")[0]
    draw([both] * 3, tmp_path / "three.png")
    three = size(tmp_path / "three.png")
    assert three[0] == width
    assert three[1] > height
    rest = imread(tmp_path / "three.png")[three[1] * 5 // 9 :, width * 5 // 9 :, :3]
    assert (rest == 1).all(), "the place of a fourth panel is white"


def test_an_unknown_picture_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.xyz: .*(xyz|Format)"):
        draw([Panel("a", {"one": ([0.0], [0.0])})], tmp_path / "x.xyz")
    draw([Panel("a", {"one": ([0.0], [0.0])})], tmp_path / "x")
    assert (tmp_path / "x").read_bytes().startswith(b"\x89PNG")


def drawn(panel: Panel) -> Any:
    """Draw one panel, and return its axes."""
    axis = Figure().subplots()
    _draw_panel(axis, panel, list(panel.curves), 50)
    return axis


def test_a_long_curve_is_drawn_faintly_below_its_mean_over_a_fiftieth_on_each_side() -> None:
    """So a spike of one step is visible, and a jump stays steep."""
    jump = [float(step >= 100) for step in range(200)]
    values, mean = drawn(Panel("loss", {"run": (range(200), jump)})).lines
    assert (list(values.get_ydata()), values.get_alpha()) == (jump, 0.25)
    at_jump = [mean.get_ydata()[step] for step in (95, 96, 100, 104)]
    assert at_jump == pytest.approx([0, 1 / 9, 5 / 9, 1])


def test_error_bars_reach_from_below_to_above_their_points() -> None:
    points, errors = ([1.0, 2.0], [1.0, 3.0]), {"one": [0.5, 0.25]}
    axis = drawn(Panel("loss", {"one": points}, marked=True, errors=errors, x_doubles=True))
    assert axis.dataLim.intervaly == pytest.approx([0.5, 3.25])
    assert (axis.get_xscale(), axis.xaxis.get_transform().base) == ("log", 2)


def test_layers_are_shaded_from_the_first_to_the_last() -> None:
    layers = {f"layer {n}": ([0.0, 1.0], [0.0, 1.0]) for n in range(3)}
    shades = [line.get_color() for line in drawn(Panel("gate", layers, ordered=True)).lines]
    assert shades == [colormaps["viridis"](shade) for shade in (0.0, 0.45, 0.9)]
    (only,) = drawn(Panel("gate", {"layer 0": layers["layer 0"]}, ordered=True)).lines
    assert only.get_color() == shades[0]


@pytest.mark.parametrize(
    ("values", "panel", "limits"),
    [
        ([5 / 9, 5 / 9 + 1e-15, 5 / 9], {}, (0.555, 0.5561)),  # rounding noise is a flat line
        ([2.30, 2.31, 2.30], {}, (2.2995, 2.3105)),
        ([0.5, 0.6], {"fraction": True}, (-0.02, 1.02)),
    ],
)
def test_the_y_axis_shows_differences_and_the_whole_of_a_fraction(
    values: list[float], panel: dict[str, bool], limits: tuple[float, float]
) -> None:
    axis = drawn(Panel("one layer", {"layer 0": (range(len(values)), values)}, **panel))
    assert axis.get_ylim() == pytest.approx(limits, abs=2e-4)


def test_a_logarithmic_axis_keeps_a_spike_from_flattening_the_rest() -> None:
    curves = {"calm": ([0.0, 1.0], [1.0, 10.0]), "spike": ([0.0, 1.0], [10.0, 1_000.0])}
    for logarithmic in (False, True):
        panel = Panel("norm", curves, logarithmic=logarithmic)
        assert drawn(panel).get_yscale() == ("log" if logarithmic else "linear")
    assert drawn(Panel("norm", {"all": ([0.0], [0.0])}, logarithmic=True)).get_yscale() == "linear"


def test_a_run_has_one_colour_in_all_panels_and_no_label_is_clipped(tmp_path: Path) -> None:
    line = ([0.0, 1.0], [1e6, 2e6])
    name = "a run folder with a very long name, " * 4
    both = Panel(
        "the title of a panel, longer than the panel is wide. " * 3, {name: line, "b": line}
    )
    only = Panel("the second run alone", {name: ([], []), "b": line})
    path = tmp_path / "long.png"
    draw([both, only], path)
    image = imread(path)[..., :3]
    imsave(tmp_path / "right.png", image[:, image.shape[1] // 2 :])
    assert pixels(tmp_path / "right.png", ORANGE) > 300
    assert pixels(tmp_path / "right.png", BLUE) == 0
    for edge in (image[0], image[-1], image[:, 0], image[:, -1]):
        assert (edge == 1).all(), "something reaches the edge of the picture"


def test_a_single_point_is_visible() -> None:
    curves = {"training": ([1, 2, 3], [3.0, 2.0, 1.0]), "validation": ([2], [1.5])}
    assert [line.get_marker() for line in drawn(Panel("loss", curves)).lines] == ["None", "o"]
