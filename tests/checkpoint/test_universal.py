"""Universal checkpoints: a run resumes on another number of ranks."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.checkpoint import universal
from nsa.checkpoint.state_file import (
    ANY_RANKS,
    Checkpoint,
    Topology,
    check_loadable,
    read_state_file,
)
from nsa.checkpoint.universal import needs_universal, to_universal
from nsa.checkpoint.weights import find_weights, read_weights
from tests.checkpoint.conftest import forked_converter
from tests.checkpoint.planted_code import rehash
from tests.disks import flip_a_bit
from tests.ranks import launch

full = pytest.mark.full


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Stage 1 saved on two ranks and resumed on one; with --full all stages, both ways."""
    folder = tmp_path_factory.mktemp("universal")
    jobs = [(2, "save=1"), (1, "resume=1")]
    if request.config.getoption("--full"):
        jobs = [(1, "save=0,1"), (2, "save=0,1,2", "resume=0,1"), (1, "resume=0,1,2")]
    for ranks, *arguments in jobs:
        worker = Path(__file__).with_name("universal_ranks.py")
        launch(worker, str(folder), *map(str, arguments), world_size=int(ranks))
        if arguments == ["save=1"]:
            with forked_converter():
                to_universal(read_state_file(folder / "1_from_2/step00000004"))
    return folder


def read(root: Path, name: str) -> Any:
    return torch.load(root / f"{name}.pt", weights_only=True)


@pytest.mark.parametrize(
    ("stage", "saved_on"),
    [(1, 2), *(pytest.param(*case, marks=full) for case in ((0, 1), (0, 2), (1, 1), (2, 2)))],
)
def test_a_run_resumes_on_another_number_of_ranks(root: Path, stage: int, saved_on: int) -> None:
    saved = read(root, f"{stage}_from_{saved_on}")
    loaded = read(root, f"{stage}_from_{saved_on}_on_{3 - saved_on}")
    assert torch.equal(loaded["weights"], saved["weights"])
    assert len(loaded["optimizer"]) == (6 if stage else 0)
    for before, after in zip(saved["optimizer"], loaded["optimizer"], strict=True):
        assert torch.equal(before, after)
    # Sums over samples round in another order; a wrong moment or step count changes 1e-2.
    assert loaded["losses"] == pytest.approx(saved["losses"], rel=2e-3)
    assert loaded["losses"][0] == pytest.approx(saved["losses"][0], rel=1e-6)


def test_the_converted_checkpoint_is_reused_until_it_is_damaged(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = read_state_file(root / "1_from_2" / "step00000004")
    result = to_universal(saved)
    converted = result.folder
    assert read_state_file(converted) == result
    one = next(converted.rglob("exp_avg.pt"))
    unchanged = converted.stat().st_mtime_ns
    to_universal(saved)
    assert converted.stat().st_mtime_ns == unchanged
    content = one.read_bytes()
    flip_a_bit(one)
    for module in ("nsa", "runpy", "deepspeed"):  # of someone who can write here
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    to_universal(saved)
    assert one.read_bytes() == content
    assert not (tmp_path / "ran").exists(), "the converter imported from the current directory"


def test_the_converted_form_of_other_content_is_not_reused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_universal(read_state_file(root / "1_from_2" / "step00000004"))
    saved = Path(shutil.copytree(root / "1_from_2", tmp_path / "copy")) / "step00000004"
    (saved / "state.json").write_text((saved / "state.json").read_text() + " ")
    rehash(saved)

    def convert(checkpoint: Path, converted: Path) -> None:
        raise ValueError("converted again")

    monkeypatch.setattr(universal, "_convert", convert)
    with pytest.raises(ValueError, match="converted again"):
        to_universal(read_state_file(saved))


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_converted_weights_equal_the_original(root: Path, dtype: torch.dtype | None) -> None:
    saved = root / "1_from_2" / "step00000004"
    converted = to_universal(read_state_file(saved)).folder
    expected, weights = (read_weights(find_weights(p), dtype) for p in (saved, converted))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_another_number_of_ranks_is_refused_with_the_flag_to_add() -> None:
    saved = Topology(layout="1 or 2", precision="bf16", ranks=2)
    with pytest.raises(ValueError, match=r"saved with world size 2.*has world size 1.*--universal"):
        check_loadable(Path("step00000004"), saved, replace(saved, ranks=1))
    whole = replace(saved, layout="0")  # in the file of rank 0
    check_loadable(Path("step00000004"), whole, replace(whole, ranks=1))


@pytest.mark.parametrize(
    ("layout", "saved_on", "needed"),
    [("1 or 2", 2, True), ("1 or 2", 1, False), ("1 or 2", ANY_RANKS, False), ("0", 2, False)],
)
def test_only_what_ranks_divided_is_converted_for_another_number_of_them(
    layout: str, saved_on: int | str, needed: bool
) -> None:
    saved = Checkpoint(Path("step00000004"), {}, Topology(layout, "bf16", saved_on))
    assert needs_universal(saved, ranks=1) == needed


def test_what_the_converter_cannot_read_is_refused(tmp_path: Path) -> None:
    saved_under = {"layout": "3", "precision": "bf16", "ranks": 2}
    (tmp_path / "state.json").write_text(json.dumps({"state": {}, "saved_under": saved_under}))
    with pytest.raises(ValueError, match="stage 3, which cannot be converted; start 2"):
        to_universal(read_state_file(tmp_path))
