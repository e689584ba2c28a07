from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa.cli import main
from nsa.engine.config import RunConfig, to_yaml
from nsa.gates.results import Gate, record_result
from nsa.monitor.config import LadderConfig
from nsa.report.compare import compare_runs, read_runs
from nsa.report.report import write_report
from tests.monitor.run_folders import judge_files, write_metrics, write_run
from tests.report.pictures import BLUE, ORANGE, pixels


def test_runs_share_one_picture_and_a_table_of_their_final_values(tmp_path: Path) -> None:
    nsa, dense = write_run(tmp_path / "nsa"), tmp_path / "dense"
    write_metrics(dense, 200, change=lambda step: {"loss": 4.0 + 1 / step, "tokens_per_s": 1e5})
    for gate in (Gate("sanity", 1), Gate("production", 300)):  # the last one is shown
        record_result(nsa, judge_files(nsa, gate, LadderConfig()))
    lines = compare_runs(read_runs([nsa, dense]), tmp_path / "out" / "both.png")
    assert pixels(tmp_path / "out" / "both.png", BLUE) > 500
    assert pixels(tmp_path / "out" / "both.png", ORANGE) > 500
    header, first, second = (line.split("  ") for line in lines)
    cells = [[cell.strip() for cell in line if cell.strip()] for line in (header, first, second)]
    assert cells == [
        ["run", "steps", "loss", "val loss", "bits/byte", "tokens/s", "GB", "go/no-go"],
        ["nsa", "300", "3.010", "3.110", "1.110", "142,857", "10.00", "production Go"],
        ["dense", "200", "4.005", "3.115", "1.115", "100,000", "2.23", "-"],
    ]


def test_a_validation_loss_of_an_earlier_step_names_the_step(tmp_path: Path) -> None:
    write_metrics(tmp_path, 134)
    line = compare_runs(read_runs([tmp_path]), tmp_path / "out.png")[1]
    assert line.split()[1:7] == ["134", "3.022", "3.130", "(step", "100)", "1.130"]
    text = write_report(tmp_path).read_text()
    assert "| final training loss | 3.0224 |" in text
    assert "| final validation loss | 3.1300 (step 100) |" in text


def test_a_difference_that_makes_runs_incomparable_is_a_warning_with_its_meaning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig()
    for name, steps in (("a", 20), ("b", 20), ("c", 30)):
        write_metrics(tmp_path / name, steps)
        (tmp_path / name / "config.yaml").write_text(to_yaml(config))
    runs = [str(tmp_path / name) for name in "abc"]
    assert main(["compare", *runs[:2]]) == 0
    assert capsys.readouterr().err == ""
    config.data.tokenizer, config.data.source, config.train.steps = "hf:gpt2", {"x": 1.0}, 30
    config.data.held_out = 0.1
    (tmp_path / "c" / "config.yaml").write_text(to_yaml(config))
    rows = (tmp_path / "c/metrics.csv").read_text().splitlines()
    doubled = [
        [str(2 * int(cell)) if n == 1 else cell for n, cell in enumerate(row.split(","))]
        for row in rows[1:]
    ]
    (tmp_path / "c/metrics.csv").write_text("\n".join([rows[0], *map(",".join, doubled), ""]))
    assert main(["compare", *runs]) == 0
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 5
    lines = output.err.splitlines()
    for line, words in zip(
        lines,
        [
            "data.source differs, embedded in a, b; {'x': 1.0} in c: training and",
            "data.held_out differs, 0.05 in a, b; 0.1 in c: training and validation",
            "data.tokenizer differs, byte in a, b; hf:gpt2 in c: losses per token",
            "train.steps differs, 50,000 in a, b; 30 in c: ",
            "tokens per step differs, ",
            "steps taken differs, 20 in a, b; 30 in c: ",
        ],
        strict=True,
    ):
        assert line.startswith(f"nsa: warning: {words}")


def test_a_run_given_twice_is_one_row_and_equal_names_become_paths(tmp_path: Path) -> None:
    write_metrics(tmp_path / "a" / "run", 20)
    write_metrics(tmp_path / "b" / "run", 20)
    write_metrics(tmp_path / "b" / "other", 20)
    runs = [tmp_path / name for name in ("a/run", "b/run", "a/run", "b/other")]
    lines = compare_runs(read_runs(runs), tmp_path / "out.png")
    assert len(lines) == 4
    for line, run in zip(lines[1:], (runs[0], runs[1], runs[3]), strict=True):
        assert line.startswith(str(run))


def test_json_has_the_last_gate_the_figures_and_the_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a")
    write_metrics(tmp_path / "b", 200)
    for gate, limit in ((Gate("sanity", 1), 50.0), (Gate("production", 300), 1e9)):
        result = judge_files(tmp_path / "a", gate, LadderConfig(min_tokens_per_s=limit))
        record_result(tmp_path / "a", result)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree.keys() == {"runs", "differences", "picture"}
    first, second = tree["runs"]
    assert (first["run"], first["steps"], first["gate"], first["go"]) == (
        "a", 300, "production", False
    )  # fmt: skip
    assert (second["run"], second["steps"], second["gate"], second["go"]) == ("b", 200, None, None)
    assert first["loss"] == 3.01
    assert first["val_loss"] == pytest.approx(3.11)
    assert first["bits_per_byte"] == pytest.approx(1.11)
    assert first["tokens_per_s"] == pytest.approx(1e6 / 7)
    assert first["memory_gb"] == 10.0
    (difference,) = tree["differences"]
    assert difference.startswith("steps taken differs, 300 in a; 200 in b: ")
    assert Path(tree["picture"]) == tmp_path / "compare.png"
