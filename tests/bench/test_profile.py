"""`nsa bench profile`: time and launches by kernel, the busy fraction, names for Nsight Compute."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path

import pytest

from nsa.bench.__main__ import main
from nsa.bench.profile import Span, busy_ms, function_name, nsight_compute, summary
from nsa.bench.results import Report

# Two steps: "a" twice per step, of which one overlaps "b"; then a gap of 4 ms.
STEP = [("a", 0, 2), ("b", 1, 4), ("a", 4, 6)]
SPANS = [
    Span(name, 1000.0 * (start + shift), 1000.0 * (end + shift))
    for shift in (0, 10)
    for name, start, end in STEP
]


def test_times_and_launches_are_per_step_and_overlaps_count_once() -> None:
    result = summary(SPANS, steps=2)
    assert busy_ms(SPANS) == pytest.approx(12)
    assert result["busy_ms"] == pytest.approx(6)
    assert result["step_ms"] == pytest.approx(8)  # 16 ms from the first kernel to the last
    assert result["busy_fraction"] == pytest.approx(6 / 8)
    assert result["launches"] == 3
    assert [(kernel["name"], kernel["launches"], kernel["ms"]) for kernel in result["kernels"]] == [
        ("a", 2, pytest.approx(4)),
        ("b", 1, pytest.approx(3)),
    ]


def test_a_profile_without_kernels_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="recorded no kernel"):
        summary([], steps=2)


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("_window_forward", "_window_forward"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::F>(int, F)",
         "vectorized_elementwise_kernel"),
        ("void at::native::(anonymous namespace)::cat<unsigned int>(long)", "cat"),
        ("nvjet_tst_128x128_64x6_2x1_v_bz_TNN", "nvjet_tst_128x128_64x6_2x1_v_bz_TNN"),
        ("Memcpy DtoD (Device -> Device)", ""),
    ],
)  # fmt: skip
def test_nsight_compute_is_given_the_functions_plain_name(kernel: str, name: str) -> None:
    assert function_name(kernel) == name


NCU = """#!/usr/bin/env bash
case "$*" in *quick*) ;; *) exec sleep 30 ;; esac
while [ "$1" != --log-file ]; do shift; done
echo details > "$2"
"""


def test_nsight_compute_ends_at_the_limit_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ncu, out = tmp_path / "ncu", tmp_path / "p.json"
    ncu.write_text(NCU)
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    report = Report(Namespace(device="cpu", dtype=None, limit=2, out=out, arguments=[], tokens=64,
                              ncu=3))  # fmt: skip
    kernels = [{"name": name} for name in ("quick", "slow", "late")]
    nsight_compute({"kind": "nsa", "length": 64, "kernels": kernels}, report)
    assert report.seconds_left() > -5
    quick, slow, late = json.loads(out.read_text())["ncu"].items()
    assert quick == ("quick", "p-ncu-1.txt")
    assert slow[1].startswith("not finished after")
    assert late == ("late", "--limit 2 s over")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_is_profiled_and_its_trace_is_kept(tmp_path: Path, device: str) -> None:
    out = tmp_path / "profile.json"
    size = ["--lengths", "64", "--tokens", "64", "--layers", "1", "--vocab", "64"]
    flags = ["--device", device, "--backend", "blockwise", "--out", str(out)]
    main(["profile", *flags, *size, "--steps", "2"])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["launches"] > 100
    assert 0 < row["busy_fraction"] <= 1
    total = sum(kernel["ms"] for kernel in row["kernels"])
    assert 0 < row["busy_ms"] <= total * (1 + 1e-9)  # summed in another order
    assert (tmp_path / "profile-nsa-64.trace.json.gz").stat().st_size > 0
