"""Saver with a real engine on two ranks: content, failures."""

from __future__ import annotations

from pathlib import Path

from nsa.checkpoint.commit import newest_valid, read_manifest
from nsa.checkpoint.state_file import Topology, read_state_file
from nsa.system import package_version
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
    assert (manifest["step"], manifest["ranks"]) == (6, 2)
    for package in ("torch", "deepspeed"):
        assert manifest[package] == package_version(package)
    assert {*manifest["files"], "manifest.json"} == set(FILES)
    assert {item.name for item in path.iterdir()} == set(FILES)
    state = read_state_file(path)
    assert (state.train_state, state.topology) == ({"step": 6}, Topology("1 or 2", "bf16", 2))


def test_every_rank_gets_the_folder_of_each_checkpoint(saved: Saved) -> None:
    for trials in saved[1]:
        assert trials["two steps"]["saved"] == ["step00000003", "step00000006"]


def test_resumed_training_is_bit_identical_including_random_numbers(saved: Saved) -> None:
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
        assert row["left"] == ["latest", "step00000001"], "no draft is left"
        assert row["latest"] == "step00000001"
        assert row["then"]["error"] is None
        assert row["then"]["newest"] == "step00000003"
        assert row["then"]["left"] == ["latest", "step00000003"], "keep = 1"
