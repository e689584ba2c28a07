from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from nsa.monitor.metrics_csv import MetricsCsv
from nsa.monitor.plot import plot_runs
from nsa.monitor.writer import BackgroundWriter
from tests.monitor.records import make_info, make_record

BLUE, ORANGE = (0, 114, 178), (213, 94, 0)  # the first run and the second


def make_run(run_dir: Path, loss: float, *, evaluated: bool = True) -> Path:
    writer = BackgroundWriter("metrics.csv")
    observer = MetricsCsv(writer)
    observer.on_start(make_info(run_dir))
    for step in range(1, 201):
        bits = loss / 2 if evaluated and step % 50 == 0 else None
        observer.on_step(make_record(step, loss=loss + 3 / step, bits_per_byte=bits))
    writer.close()
    return run_dir


def pixels(path: Path, colour: tuple[int, int, int]) -> int:
    from matplotlib.image import imread

    image = np.rint(imread(path)[..., :3] * 255)
    return int((np.abs(image - colour) <= 2).all(-1).sum())


def width(path: Path) -> int:
    from matplotlib.image import imread

    return imread(path).shape[1]


def test_two_runs_share_a_picture_of_loss_and_bits_per_byte(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    nsa, dense = make_run(tmp_path / "nsa", 2.0), make_run(tmp_path / "dense", 2.5)
    both, alone, blind = (tmp_path / "out" / name for name in ("both.png", "one.png", "blind.png"))
    plot_runs([nsa, dense], both)
    assert pixels(both, BLUE) > 500
    assert pixels(both, ORANGE) > 500
    plot_runs([nsa], alone)
    assert pixels(alone, BLUE) > 500
    assert pixels(alone, ORANGE) == 0
    plot_runs([make_run(tmp_path / "blind", 2.0, evaluated=False)], blind)
    assert width(alone) == 2 * width(blind), "a second panel only where there is something in it"


def test_a_folder_without_metrics_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"holds no metrics\.csv"):
        plot_runs([tmp_path], tmp_path / "out.png")


def test_without_matplotlib_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install 'nsa-m7c"):
        plot_runs([tmp_path], tmp_path / "out.png")
