"""Communication is measured on a real link between two network namespaces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.bench.__main__ import main
from tests.bench.comm import CONFIGS, Bench, CommCase
from tests.netns import link, link_obstacle
from tests.ranks import ROOT, WITHOUT_COMPILER

needs_link = pytest.mark.skipif(bool(link_obstacle()), reason=f"needs a link: {link_obstacle()}")
MEASURED = ROOT / "docs/benchmarks/comm.json"
TINY = {
    "vocab_size": 272,
    "layers": 2,
    "width": 128,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 64,
    "mlp_width": 512,
    "spec": {"block_len": 8, "block_stride": 4, "select_len": 8, "select_top": 4, "window": 12},
}
GBIT = 0.2


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch, link() as veth:
        for name, value in WITHOUT_COMPILER.items():
            patch.setenv(name, value)
        with closing(Bench(veth, [GBIT], TINY, tokens=32, compute=False)) as bench:
            yield bench


@needs_link
@pytest.mark.parametrize(
    ("case", "sent", "payload"),
    [
        (CommCase("zero1_pcie", 2, "bf16"), 3.0, 3.0),
        pytest.param(CommCase("zero1_pcie", 2, "fp32"), 5.0, 5.0, marks=pytest.mark.full),
        (CommCase("zero2_pcie", 2, "bf16"), 5.0, 5.0),
        (CommCase("zero3", 2, "bf16"), 6.0, 4.0),  # gloo's reduce-scatter is an all-reduce
    ],
    ids=str,
)
def test_the_link_carries_the_bytes_of_the_zero_stage(
    bench: Bench, case: CommCase, sent: float, payload: float
) -> None:
    (row,) = bench.measure(case)
    assert row["bytes_per_parameter_per_step"] == pytest.approx(sent, rel=0.02)
    assert row["payload_bytes_per_parameter_per_step"] == pytest.approx(payload, rel=0.02)
    total = row["bytes_per_parameter_per_step"] * row["parameters"]
    assert min(row["step_seconds_all"]) > 0.8 * total * 8 / GBIT / 1e9, "the link is not throttled"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_without_root_the_error_says_what_is_needed() -> None:
    os.seteuid(65_534)
    try:
        with pytest.raises(ValueError, match=r"needs root on Linux with ip and tc: .* as root"):
            main(["comm"])
    finally:
        os.seteuid(0)


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="ip and tc not found; install iproute2"):
        main(["comm"])


def test_the_page_has_the_measured_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["comm", "--show", str(MEASURED)])
    table = capsys.readouterr().out
    assert table.count("\n") == 2 + len(CONFIGS)
    assert table in (ROOT / "docs/benchmarks/communication.md").read_text()
