"""Saving a real engine on two ranks: what is kept, and what trouble costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nsa.checkpoint import (
    newest_complete,
    read_manifest,
    read_rank_state,
    read_topology,
    read_train_state,
)
from tests.checkpoint.conftest import Rows

Saved = tuple[Path, list[Rows]]


def test_a_checkpoint_holds_everything_and_says_so(saved: Saved) -> None:
    root, _ = saved
    path, notes = newest_complete(root / "foreground")
    assert path == root / "foreground/step00000006"
    assert notes == []
    assert (root / "foreground/latest").read_text() == path.name
    about = read_manifest(path)
    assert (about["step"], about["ranks"], about["finite"]) == (6, 2, True)
    assert set(about["files"]) == {
        *(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)),
        *(f"rng_rank{rank}.pt" for rank in (0, 1)),
        *(f"rank{rank}.json" for rank in (0, 1)),
        "mp_rank_00_model_states.pt",
        "state.json",
        "config.yaml",
        "ds_config.json",
    }
    assert {item.name for item in path.iterdir()} == {*about["files"], "manifest.json"}
    assert read_train_state(path) == {"step": 6}
    assert read_topology(path)["ranks"] == 2
    assert [read_rank_state(path, rank) for rank in (0, 1)] == [{"place": 0}, {"place": 1}]


def test_writing_in_the_background_changes_no_bit(saved: Saved) -> None:
    root, _ = saved
    for step in ("step00000003", "step00000006"):
        names = read_manifest(root / "foreground" / step)["files"]
        assert names == read_manifest(root / "background" / step)["files"]


def test_rank_0_hears_of_each_checkpoint_and_how_long_training_stood_still(saved: Saved) -> None:
    _, (first, second) = saved
    told = first["both ways"]["saved"]
    assert [row[:2] for row in told] == [[3, "step00000003"], [6, "step00000006"]] * 2
    assert all(stall > 0 for *_, stall in told)
    assert first["both ways"]["failed"] == second["both ways"]["saved"] == []


def test_training_goes_on_from_a_checkpoint_bit_for_bit_random_numbers_included(
    saved: Saved,
) -> None:
    _, ranks = saved
    for told in ranks:
        assert told["resume"]["same"]
        assert told["resume"]["drawn"] == told["resume"]["expected"]
    drawn = [told["resume"]["drawn"] for told in ranks]
    assert all(one != other for one, other in zip(*drawn, strict=True)), "each rank has its own"


@pytest.mark.parametrize("mode", ["foreground", "background"])
def test_where_one_rank_cannot_write_all_raise_and_the_next_save_works(
    saved: Saved, mode: str
) -> None:
    _, ranks = saved
    rows = [told[f"one rank, {mode}"] for told in ranks]
    for row in rows:
        assert row["error"].startswith("step00000002 was not saved: ")
        assert "rank_1_mp_rank_00_optim_states.pt: File too large" in row["error"]
        assert row["error"].endswith("; step00000001 is still good")
        assert row["left"] == ["latest", "step00000001", "zero_to_fp32.py"], "no draft is left"
        assert row["then"]["error"] is None
        assert row["then"]["newest"] == "step00000003"
    assert rows[0]["told"] == ([rows[0]["error"]] if mode == "background" else [])


def test_a_failure_that_comes_out_later_is_told_and_the_next_step_is_saved(saved: Saved) -> None:
    _, (first, second) = saved
    assert first["told late"]["error"] is None
    assert first["told late"]["newest"] == "step00000002"
    assert len(first["told late"]["told"]) == 1
    assert first["told late"]["told"][0].startswith("step00000001 was not saved: ")
    assert second["told late"]["told"] == []


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("disk full", ("No space left on device", "free some space", "checkpoint.keep")),
        ("read-only", ("Read-only file system", "fix the folder's permissions")),
    ],
)
def test_a_bad_disk_costs_one_checkpoint_and_no_more(
    saved: Saved, mounts: list[Path], trouble: str, words: tuple[str, ...], background: bool
) -> None:
    if not mounts:
        pytest.skip("needs root and a kernel that lets it mount a tmpfs")
    for told in saved[1]:
        row: dict[str, Any] = told[trouble][f"background {background}"]
        assert row["before"]["error"] is None
        good = row["before"]["newest"]
        assert row["during"]["error"].startswith("step00000002 was not saved: ")
        for word in words:
            assert word in row["during"]["error"]
        assert row["during"]["error"].endswith(f"; {good} is still good")
        assert row["during"]["newest"] == good
        assert row["during"]["notes"] == []
        assert not any(name.startswith(".") for name in row["during"]["left"])
        assert row["after"]["error"] is None
        assert row["after"]["newest"] == "step00000003"


def test_a_nan_on_one_rank_is_seen_and_the_last_finite_checkpoint_outlives_keep(
    saved: Saved,
) -> None:
    for told in saved[1]:
        row = told["not finite"]
        assert row["left"] == ["step00000001", "step00000003"], "keep = 1, and the finite one"
        assert row["finite"] == [True, False]
        assert row["newest"] == ["step00000003", "step00000001"]


def test_states_are_written_as_people_can_read_them(saved: Saved) -> None:
    root, _ = saved
    text = (root / "foreground/step00000003/state.json").read_text()
    assert json.loads(text)["saved_under"] == {
        "layout": "1 or 2",
        "precision": "bf16",
        "ranks": 2,
    }
