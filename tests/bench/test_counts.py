"""The commands of counts save what they print: operations and bytes, programs and balance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nsa.spec import NSASpec
from tests.bench.__main__ import main
from tests.bench.pairs import count
from tests.ranks import ROOT


def test_traffic_saves_both_models_and_their_totals(tmp_path: Path) -> None:
    out = tmp_path / "traffic.json"
    main(["traffic", "--micro-batch=1", "--seq-len=64", "--layers=1", "--vocab=64", f"--out={out}"])
    result = json.loads(out.read_text())
    for kind in ("nsa", "dense"):
        *parts, total = result[kind]
        assert total["part"] == "total"
        for figure in ("operations", "bytes", "launches", "launch_bytes"):
            assert total[figure] == sum(row[figure] for row in parts) > 0
    assert "seconds" not in total


def test_schedule_counts_the_programs_of_both_models(tmp_path: Path) -> None:
    """In a process of its own: kernels that the interpreter runs cannot be compiled."""
    out = tmp_path / "schedule.json"
    command = [sys.executable, "-m", "tests.bench", "schedule", "--micro-batch=1", "--seq-len=256"]
    cache = {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([*command, f"--out={out}"], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, **cache})  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    for kind, kernels in (("nsa", 6), ("dense", 2)):
        assert len(result[kind]) == kernels
        for row in result[kind]:
            assert row["programs"] > 0 < row["blocks per SM"]
            assert row["schedule/balanced"] >= 1
            assert row["schedule/balanced"] >= row["longest/balanced"]


def test_pairs_are_counted_by_the_union_of_a_tiles_blocks() -> None:
    index = torch.tensor([[[0, -1]]] * 4 + [[[0, 1]]] * 4 + [[[0, 2]]] * 3 + [[[1, 2]]])
    counted = count(index.int(), NSASpec(4, 4, 4, 2, 1, 1))
    needed = (1 + 2 + 3 + 4) * 3 + 4 * 8
    assert counted["tokens"] == 12
    assert counted["kept by the next query"] == pytest.approx(16 / 18)
    # Tiles of 5 queries visit 2, 3 and 3 blocks, of 10 queries 3 and 3, of 21 queries 3.
    unions = {"32 rows": 8 * 32, "64 rows": 6 * 64, "128 rows": 3 * 128}
    for name, rows in unions.items():
        assert counted[name] == pytest.approx(rows * 4 / (6 * needed)), name
    assert counted["keys' kernel"] == pytest.approx((2 + 1 + 1) * 64 * 4 / (6 * needed))
