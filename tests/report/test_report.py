"""`nsa report` and `nsa compare`: results, facts and settings of runs, and their pictures."""

import json
import math
import re
from pathlib import Path
from unittest import mock

import pytest

from nsa.cli import main
from nsa.engine.config import RunConfig, to_yaml
from nsa.gates.results import Gate, record_result
from nsa.monitor.config import LadderConfig
from nsa.monitor.environment import cpu_model, write_env
from nsa.report.compare import compare_runs, read_runs
from nsa.report.report import _layer_panels, curve_panels, summarise, write_report
from nsa.untrusted import parse_yaml
from tests.monitor.run_folders import (
    beats,
    judge_files,
    write_beats,
    write_metrics,
    write_run,
    write_selection,
)
from tests.report.pictures import BLUE, ORANGE, pixels, size


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Draw no pictures, which take a second each, but list their names."""
    names: list[str] = []
    for module in ("report", "compare"):
        monkeypatch.setattr(f"nsa.report.{module}.draw", lambda _, out: names.append(out.name))
    return names


undrawn = pytest.mark.usefixtures("drawn")


def table(text: str, heading: str) -> dict[str, list[str]]:
    """The rows of the table under a heading, by first cell."""
    section = text.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def plots(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "report").glob("*.png")}


@undrawn
def test_a_report_begins_with_the_gate_results_and_their_evidence(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "mine", waits={200: ("forward", 200.0)})
    for gate in (Gate("sanity", 1), Gate("smoke", 300)):
        record_result(run_dir, judge_files(run_dir, gate, LadderConfig()))
    path = write_report(run_dir)
    text = path.read_text()
    assert path == run_dir / "report.md"
    assert text.startswith("# mine: No-Go at smoke\n\n## sanity: Go at step 1\n")
    smoke = table(text, "smoke: No-Go at step 300")
    assert smoke["longest pause, seconds"][:3] == ["**NO**", "200", "at most 120"]
    assert "in forward after step 200" in smoke["longest pause, seconds"][3]
    assert smoke["median tokens/s"][:3] == ["yes", "142,857", "at least 50"]
    assert smoke["p90 / median step time"][:2] == ["not measured", ""]
    assert smoke["p90 / median step time"][3] == "step times on shared CPUs vary"
    assert "Not judged: preflight, extended, production." in text


@undrawn
def test_a_report_holds_facts_and_settings(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    lines = beats(300, start=150, pid=900, mono=1_000.0)
    write_beats(tmp_path, beats(160), [*lines, {**lines[-1], "event": "end", "status": "done"}])
    waits = {200: ("data", 30.0)}
    write_beats(tmp_path, beats(300, rank=1, skipped=2, memory_gb=12.5, waits=waits))
    write_env(tmp_path, recipe="m7c", profile="production", notes=["a | note", "another"])
    halt = {"time": "now", "reason": "no step for 600 s", "rank": 1, "phase": "forward"}
    (tmp_path / "halt.json").write_text(json.dumps(halt))
    (tmp_path / "fallbacks.csv").write_bytes(
        b"operation,backend,reason,calls\n"
        b'selected_attention,triton,"no GPU, here",12\nswiglu,triton,"no GPU, here",1\ntorn\xff'
    )
    (tmp_path / "config.yaml").write_text("train: {precision: bf16}\nmodel: {layers: 4}\n")
    (tmp_path / "ds_config.json").write_text('{"zero_optimization": {"stage": 0}}')
    text = write_report(tmp_path).read_text()
    run = table(text, "Run")
    assert run["recipe, profile"] == ["m7c, production"]
    assert run["steps"] == ["300"]
    assert run["resumes"] == ["1"]
    assert run["end"] == ["done"]
    assert run["halted by the watchdog"] == ["no step for 600 s"]
    fallbacks = "selected_attention not on triton: no GPU, here (12 calls); swiglu not on triton: "
    fallbacks += "no GPU, here (1 calls)"
    assert run["backend fallbacks"] == [fallbacks]
    assert run["median tokens/s"] == ["142,857"]
    finals = ("tokens", "final training loss", "final validation loss", "final bits per byte")
    assert [*map(run.get, finals)] == [["1,228,800"], ["3.0100"], ["3.1100"], ["1.1100"]]
    assert run["ranks, engine"] == ["2, deepspeed-zero1"]
    assert run["longest pause since the last start"] == ["30.0 s (rank 1, in data after step 200)"]
    assert run["peak memory of a rank, GB"] == ["12.50"]
    assert run["skipped steps"] == ["2"], "the most of any rank"
    assert re.match(r"torch \d.*, deepspeed \d", run["versions"][0])
    assert cpu_model().replace("|", "/") in run["hardware"][0]
    assert "\na / note\n\nanother\n" in text
    settings = table(text, "Settings")
    assert (settings["train.precision"], settings["model.layers"]) == (["bf16"], ["4"])
    assert settings["ZeRO stage"] == ["0"]


@undrawn
def test_a_run_that_begins_dense_has_a_speed_for_each_phase(tmp_path: Path) -> None:
    write_metrics(tmp_path, change=lambda step: {"tokens_per_s": 300.0 if step <= 200 else 100.0})
    (tmp_path / "config.yaml").write_text("train: {dense_steps: 200}\n")
    env = {"host": "node", "cuda": {"devices": ["A100", "H100"]}, "cpu": {"model": "Xeon"}}
    (tmp_path / "env.json").write_text(json.dumps(env | {"git_commit": "c0de"}))
    with mock.patch("nsa.report.report.parse_yaml", wraps=parse_yaml) as parse:
        text = write_report(tmp_path).read_text()
    assert parse.call_count == 1, "PyYAML is slow"
    run = table(text, "Run")
    assert (run["hardware"], run["git commit"]) == (["node, A100, H100"], ["c0de"])
    assert run["median tokens/s"] == ["300; dense steps 300, sparse 100"]
    assert table(text, "Settings")["train.dense_steps"] == ["200"]


def test_only_recorded_values_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare, full = tmp_path / "bare", tmp_path / "full"
    write_metrics(bare, 20, start=5)  # no validation: 5 panels
    write_run(full)
    gates = {"cmp": 0.3, "sel": 0.6, "win": 0.5}
    recall = {"recall": 0.5, "recall_random": 0.4}
    write_selection(full, gates=gates, layers=3, changes=[recall, recall, {"entropy": math.nan}])
    assert main(["report", str(bare), str(full)]) == 0
    assert capsys.readouterr().out == f"{bare / 'report.md'}\n{full / 'report.md'}\n"
    assert plots(bare) == {"curves.png"}
    assert plots(full) == {"curves.png", "layers.png"}
    for run_dir, panels in ((bare, 5), (full, 6)):
        run = summarise(run_dir)
        drawn = curve_panels({"run": run})
        assert len(drawn) == panels
        assert [panel.title for panel in drawn if panel.logarithmic] == ["gradient norm"]
        marked = [panel.title for panel in drawn if panel.marked]
        assert marked == ["validation bits per byte"] * (panels == 6)
        assert pixels(run_dir / "report/curves.png", BLUE) > 300
    assert size(full / "report/curves.png") == size(bare / "report/curves.png")
    text = (full / "report.md").read_text()
    for name in plots(full):
        assert f"](report/{name})" in text
    assert "layers.png" not in (bare / "report.md").read_text()
    drawn = [panel for panel in _layer_panels(summarise(full)) if "entropy" in panel.title]
    values = {label: {*values} for label, (_, values) in drawn[0].curves.items()}
    assert values == {"layer 0": {0.7}, "layer 1": {0.6}}
    assert (drawn[0].ordered, drawn[0].fraction) == (True, True)


@undrawn
def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write_run(tmp_path, 20)
    with (tmp_path / "heartbeat_rank1.jsonl").open("ab") as file:
        file.truncate(200 * 10**9)
    with (tmp_path / "metrics.csv").open("a") as table_file:
        table_file.write("torn\n")
    run = table(write_report(tmp_path).read_text(), "Run")
    problems = "metrics.csv: 1 lines could not be read; heartbeat_rank1.jsonl cannot be read: "
    assert run["unreadable"][0].startswith(problems)
    assert run["steps"] == ["20"]


@undrawn
@pytest.mark.parametrize("steps", [20, 300])
def test_a_short_run_is_not_called_ready_for_production(steps: int, tmp_path: Path) -> None:
    write_run(tmp_path, steps=steps)
    for gate in (Gate("sanity", 1), Gate("production", steps)):
        result = judge_files(tmp_path, gate, LadderConfig())
        record_result(tmp_path, result)
    assert result.go, result.summary
    title = write_report(tmp_path).read_text().splitlines()[0]
    count = re.search(r"\d+ criteria met, \d+ not measured", result.summary)
    assert count is not None, result.summary
    short = f"Go for 20 steps, {count[0]}"
    assert title.endswith(short if steps == 20 else "Go at production")
    assert ("Go for 20 steps (" in result.summary) == (steps == 20)
    cell = compare_runs(read_runs([tmp_path]), tmp_path / "out.png")[1]
    assert cell.endswith("20 steps Go" if steps == 20 else "production Go")


def test_a_run_that_failed_before_its_first_step_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: [\n")
    text = write_report(tmp_path).read_text()
    assert ": not judged yet\n" in text
    assert table(text, "Run")["steps"] == ["0"]
    assert plots(tmp_path) == set()


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no config\.yaml, metrics\.csv or gates\.json"):
        write_report(tmp_path)
    write_metrics(tmp_path / "run", 20)
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"other: metrics\.csv cannot be read: No such file"):
        compare_runs(read_runs([tmp_path / "run", tmp_path / "other"]), tmp_path / "out.png")
    (tmp_path / "other/metrics.csv").write_text("step,loss\n1,nan\n")
    with pytest.raises(ValueError, match=r"metrics\.csv holds no finite figure of any run"):
        compare_runs(read_runs([tmp_path / "other"]), tmp_path / "out.png")


@pytest.mark.parametrize("steps", [99, 100])
def test_a_short_run_ends_without_pictures(steps: int, drawn: list[str], tmp_path: Path) -> None:
    write_metrics(tmp_path, 90)  # the last row that the disk took
    write_beats(tmp_path, beats(steps))
    text = write_report(tmp_path, "finished").read_text()
    assert drawn == ["curves.png"] * (steps == 100)
    assert table(text, "Run")["end"] == ["finished"]
    text = write_report(tmp_path).read_text()
    assert drawn == ["curves.png"] * (2 if steps == 100 else 1)
    assert table(text, "Run")["end"] == ["none recorded: still running, or killed"]
    assert table(text, "Run")["steps"] == [str(steps)]


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


@undrawn
def test_a_validation_loss_of_an_earlier_step_names_the_step(tmp_path: Path) -> None:
    write_metrics(tmp_path, 134)
    line = compare_runs(read_runs([tmp_path]), tmp_path / "out.png")[1]
    assert line.split()[1:7] == ["134", "3.022", "3.130", "(step", "100)", "1.130"]
    text = write_report(tmp_path).read_text()
    assert "| final training loss | 3.0224 |" in text
    assert "| final validation loss | 3.1300 (step 100) |" in text
    with (tmp_path / "metrics.csv").open("a") as metrics:
        metrics.write("135,inf" + 9 * "," + "\n")
    assert summarise(tmp_path).tokens_per_step == 4_096


def test_a_difference_that_makes_runs_incomparable_is_a_warning_with_its_meaning(
    drawn: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = RunConfig()
    for name, steps, tokens in (("a", 20, 4_096), ("b", 20, 4_096), ("c", 30, 8_192)):
        write_metrics(
            tmp_path / name, steps, change=lambda step, tokens=tokens: {"tokens": tokens * step}
        )
        (tmp_path / name / "config.yaml").write_text(to_yaml(config))
    runs = [str(tmp_path / name) for name in "abc"]
    assert main(["compare", *runs[:2], "--out=~/two.png"]) == 0
    output = capsys.readouterr()
    assert (output.out.splitlines()[-1], output.err) == (f"{tmp_path}/two.png", "")
    config.data.tokenizer, config.data.source, config.train.steps = "hf:gpt2", {"x": 1.0}, 30
    config.data.held_out = 0.1
    (tmp_path / "c" / "config.yaml").write_text(to_yaml(config))
    assert main(["compare", *runs]) == 0
    assert drawn == ["two.png", "compare.png"]
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


@undrawn
def test_a_run_given_twice_is_one_row_and_equal_names_become_paths(tmp_path: Path) -> None:
    write_metrics(tmp_path / "a" / "run", 20)
    write_metrics(tmp_path / "b" / "run", 20)
    write_metrics(tmp_path / "b" / "other", 20)
    runs = [tmp_path / name for name in ("a/run", "b/run", "a/run", "b/other")]
    lines = compare_runs(read_runs(runs), tmp_path / "out.png")
    assert len(lines) == 4
    for line, run in zip(lines[1:], (runs[0], runs[1], runs[3]), strict=True):
        assert line.startswith(str(run))


@undrawn
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
    columns = "run", "steps", "gate", "go", "loss", "memory_gb"
    assert [first[x] for x in columns] == ["a", 300, "production", False, 3.01, 10.0]
    assert [second[x] for x in columns[:4]] == ["b", 200, None, None]
    figures = [first[x] for x in ("val_loss", "bits_per_byte", "tokens_per_s")]
    assert figures == pytest.approx([3.11, 1.11, 1e6 / 7])
    (difference,) = tree["differences"]
    assert difference.startswith("steps taken differs, 300 in a; 200 in b: ")
    assert Path(tree["picture"]) == tmp_path / "compare.png"
