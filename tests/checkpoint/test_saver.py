"""Saver with a real engine on two ranks: content, failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nsa.checkpoint import newest_valid, read_manifest, read_rank_state, read_state_file
from tests.checkpoint.conftest import Rows
from tests.checkpoint.test_manifest import FILES

Saved = tuple[Path, list[Rows]]


def test_a_checkpoint_holds_all_files_and_its_manifest_names_them(saved: Saved) -> None:
    root, _ = saved
    path, notes = newest_valid(root / "run")
    assert path == root / "run/step00000006"
    assert notes == []
    assert (root / "run/latest").read_text() == path.name
    manifest = read_manifest(path)
    assert (manifest["step"], manifest["ranks"], manifest["finite"]) == (6, 2, True)
    assert manifest["run"] == "a1"
    assert {*manifest["files"], "manifest.json"} == set(FILES)
    assert {item.name for item in path.iterdir()} == set(FILES)
    assert read_state_file(path).train_state == {"step": 6}
    assert [read_rank_state(path, rank) for rank in (0, 1)] == [{"cursor": 0}, {"cursor": 1}]


def test_on_saved_reports_each_checkpoint_and_its_stall_on_rank_0(saved: Saved) -> None:
    _, (first, second) = saved
    reported = first["two steps"]["saved"]
    assert [row[:2] for row in reported] == [[3, "step00000003"], [6, "step00000006"]]
    assert all(stall > 0 for *_, stall in reported)
    assert second["two steps"]["saved"] == []


def test_resumed_training_is_bit_identical_including_random_numbers(
    saved: Saved,
) -> None:
    _, ranks = saved
    for trials in ranks:
        assert trials["resume"]["same"]
        assert trials["resume"]["drawn"] == trials["resume"]["expected"]
    drawn = [trials["resume"]["drawn"] for trials in ranks]
    assert all(one != other for one, other in zip(*drawn, strict=True)), "each rank has its own"


def test_if_one_rank_cannot_write_all_raise_and_the_next_save_works(saved: Saved) -> None:
    for row in (trials["one rank"] for trials in saved[1]):
        assert row["error"].startswith("step00000002 was not saved: ")
        assert "rank_1_mp_rank_00_optim_states.pt: File too large; raise the limit" in row["error"]
        assert row["error"].endswith("; step00000001 is still good")
        assert row["left"] == ["latest", "step00000001", "zero_to_fp32.py"], "no draft is left"
        assert row["then"]["error"] is None
        assert row["then"]["newest"] == "step00000003"


@pytest.mark.parametrize(
    ("trial", "messages"),
    [
        ("disk full", ("No space left on device", "free some space", "checkpoint.keep")),
        ("read-only", ("Read-only file system", "fix the folder's permissions")),
    ],
)
def test_a_bad_disk_costs_one_checkpoint_and_no_more(
    saved: Saved, mounts: list[Path], trial: str, messages: tuple[str, ...]
) -> None:
    if not mounts:
        pytest.skip("needs root and a kernel that lets it mount a tmpfs")
    for trials in saved[1]:
        row: dict[str, Any] = trials[trial]
        assert row["before"]["error"] is None
        good = row["before"]["newest"]
        assert row["during"]["error"].startswith("step00000002 was not saved: ")
        for message in messages:
            assert message in row["during"]["error"]
        assert row["during"]["error"].endswith(f"; {good} is still good")
        assert row["during"]["newest"] == good
        assert row["during"]["notes"] == []
        assert not any(name.startswith(".") for name in row["during"]["left"])
        assert row["after"]["error"] is None
        assert row["after"]["newest"] == "step00000003"


def test_a_nan_on_one_rank_is_recorded_and_the_last_finite_checkpoint_is_kept(
    saved: Saved,
) -> None:
    for trials in saved[1]:
        row = trials["not finite"]
        assert row["left"] == ["step00000001", "step00000003"], "keep = 1, and the finite one"
        assert row["finite"] == [True, False]


def test_state_json_names_the_topology(saved: Saved) -> None:
    root, _ = saved
    text = (root / "run/step00000003/state.json").read_text()
    assert json.loads(text)["saved_under"] == {
        "layout": "1 or 2",
        "precision": "bf16",
        "ranks": 2,
    }
