"""Run folders of others: heartbeats, tables and JSON, as the watchdog and reports read them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from nsa.monitor.artifacts import read_rank
from nsa.report.report import draw_plots, summarise
from nsa.watchdog.hang_detector import HangDetector
from tests.fuzz.hostile import ESCAPE, damaged, files, mutated, run, time_limit, to_json
from tests.monitor.run_folders import make_beat, write_limits

PID = 2**22  # of no process
CSV = "step,tokens,loss,val_loss,bits_per_byte,lr,grad_norm,tokens_per_s,mfu,memory_gb,seconds\n"
ROW = "{},9,3.5,,,1e-4,0.5,100.0,,1.5,0.5\n"
GATE = {
    **{"gate": "sanity", "step": 1, "go": True, "time": "2026-01-01"},
    "criteria": [{"name": "a", "ok": True, "value": 1.5, "limit": "b", "evidence": "c"}],
}
ENV = {
    **{"world_size": 2, "recipe": "m7c", "profile": "demo", "git_commit": "ab", "host": "a"},
    **{"packages": {"torch": "2"}, "cpu": {"model": "b"}, "notes": ["c"], "cuda": None},
}


def look(folder: Path) -> None:
    """What a watchdog does twice a second."""
    with time_limit():
        HangDetector(folder).check({0: PID})


def test_any_heartbeat_is_read_in_time(fuzz: Callable[..., None], tmp_path: Path) -> None:
    write_limits(tmp_path)
    events = st.sampled_from(("start", "progress", "step_end", "end"))
    good = make_beat(
        0, pid=PID, loss=1.5, memory_gb=1.5, gpu_busy=0.5, backend="nccl", status=ESCAPE
    )
    lines = st.one_of(
        mutated(good).map(to_json),
        mutated(good).map(to_json),
        damaged(to_json(good)),
        events.map(lambda event: to_json({**good, "event": event})),
    )

    def check(written: list[bytes]) -> None:
        (tmp_path / "heartbeat_rank0.jsonl").write_bytes(b"\n".join(written) + b"\n")
        look(tmp_path)
        with time_limit():
            read_rank(tmp_path, 0)

    fuzz(check, 38, written=st.lists(lines, min_size=1, max_size=6))


def test_any_watchdog_limits_are_read_in_time(
    fuzz_file: Callable[..., None], tmp_path: Path
) -> None:
    write_limits(tmp_path)
    (tmp_path / "heartbeat_rank0.jsonl").write_bytes(to_json(make_beat(0, pid=PID)) + b"\n")
    tree = {"monitor": {"heartbeat": 1.0, "watch": {"compute": 20.0, "grace": 0.5}}}
    fuzz_file(tmp_path / "config.yaml", 15, files(tree), partial(look, tmp_path))


def test_any_file_of_a_run_is_reported_as_safe_markdown(
    fuzz: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without plots, which take seconds each; the test of metrics tables draws two."""
    monkeypatch.setattr("nsa.report.report.draw_plots", lambda run: [])
    (tmp_path / "metrics.csv").write_text(CSV + "".join(map(ROW.format, range(1, 30))))
    trees: dict[str, Any] = {
        "env.json": ENV,
        "gates.json": [GATE],
        "halt.json": {"reason": "a", "rank": 0},
        "ds_config.json": {"zero_optimization": {"stage": 1}},
        "config.yaml": {"model": {"layers": 2}, "data": {"source": "a"}},
    }
    parts = {name: (to_json(tree), files(tree)) for name, tree in trees.items()}
    table = b"operation,backend,reason,calls\na,b,c,3\n"
    parts["fallbacks.csv"] = table, damaged(table)

    def check(name: str, data: st.DataObject) -> None:
        for other, (intact, contents) in parts.items():
            (tmp_path / other).write_bytes(data.draw(contents) if other == name else intact)
        run("report", tmp_path)
        text = (tmp_path / "report.md").read_text()
        assert not [part for part in ("<script", "http://", "\x1b") if part in text]

    fuzz(check, 38, name=st.sampled_from(sorted(parts)), data=st.data())


def test_any_metrics_table_is_summarised_and_plotted_in_time(
    fuzz: Callable[..., None], tmp_path: Path
) -> None:
    table = (CSV + "".join(map(ROW.format, range(1, 40)))).encode()
    cells = st.sampled_from(("inf", "-1", "nan", "1e308", "", "x", "9" * 400, "1_0", "٣"))

    def check(content: bytes, row: list[str], drawn: bool) -> None:
        (tmp_path / "metrics.csv").write_bytes(content + ",".join(row).encode() + b"\n")
        look(tmp_path)
        with time_limit():
            run_summary = summarise(tmp_path)
            for column in CSV.strip().split(","):
                run_summary.last(column)
            if drawn:
                with contextlib.suppress(ValueError):  # numbers that no axis can show
                    draw_plots(run_summary)

    rows = st.lists(cells, min_size=11, max_size=11)
    contents = damaged(table) | st.just(table)
    fuzz(check, 15, content=contents, row=rows, drawn=st.just(False))
    fuzz(check, 2, content=contents, row=rows, drawn=st.just(True))


@pytest.mark.parametrize(
    "name", ["heartbeat_rank0.jsonl", "metrics.csv", "env.json", "gates.json", "config.yaml"]
)
def test_a_pipe_does_not_block(name: str, tmp_path: Path) -> None:
    write_limits(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    look(tmp_path)
    run("compare", tmp_path, "--out", tmp_path / "a.png")
    run("report", tmp_path)


def test_json_text_of_a_report_is_escaped(tmp_path: Path) -> None:
    html = "<img src=x onerror=alert(1)> [click](http://evil) ![x](http://evil/a.png) www.a WWW.a"
    env: dict[str, Any] = {**ENV, "recipe": html, "notes": [html, "a\n# b"]}
    (tmp_path / "env.json").write_text(json.dumps(env))
    gate = json.loads(json.dumps(GATE).replace('"b"', json.dumps(html)))
    (tmp_path / "gates.json").write_text(json.dumps([gate]))
    assert run("report", tmp_path) == 0
    text = (tmp_path / "report.md").read_text()
    for part in ("<img", " [click]", "http://", "www.", "\n# b"):
        assert part not in text.lower(), part
    assert text.count(r"&lt;img src=x onerror=alert(1)> \[click\](http:&#47;/evil)") == 3
