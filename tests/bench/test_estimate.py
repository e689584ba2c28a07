"""The steps behind the estimates cover what the masks let through; the page has the last table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nsa.bench.estimate import STEPS, table
from nsa.bench.roofline import work
from nsa.bench.sass import Loop, loops_of
from nsa.bench.shapes import Shape
from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import Launch
from nsa.spec import NSASpec

ROOT = Path(__file__).parents[2]
SPEC, SEQ_LEN, SIZE = NSASpec(), 1500, 16
BRANCHES = {
    "compressed": {"LEN": SPEC.block_len, "STRIDE": SPEC.block_stride, "WINDOW": 0},
    "window": {"LEN": 1, "STRIDE": 1, "WINDOW": SPEC.window},
    "selected": {"SELECT": SPEC.select_len},
}


def computed(kernel: str, branch: str, rows: int, keys: int) -> float:
    """Operations of all steps over the least that one head needs."""
    constants: dict[str, Any] = {"GROUP": 1, "KEY": SIZE, "VALUE": SIZE, **BRANCHES[branch]}
    constants |= {"ROWS": rows, "KEYS": keys, "QUERIES": rows}
    constants |= {"ADD": False} if kernel == "queries" else {}
    family = "band" if branch != "selected" else "selected"
    name = f"{family}_{kernel}_kernel"
    steps = STEPS[name](Launch(None, (1, 1, 1), {}, constants, Config(rows, keys, 4, 1)), SEQ_LEN)
    needed = {item.kernel: item for item in work(Shape("", 1, 1, SIZE, SIZE), 1, SEQ_LEN, SPEC)}
    return 2 * sum(steps.turns) * steps.multiply_adds / needed[f"{branch} {kernel}"].flops


@pytest.mark.parametrize("kernel", ["forward", "queries", "keys"])
@pytest.mark.parametrize("branch", ["compressed", "window"])
def test_tiles_of_one_compute_what_is_needed_and_larger_ones_more(branch: str, kernel: str) -> None:
    assert computed(kernel, branch, 1, 1) == pytest.approx(1, abs=1e-9)
    assert 1.02 < computed(kernel, branch, 16, 16) < computed(kernel, branch, 128, 64) < 2


def test_a_query_alone_walks_its_own_blocks_and_neighbours_share_some() -> None:
    alone = computed("forward", "selected", 1, 64)
    assert 1 < alone < 1.1  # but for the part of its own block that lies behind it
    some = computed("forward", "selected", 8, 64)
    assert alone < some < 8


def test_a_loop_is_read_unit_by_unit() -> None:
    code = """
.L_x_1:
        /*0000*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0010*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0020*/              @!P0 FFMA R1, R2, R3, R1 ;
        /*0030*/                   MUFU.EX2 R1, R1 ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R3], [R4.64] ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
        /*0060*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
"""
    assert loops_of(code, "sm_80", warps=4) == [
        Loop(
            6,
            {
                "products": 4 * 16 * 8 * 16 / 1024,
                "issue": 6.0,
                "float": 4 * 32 / 64,
                "integer": 0.0,
                "exp": 4 * 32 / 16,
                "shared": 4 * 2 * 512 / 128,
                "L2": 4 * 512 / (5120 / 108),
            },
        )
    ]
    hopper = code.replace("HMMA.16816.F32.BF16", "HGMMA.64x128x16.F32.BF16")
    assert loops_of(hopper, "sm_90", warps=4)[0].cycles["products"] == 64 * 128 * 16 / 2048


def test_the_page_has_the_table_of_the_last_run() -> None:
    rows = json.loads((ROOT / "docs/benchmarks/estimate.json").read_text())["rows"]
    page = (ROOT / "docs/kernels.md").read_text()
    for case in (("m7c", 2048), ("64x4x128", 65_536)):
        mine = [row for row in rows if (row["shape"], row["seq_len"]) == case]
        assert table(mine).strip() in page
