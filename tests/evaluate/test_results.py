"""Tables, files and plot of `nsa eval`, from results whose figures are known."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.evaluate.perplexity import Losses, Mean, perplexity
from nsa.evaluate.results import Result, _panel, lines, write


def result(run: str, seq_len: int, losses: list[list[float]], data: Any) -> Result:
    """A result with a row of losses for each sample, of 20 tokens in one or two buckets."""
    means = torch.tensor(losses, dtype=torch.float64)
    edges = [0, 64, seq_len] if len(losses[0]) == 2 else [0, seq_len]
    counts = torch.full_like(means, 20 / len(losses[0]))
    config = SimpleNamespace(data=SimpleNamespace(seq_len=128))
    step = 1_200 if run == "a" else None
    stored: Any = SimpleNamespace(folder=Path("runs") / run, step=step, config=config)
    return Result(run, stored, seq_len, data, Losses(means * counts, counts, edges))


def rows() -> list[dict[str, Any]]:
    data: Any = SimpleNamespace(samples=SimpleNamespace(bytes_per_token=2.0))
    results = [
        result("a", 128, [[4.0, 2.0], [2.0, 0.0]], data),
        result("a", 64, [[5.0], [3.0]], data),
        result("b", 128, [[4.0, 3.0], [2.0, 2.0]], data),
    ]
    return [each.row(results) for each in results]


def test_each_figure_is_in_its_column() -> None:
    assert [" ".join(line.split()) for line in lines(rows())] == [
        "run step seq-len tokens loss ± perplexity bits/byte loss minus that of",
        "a 1,200 128 40 2.0000 1.0000 7.389 1.4427 -",
        "a 1,200 64 40 4.0000 1.0000 54.598 2.8854 a, 128: +2.0000 ± 0.0000",
        "b - 128 40 2.7500 0.7500 15.643 1.9837 a, 128: +0.7500 ± 0.2500",
        "",
        "loss by position a, 128 a, 64 b, 128",
        "1 to 64 3.000 ± 1.0000 4.000 ± 1.0000 3.000 ± 1.0000",
        "65 to 128 1.000 ± 1.0000 - 2.500 ± 0.5000",
    ]


def test_the_plot_has_the_middle_of_each_bucket_of_positions(tmp_path: Path) -> None:
    files = write(rows(), {"source": "text"}, tmp_path)
    assert [file.name for file in files] == ["eval.json", "positions.png"]
    panel = _panel(rows())
    assert panel.curves["b, 128"] == (pytest.approx([8.0, math.sqrt(65 * 128)]), [3.0, 2.5])
    assert panel.errors is not None
    assert panel.errors["b, 128"] == [1.0, 0.5]


def test_a_loss_without_end_or_error_is_a_dash() -> None:
    data: Any = SimpleNamespace(samples=SimpleNamespace(bytes_per_token=2.0))
    diverged = result("a", 64, [[math.nan]], data)
    row = diverged.row([diverged])
    assert (row["loss"], row["standard_error"], row["perplexity"]) == (None, None, None)
    assert lines([row])[1].split()[4:8] == ["-"] * 4
    assert (perplexity(701.0), perplexity(0.5)) == (math.inf, math.exp(0.5))


def test_a_sample_without_tokens_does_not_count() -> None:
    sums = torch.tensor([2.0, 4.0, 0.0], dtype=torch.float64)
    assert Mean.of(sums, torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)) == Mean(3.0, 1.0)
