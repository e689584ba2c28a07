"""A run goes on on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.checkpoint.state_file import check_loadable
from nsa.checkpoint.universal import needs_universal, to_universal
from nsa.checkpoint.weights import find_weights, read_weights
from tests.ranks import launch


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved on one rank, gone on from on two, and the other way round."""
    folder = tmp_path_factory.mktemp("universal")
    worker = Path(__file__).with_name("universal_ranks.py")
    launch(worker, str(folder), "save=0,1", world_size=1)
    launch(worker, str(folder), "save=0,1,2", "go_on=0,1", world_size=2)
    launch(worker, str(folder), "save=2", "go_on=0,1,2", world_size=1)
    return folder


def read(root: Path, name: str) -> Any:
    return torch.load(root / f"{name}.pt", weights_only=True)


@pytest.mark.parametrize(("stage", "saved_on"), [(0, 1), (0, 2), (1, 1), (1, 2), (2, 2)])
def test_a_run_goes_on_on_another_number_of_ranks(root: Path, stage: int, saved_on: int) -> None:
    saved = read(root, f"{stage}_from_{saved_on}")
    loaded = read(root, f"{stage}_from_{saved_on}_on_{3 - saved_on}")
    assert torch.equal(loaded["weights"], saved["weights"])
    assert len(loaded["optimizer"]) == (6 if stage else 0)
    for before, after in zip(saved["optimizer"], loaded["optimizer"], strict=True):
        assert torch.equal(before, after)
    # The sum over samples is rounded in another order; a wrong moment or step count moves 1e-2.
    assert loaded["losses"] == pytest.approx(saved["losses"], rel=2e-3)
    assert loaded["losses"][0] == pytest.approx(saved["losses"][0], rel=1e-6)


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)])
def test_such_a_run_can_go_back_to_a_checkpoint_of_its_own(
    root: Path, stage: int, ranks: int
) -> None:
    first, again = read(root, f"{stage}_from_{ranks}"), read(root, f"{stage}_from_{ranks}_again")
    assert torch.equal(again["weights"], first["weights"])
    assert again["losses"] == first["losses"]


def test_the_converted_checkpoint_is_used_again_until_it_is_damaged(root: Path) -> None:
    saved = root / "1_from_2" / "step00000004"
    converted = to_universal(saved)
    assert needs_universal(saved, 1)
    assert not needs_universal(saved, 2)
    assert not needs_universal(converted, 1)
    one = next(converted.rglob("exp_avg.pt"))
    unchanged = converted.stat().st_mtime_ns
    to_universal(saved)
    assert converted.stat().st_mtime_ns == unchanged
    content = one.read_bytes()
    one.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    to_universal(saved)
    assert one.read_bytes() == content


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_the_weights_of_a_converted_checkpoint_are_those_of_the_other(
    root: Path, dtype: torch.dtype | None
) -> None:
    saved = root / "1_from_2" / "step00000004"
    wanted, found = (read_weights(find_weights(p), dtype) for p in (saved, to_universal(saved)))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_without_the_flag_another_number_of_ranks_is_refused_with_its_name() -> None:
    saved = {"layout": "1 or 2", "precision": "bf16", "ranks": 2}
    with pytest.raises(ValueError, match=r"saved with ranks 2.*has ranks 1.*--universal"):
        check_loadable(Path("step00000004"), saved, saved | {"ranks": 1})


def test_a_stage_that_is_not_converted_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"saved_under": {"layout": "3", "ranks": 2}}')
    with pytest.raises(ValueError, match=r"stage 3, which is not converted here; start 2 ranks"):
        to_universal(tmp_path)
