"""CSV files, TensorBoard and progress lines: exact values, resumed runs, full disks."""

import csv
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from nsa.monitor.artifacts import read_table
from nsa.monitor.observer import SELECTOR_STATISTICS, BackgroundWriter, Observers, StepRecord
from nsa.monitor.outputs import (
    SELECTION_COLUMNS,
    CsvObserver,
    FallbacksCsv,
    Progress,
    TrackerObserver,
    metrics_csv,
    selection_csv,
)
from nsa.system import with_timeout
from tests.disks import files_no_longer_than
from tests.engine.runs import read_metrics
from tests.monitor.run_folders import (
    NO_FREE_BLOCKS,
    make_layers,
    make_record,
)
from tests.ranks import PATIENCE

HEADER = "step,tokens,loss,val_loss,bits_per_byte,lr,grad_norm,tokens_per_s,mfu,memory_gb,seconds"
REASON = 'it has no "float64", and commas'
Counts = dict[tuple[str, str, str], int]


def log(
    observer: CsvObserver, run_dir: Path, records: list[StepRecord], start_step: int = 0
) -> Path:
    observer.on_start(run_dir, start_step)
    for record in records:
        observer.on_step(record)
    return run_dir / observer.file_name


def healthy(step: int, layers: int = 2) -> StepRecord:
    return make_record(step, layers=make_layers(layers, overlap=step / 64))


def test_values_read_back_exactly_and_missing_ones_are_empty_cells(tmp_path: Path) -> None:
    full = make_record(2, val_loss=2 / 3, bits_per_byte=math.pi, mfu=0.1)
    warm_up = make_record(1, tokens_per_s=None, grad_norm=None, loss=float("inf"))
    text = log(metrics_csv(), tmp_path, [warm_up, full]).read_text()
    lines = text.splitlines()
    assert lines[0] == HEADER
    assert lines[1] == f"1,4096,inf,,,{1e-4 / 3!r},,,,{15.6 / 7!r},{1 / 3!r}"
    rows = read_metrics(tmp_path)
    assert [",".join(row) for row in rows] == [HEADER] * 2
    for row, record in zip(rows, [warm_up, full], strict=True):
        assert row == {column: getattr(record, column) for column in HEADER.split(",")}


@pytest.mark.parametrize("observer", [metrics_csv, selection_csv])
def test_the_table_of_a_resumed_run_is_that_of_an_uninterrupted_one(
    observer: Callable[[], CsvObserver], tmp_path: Path
) -> None:
    path = log(observer(), tmp_path, [healthy(step) for step in range(1, 9)])
    uninterrupted = path.read_text()
    log(observer(), tmp_path, [make_record(step, loss=9.0) for step in range(1, 7)])
    log(observer(), tmp_path, [healthy(step) for step in range(1, 7)])
    path.write_text(path.read_text() + "7,0,0.1")
    log(observer(), tmp_path, [healthy(step) for step in range(5, 9)], start_step=4)
    assert path.read_text() == uninterrupted


@pytest.mark.parametrize("content", ["precious\n", f"{HEADER}\n"])
def test_no_file_is_written_through_a_symbolic_link(content: str, tmp_path: Path) -> None:
    (target := tmp_path / "target").write_text(content)
    names = ("metrics.csv", "fallbacks.csv")
    for name in names:
        (tmp_path / name).symlink_to(target)
    log(metrics_csv(), tmp_path, [make_record(1)])
    fallbacks = FallbacksCsv(lambda: {("select", "triton", "no GPU"): 1})
    fallbacks.on_start(tmp_path, 0)
    fallbacks.on_end("finished")
    assert not any((tmp_path / name).is_symlink() for name in names), "replaced or moved aside"
    assert target.read_text() == content

    metrics = metrics_csv()
    metrics.on_start(tmp_path, 1)
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "metrics.csv").symlink_to(target)
    with pytest.raises(OSError, match="is a symbolic link"):
        metrics.on_step(make_record(2))
    assert target.read_text() == content


@pytest.mark.parametrize("start_step", [0, 1])
@pytest.mark.parametrize("header", ["time,loss", HEADER + ",more", HEADER[:-8], '{"step": 1}', "�"])
def test_a_file_with_other_columns_is_moved_and_never_written_into(
    header: str, start_step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = f"{header}\n1,2.0\n"
    for name in ("metrics.1.csv", "metrics.2.csv"):
        (tmp_path / "metrics.csv").write_text(theirs)
        observers = Observers([(metrics_csv(), BackgroundWriter("metrics.csv"))])
        observers.on_start(tmp_path, start_step)
        observers.on_step(make_record(2))
        observers.close()
        assert (tmp_path / name).read_text() == theirs
        assert [row["step"] for row in read_metrics(tmp_path)] == [2]
        assert f"metrics.csv: has other columns ({header[:20]}" in capsys.readouterr().err.replace(
            "'", ""
        )


def test_lines_that_are_no_rows_do_not_lose_the_file_and_no_pipe_blocks(tmp_path: Path) -> None:
    records = [make_record(step) for step in range(1, 3)]
    path = log(metrics_csv(), tmp_path, records[:1])
    expected = path.read_text()
    path.write_bytes(expected.encode() + b"\xff\xfe" + b"," * 10 + b"\n" + b"x" + b"," * 10 + b"\n")
    log(metrics_csv(), tmp_path, [], start_step=1)
    assert path.read_text() == expected
    path.unlink()
    os.mkfifo(path)
    metrics = metrics_csv()
    with pytest.raises(OSError, match="is no regular file"):
        with_timeout(PATIENCE, lambda: metrics.on_start(tmp_path, 1))
    metrics.on_step(make_record(2))  # writes nothing into what could not be read


def test_each_logged_step_has_one_row_per_layer_that_reads_back(tmp_path: Path) -> None:
    without_free = make_layers(1, **NO_FREE_BLOCKS)
    log(selection_csv(), tmp_path, [healthy(1), make_record(1_234_567, layers=without_free)])
    rows = read_table(tmp_path / "selection.csv").rows
    assert [(row["step"], row["layer"]) for row in rows] == [(1, 0), (1, 1), (1_234_567, 0)]
    second, last = rows[1], rows[2]
    assert [second[f"gate_{branch}"] for branch in ("cmp", "sel", "win")] == [0.125, 0.25, 0.375]
    assert second["gate_sel_std"] == pytest.approx(1 / 3, rel=1e-5)
    assert (second["choosing"], second["entropy"]) == (0.75, 0.5625)
    assert (second["overlap"], second["distance"]) == (1 / 64, 6.5)
    assert set(SELECTION_COLUMNS) - last.keys() == {"entropy", "overlap", "distance"}


def test_a_later_row_of_a_step_counts_and_lines_that_are_no_rows_are_counted(
    tmp_path: Path,
) -> None:
    (path := tmp_path / "metrics.csv").write_text(
        "step,loss\n2,5\n2,4\n1,6\ntorn\n1.5,3\n-1,3\n3,3"
    )
    table = read_table(path)
    assert table.rows == [{"step": 1, "loss": 6}, {"step": 2, "loss": 4}]
    assert table.problem == "metrics.csv: 3 lines could not be read"
    path.write_text("step,loss\n")
    assert read_table(path).problem == "metrics.csv holds no rows"
    path.write_text("loss,step\n5,2\n")
    assert read_table(path).problem == "metrics.csv: the first column is not 'step'"


def test_a_run_without_sparse_layers_gets_no_file(tmp_path: Path) -> None:
    log(selection_csv(), tmp_path, [make_record(1), make_record(2)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("observer", "part"),
    [(metrics_csv(), 20), (selection_csv(), 105)],  # of a row; one row and a half
    ids=["metrics", "selection"],
)
def test_a_step_that_does_not_fit_on_the_disk_writes_none_of_its_rows(
    observer: CsvObserver, part: int, tmp_path: Path
) -> None:
    path = log(observer, tmp_path, [healthy(1)])
    with (
        files_no_longer_than(path.stat().st_size + part),
        pytest.raises(OSError, match="bytes were written"),
    ):
        observer.on_step(healthy(2))
    observer.on_step(healthy(3))
    assert {row["step"] for row in read_table(path).rows} == {1, 3}
    assert len({line.count(",") for line in path.read_text().splitlines()}) == 1


def test_a_run_with_the_selector_loss_has_columns_for_it(tmp_path: Path) -> None:
    measured = {"selector_loss": 2.0, "recall": 0.5, "recall_random": 0.25}
    records = [make_record(1, layers=make_layers(1, **measured))]
    path = log(selection_csv(selector_loss=True), tmp_path, records)
    (row,) = read_table(path).rows
    assert measured.items() <= row.items()
    assert path.read_text().splitlines()[0].split(",")[-3:] == [*SELECTOR_STATISTICS]


def test_fallbacks_are_written_once_there_are_any_and_at_the_end(tmp_path: Path) -> None:
    counts: Counts = {}
    observer, path = FallbacksCsv(lambda: counts), tmp_path / "fallbacks.csv"

    def rows() -> list[list[str]]:
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        assert header == ["operation", "backend", "reason", "calls"]
        return rows

    observer.on_start(tmp_path, 0)
    observer.on_step(make_record(1))
    assert not path.exists(), "no fallback yet"
    observer.on_end("finished")
    assert rows() == []
    counts["window_attention", "triton", REASON] = 2
    counts["select_blocks", "triton", REASON] = 1
    observer.on_step(make_record(2))
    select, window = ["select_blocks", "triton", REASON], ["window_attention", "triton", REASON]
    assert rows() == [[*select, "1"], [*window, "2"]]
    for number, write in (
        (3, lambda: observer.on_step(make_record(4))),
        (4, lambda: observer.on_end("failed")),
    ):
        counts["window_attention", "triton", REASON] = number
        write()
        assert rows() == [[*select, "1"], [*window, str(number)]]
    path.unlink()
    observer.on_step(make_record(5))
    assert not path.exists(), "no count has changed"


Event = tuple[str, float, int]  # tag, value, x


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return {
        tag: [(point.step, point.value) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def read_texts(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Return the texts as the TEXT page shows them: this accumulator keeps all of them."""
    events = plugin_event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        tag.removesuffix("/text_summary"): [
            (one.step, one.tensor_proto.string_val[0].decode()) for one in events.Tensors(tag)
        ]
        for tag in events.Tags()["tensors"]
        if tag.endswith("/text_summary")
    }


class ScalarMonitor:
    """DeepSpeed's monitor without a process group."""

    def __init__(self, summary_writer: SummaryWriter) -> None:
        self.tb_monitor = SimpleNamespace(summary_writer=summary_writer)

    def write_events(self, event_list: Sequence[Event]) -> None:
        for event in event_list:
            self.tb_monitor.summary_writer.add_scalar(*event)
        self.tb_monitor.summary_writer.flush()


@contextmanager
def tracker(folder: Path, texts: dict[str, str], suffix: str = "") -> Iterator[TrackerObserver]:
    """An observer of one process that writes to TensorBoard in `folder`."""
    with SummaryWriter(str(folder), filename_suffix=suffix) as summary_writer:
        yield TrackerObserver(ScalarMonitor(summary_writer), {}, texts)


def test_the_event_files_hold_each_number_once(tmp_path: Path) -> None:
    texts = {"config.yaml": "model:\n  layers: 2\n", "ds_config.json": "{}\n"}
    with tracker(tmp_path / "tb", texts) as observer:
        observer.on_start(tmp_path, 0)
        for step in range(1, 4):
            versus = [{"tokens": 3, "teacher_loss": 1.0, "kl": 0.5}]
            versus += [{"tokens": 1, "teacher_loss": 3.0, "kl": 1.5}]
            evaluated = {"val_loss": 2.5, "bits_per_byte": 1.25, "versus_teacher": versus}
            evaluated = evaluated if step == 2 else {}
            warm = {"mfu": 0.125, "layers": make_layers(1)} if step > 1 else {"tokens_per_s": None}
            observer.on_step(make_record(step, skipped_steps=step - 1, **evaluated, **warm))
        observer.on_end("finished")
    scalars = read_scalars(tmp_path / "tb")
    single = pytest.approx  # event files hold float32
    steps = (1, 2, 3)
    assert scalars.pop("train/loss") == [(step, single(make_record(step).loss)) for step in steps]
    assert scalars.pop("train/skipped_steps") == [(1, 0), (2, 1), (3, 2)]
    layers = {tag: scalars.pop(tag) for tag in list(scalars) if "/layer" in tag}
    gates, rest = {"": (0, 0.125, 0.25), "_std": [1 / 3] * 3}, (2, 3)
    assert layers == {
        f"gates/layer00/{branch}{suffix}": [(step, single(values[place])) for step in rest]
        for suffix, values in gates.items()
        for place, branch in enumerate(("cmp", "sel", "win"))
    } | {
        "selection/layer00/choosing": [(step, 0.75) for step in rest],
        "selection/layer00/entropy": [(step, 0.5) for step in rest],
        "selection/layer00/overlap": [(step, 0.875) for step in rest],
        "selection/layer00/distance": [(step, 6.5) for step in rest],
    }
    assert scalars == {
        "train/lr": [(step, single(1e-4 / 3)) for step in steps],
        "train/grad_norm": [(step, single(0.3)) for step in steps],
        "eval/loss": [(2, 2.5)],
        "eval/bits_per_byte": [(2, 1.25)],
        "eval/teacher_loss": [(2, 1.5)],
        "eval/kl": [(2, 0.75)],
        "speed/tokens_per_s": [(step, single(1e6 / 7)) for step in (2, 3)],
        "speed/mfu": [(step, 0.125) for step in (2, 3)],
        "speed/step_seconds": [(step, single(1 / 3)) for step in steps],
        "memory/peak_gb": [(step, single(15.6 / 7)) for step in steps],
        "gates/cmp": [(step, 0) for step in (2, 3)],
        "gates/sel": [(step, 0.125) for step in (2, 3)],
        "gates/win": [(step, 0.25) for step in (2, 3)],
    }
    assert read_texts(tmp_path / "tb") == {
        "run/config.yaml": [(1, "```\nmodel:\n  layers: 2\n```")],
        "run/ds_config.json": [(1, "```\n{}\n```")],
    }


def test_steps_taken_again_are_shown_once(tmp_path: Path) -> None:
    """Three steps without a checkpoint, then ten, then again from step 6."""
    begun = ((0, [1, 2, 3]), (0, range(1, 11)), (6, range(7, 12)))
    for number, (start, taken) in enumerate(begun):
        texts = {"config.yaml": f"began at {start}\n"}
        with tracker(tmp_path / "tensorboard", texts, suffix=f".{number}") as observer:
            observer.on_start(tmp_path, start)
            for step in taken:
                observer.on_step(make_record(step, loss=start + step, layers=make_layers(1)))
            observer.on_end("preempted: SIGTERM" if start == 0 else "finished")
    points = read_scalars(tmp_path / "tensorboard")["train/loss"]
    assert points == [(step, step if step <= 6 else 6 + step) for step in range(1, 12)]
    assert read_texts(tmp_path / "tensorboard") == {
        "run/config.yaml": [(1, "```\nbegan at 0\n```"), (7, "```\nbegan at 6\n```")]
    }


def test_missing_values_have_no_scalar(tmp_path: Path) -> None:
    with tracker(tmp_path, {}) as observer:
        layers = make_layers(1, **NO_FREE_BLOCKS, gate_win=None)
        observer.on_step(make_record(1, layers=layers))
    tags = read_scalars(tmp_path)
    assert {tag for tag in tags if tag.startswith("selection/")} == {"selection/layer00/choosing"}
    assert {tag for tag in tags if tag.endswith(("/cmp", "/sel", "/win"))} == {
        f"gates/{layer}{branch}" for layer in ("", "layer00/") for branch in ("cmp", "sel")
    }


@pytest.mark.parametrize(
    ("status", "code"), [("finished", 0), ("no-go: smoke", 1), ("failed: an error", 1)]
)
def test_wandb_shows_whether_a_run_failed(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    client = SimpleNamespace(finish=lambda exit_code: ended.append(exit_code))
    monkeypatch.setitem(sys.modules, "wandb", client)
    TrackerObserver(SimpleNamespace(wandb_monitor=object()), {}, {}).on_end(status)
    assert ended == [code]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_fills_up_under_tensorboard_costs_events_and_not_the_run(
    tmp_path: Path,
) -> None:
    summary_writer = SummaryWriter(str(tmp_path / "tb"))
    writer = BackgroundWriter("TensorBoard")
    observers = Observers([(TrackerObserver(ScalarMonitor(summary_writer), {}, {}), writer)])
    observers.on_start(tmp_path, 0)
    for step in (1, 2, 3):
        observers.on_step(make_record(step))
    assert writer.flush(PATIENCE)
    (event_file,) = (tmp_path / "tb").iterdir()
    with files_no_longer_than(event_file.stat().st_size + 10):
        for step in (4, 5, 6):
            observers.on_step(make_record(step))
        assert writer.flush(PATIENCE)
    observers.close()
    with suppress(OSError):
        summary_writer.close()  # which ends its thread
    assert writer.failed > 0
    assert [step for step, _ in read_scalars(tmp_path / "tb")["train/loss"]] == [1, 2, 3]


Captured = pytest.CaptureFixture[str]


def show(
    records: list[StepRecord], run_dir: Path, capsys: Captured, status: str = "done"
) -> list[str]:
    """Return the lines of a run of 300 steps that ends after these."""
    progress = Progress(last_step=300)
    progress.on_start(run_dir, 0)
    for record in records:
        progress.on_step(record)
    progress.on_message("sa\x1bved")
    progress.on_end(status)
    return capsys.readouterr().out.splitlines()


def test_a_short_run_that_logs_every_step_prints_few_lines(
    tmp_path: Path, capsys: Captured
) -> None:
    records = [
        make_record(step, val_loss=2.5 if step == 101 else None, bits_per_byte=1.25, mfu=0.375)
        for step in range(1, 301)
    ]
    lines = show(records, tmp_path, capsys)
    steps = [line for line in lines if line.startswith("step ") and "/300" in line]
    first, validation, last = steps
    assert first.startswith("step 1/300  loss 1.6667  ")
    assert validation == (
        "step 101/300  loss 0.0485  val 2.5000  1.2500 bits/byte  142,857 tokens/s  MFU 37.5%  "
        "ETA 01:06"
    )
    assert last.startswith("step 300/300")
    assert "ETA 00:00" in last
    assert all("142,857 tokens/s" in line for line in steps)
    assert lines[-2:] == ["sa\\x1bved", "done"]


def test_the_last_step_of_a_run_that_ends_early_is_printed(
    tmp_path: Path, capsys: Captured
) -> None:
    records = [make_record(step) for step in range(1, 8)]
    lines = show(records, tmp_path, capsys)
    assert [line.split()[1] for line in lines if "/300" in line] == ["1/300", "7/300"]
    assert lines[-1] == "done"
    with redirect_stdout(io.TextIOWrapper(file := io.BytesIO())):
        Progress(last_step=300).on_message("saved")
        assert file.getvalue() == b"saved\n", "it does not wait for more lines"
    lines = show(records, tmp_path / "my run", capsys, "finished")
    assert lines[-4] == f"  nsa report '{tmp_path}/my run'"
    assert lines[-2] == f"  nsa export '{tmp_path}/my run' --to 'exports/my run'"


def test_a_line_is_printed_every_ten_seconds_with_the_rest_at_this_steps_speed(
    capsys: Captured,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        progress = Progress(last_step=1_000)
        for step, now in ((1, 0.0), (2, 9.0), (3, 10.0), (4, 19.0), (52, 19.5), (103, 20.0)):
            patch.setattr(time, "monotonic", lambda now=now: now)
            progress.on_step(make_record(step, seconds=7.0))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines] == ["1/1000", "3/1000", "103/1000"]
    assert [line[-1] for line in lines] == ["1:56:33", "1:56:19", "1:44:39"]
