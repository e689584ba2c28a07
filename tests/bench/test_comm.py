"""Communication is measured on a real link between two network namespaces."""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.bench.__main__ import main
from tests.bench.comm import CONFIGS, MODEL, Bench
from tests.netns import link, link_obstacle
from tests.ranks import ROOT, WITHOUT_COMPILER

needs_link = pytest.mark.skipif(bool(link_obstacle()), reason=f"needs a link: {link_obstacle()}")
MEASURED = ROOT / "docs/benchmarks/comm.json"
TINY = MODEL | {"layers": 2, "width": 128, "mlp_width": 512}
GBIT = 0.2


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch, link() as veth:
        for name, value in WITHOUT_COMPILER.items():
            patch.setenv(name, value)
        with closing(Bench(veth, [GBIT], TINY, tokens=32)) as bench:
            yield bench


@needs_link
@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "reduce_dtype", "sent", "payload"),
    [
        ("zero1_pcie", "bf16", 3.0, 3.0),
        ("zero1_pcie", "fp32", 5.0, 5.0),
        ("zero2_pcie", "bf16", 5.0, 5.0),
        ("zero3", "bf16", 6.0, 4.0),  # gloo's reduce-scatter is an all-reduce
    ],
)
def test_the_link_carries_the_bytes_of_the_zero_stage(
    bench: Bench, config: str, reduce_dtype: str, sent: float, payload: float
) -> None:
    (row,) = bench.measure(config, 2, reduce_dtype)
    assert row["bytes_per_parameter_per_step"] == pytest.approx(sent, rel=0.02)
    assert row["payload_bytes_per_parameter_per_step"] == pytest.approx(payload, rel=0.02)
    seconds = row["bytes_per_parameter_per_step"] * row["parameters"] * 8 / GBIT / 1e9
    assert min(row["step_seconds_all"]) > 0.8 * seconds, "the link is not throttled"
    exposed = row["step_seconds"] - row["compute_seconds"]
    assert row["exposed_seconds"] == pytest.approx(exposed, abs=2e-4) != row["step_seconds"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_without_root_the_error_says_what_is_needed() -> None:
    os.seteuid(65_534)
    try:
        with pytest.raises(ValueError, match=r"needs root on Linux with ip and tc: .* as root"):
            main(["comm"])
    finally:
        os.seteuid(0)


def test_the_page_has_the_measured_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["comm", "--show", str(MEASURED)])
    table = capsys.readouterr().out
    assert table.count("\n") == 2 + len(CONFIGS)
    assert table in (ROOT / "docs/benchmarks/communication.md").read_text()
