"""Saver with a real engine on two ranks, and every kind of damage to its checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa.checkpoint.commit import manifest_text, newest_valid, read_manifest
from nsa.checkpoint.saver import engine_topology
from nsa.checkpoint.state_file import Topology, read_state_file
from nsa.system import package_version
from tests.checkpoint.conftest import Rows
from tests.disks import flip_a_bit, truncate

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


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_the_topology_of_an_engine_has_its_stage_and_precision(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa.checkpoint.saver.dist.get_world_size", lambda: 3)
    engine = SimpleNamespace(
        bfloat16_enabled=lambda: precision == "bf16",
        fp16_enabled=lambda: precision == "fp16",
        zero_optimization_stage=lambda: 2,
    )
    assert engine_topology(engine) == Topology("1 or 2", precision, 3)


def test_every_rank_gets_the_folder_of_each_checkpoint(saved: Saved) -> None:
    for trials in saved[1]:
        assert trials["two_steps"]["saved"] == ["step00000003", "step00000006"]
        assert trials["two_steps"]["copied"] == [], "there may be no memory for a copy of weights"


def test_resumed_training_is_bit_identical_including_random_numbers(saved: Saved) -> None:
    _, ranks = saved
    for trials in ranks:
        assert trials["resume"]["same"]
        assert trials["resume"]["kept"], "settings of the optimizer, which a checkpoint holds too"
        assert trials["resume"]["drawn"] == trials["resume"]["expected"]
    drawn = [trials["resume"]["drawn"] for trials in ranks]
    assert all(one != other for one, other in zip(*drawn, strict=True)), "each rank has its own"


def test_if_one_rank_cannot_write_all_raise_and_the_next_save_works(saved: Saved) -> None:
    for row in (trials["one_rank_fails"] for trials in saved[1]):
        assert row["error"].startswith("step00000002 was not saved: ")
        assert "rank_1_mp_rank_00_optim_states.pt: File too large; raise the limit" in row["error"]
        assert row["error"].endswith("; step00000001 is still good")
        assert row["left"] == ["latest", "step00000001"], "no draft is left"
        assert row["latest"] == "step00000001"
        assert row["then"]["error"] is None
        assert row["then"]["newest"] == "step00000003"
        assert row["then"]["left"] == ["latest", "step00000003"], "keep = 1"
        assert row["unpruned"]["error"] is None, "rank 0 still meets the others"
        assert row["unpruned"]["left"] == ["latest", "step00000003", "step00000004"]


FILES = (
    "manifest.json",
    "state.json",
    "mp_rank_00_model_states.pt",
    "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "rng_rank0.pt",
    "rng_rank1.pt",
    "config.yaml",
    "ds_config.json",
)


@pytest.fixture
def folder(saved: tuple[Path, list[Rows]], tmp_path: Path) -> Path:
    """A copy of a real folder with two checkpoints, to damage."""
    return Path(shutil.copytree(saved[0] / "run", tmp_path / "checkpoints"))


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_its_checkpoint_skipped(
    folder: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(folder / "step00000006" / name)
    path, (note,) = newest_valid(folder)
    assert path == folder / "step00000003"
    assert note.startswith(f"step00000006: {name} ")
    damage(folder / "step00000003" / name)
    path, notes = newest_valid(folder)
    assert path is None
    assert [note.split(":")[0] for note in notes] == ["step00000006", "step00000003"]


@pytest.mark.parametrize(
    ("forge", "problem"),
    [
        (lambda m: m.update(step=3), "has step = 3: not the folder's"),
        (lambda m: m.update(step="soon"), "cannot be read"),
        (lambda m: m.update(files=list(m["files"])), "cannot be read"),
        (lambda m: m.update(ranks=float("inf")), "cannot be read"),
        (lambda m: m.update(ranks=0), "has ranks = 0: must be 1 to"),
        (lambda m: m.update(ranks=10**15), "has ranks = 1000000000000000: must be 1 to"),
        (lambda m: m.update(time="1e5"), "cannot be read"),
        (lambda m: m["files"].update({"a\0": m["files"]["state.json"]}), "cannot be read"),
        (lambda m: m.update(files={}), "does not name rng_rank0.pt"),
        (lambda m: m["files"].pop("rng_rank1.pt"), "does not name rng_rank1.pt"),
        (lambda m: m["files"].pop("state.json"), "does not name state.json"),
        (lambda m: m.pop("ranks"), "cannot be read"),
        (lambda m: m["files"]["state.json"].update(bytes=-1), "cannot be read"),
        (lambda m: m["files"]["state.json"].pop("sha256"), "cannot be read"),
        *(
            (
                lambda m, name=name: m["files"].update({name: {"bytes": 12, "sha256": ""}}),
                f"names {name}, outside its folder",
            )
            for name in ("../latest", "/etc/passwd")
        ),
    ],
)
def test_an_inconsistent_manifest_is_refused_though_its_own_hash_is_right(
    folder: Path, forge: Callable[[dict[str, Any]], object], problem: str
) -> None:
    path = folder / "step00000006/manifest.json"
    content = json.loads(path.read_text())
    content.pop("sha256")
    forge(content)
    path.write_text(manifest_text(content))
    newest, (note,) = newest_valid(folder)
    assert newest == folder / "step00000003"
    assert problem in note


def test_an_edited_manifest_and_other_content_are_refused(folder: Path) -> None:
    hashed = json.loads(manifest_text({"step": 1, "files": {}}))["sha256"]
    assert hashed[:16] == "1f324a0d8b13b2fa", "earlier versions wrote it"
    path = folder / "step00000006/manifest.json"
    edited = path.read_text().replace('"step": 6', '"step": 7')
    for text, problem in (
        (edited, "was changed after it was written: its hash differs"),
        *((text, "cannot be read: ") for text in ("[]", "{}", "", '{"files": 3}', "\x00\x00")),
    ):
        path.write_text(text)
        newest, (note,) = newest_valid(folder)
        assert newest == folder / "step00000003"
        assert note.startswith(f"step00000006: manifest.json {problem}")


@pytest.mark.parametrize("latest", [None, "", "step00000099", "step00000003", "../..", "\x00"])
def test_latest_is_not_read(folder: Path, latest: str | None) -> None:
    (folder / "latest").unlink()
    if latest is not None:
        (folder / "latest").write_text(latest)
    assert newest_valid(folder) == (folder / "step00000006", [])


def test_other_names_are_ignored(folder: Path) -> None:
    for name in (".step00000009.partial", "step00000009.universal", "mine"):
        shutil.copytree(folder / "step00000006", folder / name)
    (folder / "step00000010").write_text("a file")
    flip_a_bit(folder / "step00000003/state.json")  # older ones are not read
    assert newest_valid(folder) == (folder / "step00000006", [])


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("state", None),
        ("saved_under", None),
        *(("saved_under", {"layout": layout}) for layout in ("4", 1)),
        ("saved_under", {"precision": "fp8"}),
        *(("saved_under", {"ranks": ranks}) for ranks in (0, 65_537, "all", True, 2.0)),
        ("tokenizer", {"name": 3}),
        *(("state", {"step": step}) for step in (-1, True, "3", 2**62)),
    ],
)
def test_a_state_file_of_something_else_is_refused(
    section: str, changes: dict[str, Any] | None, tmp_path: Path
) -> None:
    content: dict[str, Any] = {
        "state": {"step": 3},
        "saved_under": {"layout": "1 or 2", "precision": "bf16", "ranks": 2},
        "tokenizer": {"name": "byte", "fingerprint": "a1"},
    }
    (tmp_path / "state.json").write_text(json.dumps(content))
    assert read_state_file(tmp_path).step == 3
    content[section] = changes and content[section] | changes
    (tmp_path / "state.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"state\.json.*; use another"):
        read_state_file(tmp_path).step  # noqa: B018 (which checks it)
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(ValueError, match=r"not the JSON of a checkpoint: .*; use another$"):
        read_state_file(tmp_path)
