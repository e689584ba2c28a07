from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nsa.monitor.environment import DtypeReport
from tests.engine.runs import TINY, on_one_rank, succeed
from tests.ranks import ROOT


class Model(torch.nn.Module):
    """Two equal, recomputed bf16 layers and an fp32 head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2)).bfloat16()
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x.float()).sum()


def rows(path: Path) -> dict[str, list[str]]:
    cells = (line.split() for line in path.read_text().splitlines() if line)
    return {first: rest for first, *rest in cells}


def test_the_table_holds_the_dtypes_of_each_kind_of_module_and_no_hook_stays(
    tmp_path: Path,
) -> None:
    model, alone = Model(), Model()
    optimizer = torch.optim.AdamW(model.parameters())
    report = DtypeReport(model)
    for each in (model, alone):
        each(torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)).backward()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        assert torch.equal(mine.grad, other.grad), "the hooks change no number"
    optimizer.step()
    optimizer.zero_grad()
    report.write(tmp_path / "dtypes.txt", optimizer)
    table = rows(tmp_path / "dtypes.txt")
    assert table["layers.*"] == ["(2)", "Linear", "bfloat16", "bfloat16"]
    assert table["head"] == ["Linear", "float32", "float32"]
    assert table["updated"][-1] == "bfloat16+float32"
    assert table["exp_avg"] == ["bfloat16+float32"]
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_layers_with_different_dtypes_have_separate_rows(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    model[1].bfloat16()
    report = DtypeReport(model)
    report.write(tmp_path / "dtypes.txt", torch.optim.AdamW(model.parameters()))
    table = rows(tmp_path / "dtypes.txt")
    dtypes = {"0": "float32", "1": "bfloat16", "2": "float32"}
    assert {name: table[name] for name in "012"} == {
        name: ["Linear", dtype, "-"] for name, dtype in dtypes.items()
    }, "without a gradient"


@pytest.mark.parametrize(
    ("config", "accumulated"),
    [
        ("zero1_pcie", "float32"),
        pytest.param("zero2_overlap", "bfloat16", marks=pytest.mark.full),
        pytest.param("zero3", None, marks=pytest.mark.full),
    ],
)
def test_a_run_reports_the_dtypes_of_deepspeeds_wrapped_optimizers(
    config: str, accumulated: str | None, tmp_path: Path
) -> None:
    flags = ["--steps=1", "--run-dir=run", f"--deepspeed_config={ROOT}/ds_configs/{config}.json"]
    settings = ["--set=train.precision=bf16", "--set=data.source=synthetic"]
    succeed(on_one_rank("m7c.py", *TINY, *flags, *settings, folder=tmp_path))
    table = rows(tmp_path / "run/dtypes.txt")
    assert table["embed"] == ["Embedding", *["bfloat16"] * 2]
    assert table["blocks.*.mlp.down"] == ["(2)", "Linear", *["bfloat16"] * 2]
    assert table["updated"][-1] == "float32"
    assert table["exp_avg_sq"] == ["float32"]
    assert accumulated is None or table["accumulated"][-1] == accumulated
